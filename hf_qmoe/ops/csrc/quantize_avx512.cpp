// Packing with AVX-512 (F, BW, DQ, VL, VBMI: Intel from Ice Lake, AMD from Zen 4).
#include <immintrin.h>

#include "kernels.h"
#include "common.h"

namespace {

constexpr int kChunk = 64;

static inline __m512 sixteen(const float* weight) { return _mm512_loadu_ps(weight); }

static inline __m512 sixteen(const BFloat16* weight) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(weight));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}

static inline __m512 sixteen(const Float16* weight) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(weight)));
}

// `max` returns its second operand if the first is a NaN.
static inline __m512 clamped(__m512 x) {
    return _mm512_min_ps(_mm512_max_ps(x, _mm512_set1_ps(-1.0f)), _mm512_set1_ps(1.0f));
}

class Magnitudes {
  public:
    template <class In>
    void chunk(const In* weight) {
        for (int i = 0; i < kChunk; i += 16) {
            const __m512i bits = _mm512_castps_si512(sixteen(weight + i));
            most_ = _mm512_max_epu32(most_, _mm512_and_si512(bits, _mm512_set1_epi32(0x7fffffff)));
        }
    }

    uint32_t most() const { return _mm512_reduce_max_epu32(most_); }

  private:
    __m512i most_ = _mm512_setzero_si512();
};

// How many of 15 sorted bounds are less than x, by bisection. The next bound to compare with is looked up by the count
// so far; `steps_` hold it at that index.
class Pack4 {
  public:
    Pack4(const float* bounds, const uint8_t* codes)
        : codes_(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)))) {
        const __m512 sorted = _mm512_maskz_loadu_ps(0x7fff, bounds);
        const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        for (int level = 0; level < 4; level++) {
            const __m512i middle = _mm512_add_epi32(lanes, _mm512_set1_epi32((8 >> level) - 1));
            steps_[level] = _mm512_permutexvar_ps(_mm512_and_si512(middle, _mm512_set1_epi32(15)), sorted);
        }
    }

    void set_factor(float factor) { factor_ = _mm512_set1_ps(factor); }

    template <class In>
    void chunk(const In* weight, uint8_t* packed) const {
        for (int i = 0; i < kChunk; i += 16) {
            const __m512i code = codes(_mm512_mul_ps(sixteen(weight + i), factor_));
            // Two codes in a quadword: the lower one is first and belongs in the upper half of the byte.
            const __m512i pair = _mm512_or_si512(_mm512_slli_epi64(code, 4), _mm512_srli_epi64(code, 32));
            const __m128i bytes = _mm512_cvtepi64_epi8(pair);
            _mm_storel_epi64(reinterpret_cast<__m128i*>(packed + i / 2), bytes);
        }
    }

  private:
    __m512i codes(__m512 x) const {
        x = clamped(x);
        __m512i less = _mm512_setzero_si512();
        for (int level = 0; level < 4; level++) {
            const __m512 bound = _mm512_permutexvar_ps(less, steps_[level]);
            const __mmask16 above = _mm512_cmp_ps_mask(bound, x, _CMP_LT_OQ);
            less = _mm512_mask_or_epi32(less, above, less, _mm512_set1_epi32(8 >> level));
        }
        return _mm512_permutexvar_epi32(less, codes_);
    }

    __m512i codes_;
    __m512 steps_[4];
    __m512 factor_;
};

class Pack8 {
  public:
    explicit Pack8(const uint8_t* nearest) : nearest_(nearest) {}

    void set_factor(float factor) { factor_ = _mm512_set1_ps(factor); }

    template <class In>
    void chunk(const In* weight, uint8_t* packed) const {
        for (int i = 0; i < kChunk; i += 16) {
            const __m512 x = clamped(_mm512_mul_ps(sixteen(weight + i), factor_));
            const __m512 half = _mm512_mul_ps(_mm512_add_ps(x, _mm512_set1_ps(1.0f)), _mm512_set1_ps(0.5f));
            const __m512 place = _mm512_fmadd_ps(half, _mm512_set1_ps(65535.0f), _mm512_set1_ps(0.5f));
            uint32_t index[16];
            _mm512_storeu_si512(index, _mm512_cvttps_epi32(place));
            for (int j = 0; j < 16; j++) packed[i + j] = nearest_[index[j]];  // faster than gathering
        }
    }

  private:
    const uint8_t* nearest_;
    __m512 factor_;
};

}  // namespace

#include "quantize.inc"

int hf_qmoe_quantize_4bit_avx512(uint8_t* packed, float* absmax, const void* weight, int dtype, const float* bounds,
                                 const uint8_t* codes, int64_t count, int64_t blocksize, int threads) {
    return quantize<4>(Pack4(bounds, codes), packed, absmax, weight, dtype, count, blocksize, threads);
}

int hf_qmoe_quantize_8bit_avx512(uint8_t* packed, float* absmax, const void* weight, int dtype, const uint8_t* nearest,
                                 int64_t count, int64_t blocksize, int threads) {
    return quantize<8>(Pack8(nearest), packed, absmax, weight, dtype, count, blocksize, threads);
}
