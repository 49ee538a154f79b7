// Products of pairs of bfloat16 with AVX512-BF16, added in float.
#pragma once

#include "float_math_avx512.h"

namespace {

// As Unpack4<BFloat16>, but a table is rounded by the instruction for it: subnormal values become zeros.
class Unpack4Rounded {
  public:
    static constexpr int kChunk = 32;

    Unpack4Rounded(const float* codebook, bool) : codebook_(_mm512_loadu_ps(codebook)) {}

    void set_scale(float scale) {
        table_ = twice((__m256i)_mm512_cvtneps_pbh(_mm512_mul_ps(codebook_, _mm512_set1_ps(scale))));
    }

    void chunk(const uint8_t* in, BFloat16* out) const {
        _mm512_storeu_si512(out, _mm512_permutexvar_epi16(codes_32(in), table_));
    }

  private:
    __m512 codebook_;
    __m512i table_;
};

struct BFloat16Math {
    using Elem = BFloat16;
    using Vector = __m512bh;
    using Sum = __m512;
    using Unpack4 = Unpack4Rounded;
    using Unpack8 = ::Unpack8<BFloat16>;
    static constexpr int kLanes = 32, kTokens = 6, kDirectTokens = 3;

    // The codebook is rounded, the scale is not.
    class Direct4 {
      public:
        explicit Direct4(const float* codebook)
            : table_(twice((__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(codebook)))) {}
        void get(const uint8_t* in, Vector (&out)[2]) const {
            out[0] = (__m512bh)_mm512_permutexvar_epi16(codes_32(in), table_);
            out[1] = (__m512bh)_mm512_permutexvar_epi16(codes_32(in + 16), table_);
        }

      private:
        __m512i table_;
    };

    static Vector load(const Elem* from) { return (__m512bh)_mm512_loadu_si512(from); }
    static Sum zero() { return _mm512_setzero_ps(); }
    static Sum dot(Sum sum, Vector weights, Vector row) { return _mm512_dpbf16_ps(sum, weights, row); }
    static Sum scaled(Sum total, Sum block, float scale) { return FloatMath::scaled(total, block, scale); }
    static void store_sums(const Sum (&sums)[4], float* out) { FloatMath::store_sums(sums, out); }
};

}  // namespace
