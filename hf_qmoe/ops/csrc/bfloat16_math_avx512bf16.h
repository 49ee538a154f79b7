// Products of pairs of bfloat16 with AVX512-BF16, added in float.
#pragma once

#include "float_math_avx512.h"

namespace {

// As Unpack4<BFloat16>, but a table is rounded by the instruction for it, which takes subnormal values for zeros.
class Unpack4Rounded {
  public:
    static constexpr int kChunk = 32;

    Unpack4Rounded(const float* codebook, bool) : codebook_(_mm512_loadu_ps(codebook)) {}

    void set_scale(float scale) {
        const __m512 values = _mm512_mul_ps(codebook_, _mm512_set1_ps(scale));
        table_ = (__m512i)_mm512_cvtne2ps_pbh(values, values);  // twice the same: bit 4 of an index does not matter
    }

    void chunk(const uint8_t* in, BFloat16* out) const {
        _mm512_storeu_si512(out, _mm512_permutexvar_epi16(codes_32(in), table_));
    }

    // The values of a group, even columns and then odd ones, as the halves of bytes are: fewer instructions than in order.
    void split(const uint8_t* in, __m512i (&out)[2]) const {
        const __m512i bytes = _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(in)));
        out[0] = _mm512_permutexvar_epi16(_mm512_srli_epi16(bytes, 4), table_);
        out[1] = _mm512_permutexvar_epi16(bytes, table_);
    }

    void split(const uint8_t* in, BFloat16* out) const {
        __m512i values[2];
        split(in, values);
        for (int i = 0; i < 2; i++) _mm512_storeu_si512(out + 32 * i, values[i]);
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
    static constexpr int kLanes = 32, kTokens = 6, kDirectTokens = 6;
    static constexpr bool kSplits = true;

    static void look_up(const Unpack4& unpack, const uint8_t* in, Vector (&out)[2]) {
        __m512i values[2];
        unpack.split(in, values);
        for (int i = 0; i < 2; i++) out[i] = (__m512bh)values[i];
    }

    static Vector load(const Elem* from) { return (__m512bh)_mm512_loadu_si512(from); }
    static Sum zero() { return _mm512_setzero_ps(); }
    static Sum dot(Sum sum, Vector weights, Vector row) { return _mm512_dpbf16_ps(sum, weights, row); }
    static Sum add(Sum a, Sum b) { return _mm512_add_ps(a, b); }
    static void store_sums(const Sum (&sums)[4], float* out) { FloatMath::store_sums(sums, out); }
};

}  // namespace
