// Products of pairs of bfloat16 with AVX512-BF16, added in float.
#pragma once

#include "float_math_avx512.h"

namespace {

// 16 values as a table that codes are looked up in, rounded by the instruction for it, which takes subnormal values for
// zeros. Twice the same: bit 4 of an index does not matter.
static inline __m512i table_of(__m512 values) { return (__m512i)_mm512_cvtne2ps_pbh(values, values); }

// The values of a group by their codes, even columns and then odd ones, as the halves of bytes are: fewer instructions
// than in order.
static inline void look_up_split(__m512i table, const uint8_t* in, __m512i (&out)[2]) {
    const __m512i bytes = _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(in)));
    out[0] = _mm512_permutexvar_epi16(_mm512_srli_epi16(bytes, 4), table);
    out[1] = _mm512_permutexvar_epi16(bytes, table);
}

// As Unpack4<BFloat16>, but a table is rounded by the instruction for it, which takes subnormal values for zeros.
class Unpack4Rounded {
  public:
    static constexpr int kChunk = 32;

    Unpack4Rounded(const float* codebook, bool) : codebook_(_mm512_loadu_ps(codebook)) {}

    void set_scale(float scale) {
        table_ = table_of(_mm512_mul_ps(codebook_, _mm512_set1_ps(scale)));
    }

    void chunk(const uint8_t* in, BFloat16* out) const {
        _mm512_storeu_si512(out, _mm512_permutexvar_epi16(codes_32(in), table_));
    }

    void split(const uint8_t* in, BFloat16* out) const {
        __m512i values[2];
        look_up_split(table_, in, values);
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
    static constexpr int kLanes = 32, kTokens = 6, kDirectTokens = 3;
    static constexpr bool kSplits = true;

    // Weights before they are scaled: one table for all blocks. Their sums are multiplied with the scale in float.
    class Table {
      public:
        explicit Table(const PackedStack& stack)
            : table_(table_of(_mm512_loadu_ps(stack.short_codebook))), factor_(::load(stack.short_codebook, 16)) {}

        void look_up(const uint8_t* in, __m512i (&out)[2]) const { look_up_split(table_, in, out); }
        float factor() const { return factor_; }

      private:
        __m512i table_;
        float factor_;
    };
    static constexpr bool kScalesSums = true;

    static void look_up(const Table& table, const uint8_t* in, Vector (&out)[2]) {
        __m512i values[2];
        table.look_up(in, values);
        for (int i = 0; i < 2; i++) out[i] = (__m512bh)values[i];
    }

    static Sum scaled(Sum sum, float scale) { return _mm512_mul_ps(sum, _mm512_set1_ps(scale)); }
    static Sum add_scaled(Sum total, Sum sum, float scale) {
        return _mm512_fmadd_ps(sum, _mm512_set1_ps(scale), total);
    }

    static Vector load(const Elem* from) { return (__m512bh)_mm512_loadu_si512(from); }
    static Sum zero() { return _mm512_setzero_ps(); }
    static Sum dot(Sum sum, Vector weights, Vector row) { return _mm512_dpbf16_ps(sum, weights, row); }
    static Sum add(Sum a, Sum b) { return _mm512_add_ps(a, b); }
    static void store_sums(const Sum (&sums)[4], float* out) { FloatMath::store_sums(sums, out); }
};

}  // namespace
