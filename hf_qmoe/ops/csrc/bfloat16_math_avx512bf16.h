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

    __m512i look_up(const uint8_t* in) const { return _mm512_permutexvar_epi16(codes_32(in), table_); }

    void chunk(const uint8_t* in, BFloat16* out) const { _mm512_storeu_si512(out, look_up(in)); }

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

    static void look_up(const Unpack4& unpack, const uint8_t* in, Vector (&out)[2]) {
        for (int i = 0; i < 2; i++) out[i] = (__m512bh)unpack.look_up(in + 16 * i);
    }

    static Vector load(const Elem* from) { return (__m512bh)_mm512_loadu_si512(from); }
    static Sum zero() { return _mm512_setzero_ps(); }
    static Sum dot(Sum sum, Vector weights, Vector row) { return _mm512_dpbf16_ps(sum, weights, row); }
    static Sum add(Sum a, Sum b) { return _mm512_add_ps(a, b); }
    static void store_sums(const Sum (&sums)[4], float* out) { FloatMath::store_sums(sums, out); }
};

}  // namespace
