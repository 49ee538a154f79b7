// Packing with AVX2, FMA and F16C.
#include <immintrin.h>

#include "kernels.h"
#include "common.h"

namespace {

constexpr int kChunk = 32;

static inline __m256 eight(const float* weight) { return _mm256_loadu_ps(weight); }

static inline __m256 eight(const BFloat16* weight) {
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(weight));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}

static inline __m256 eight(const Float16* weight) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(weight)));
}

// `max` returns its second operand if the first is a NaN.
static inline __m256 clamped(__m256 x) {
    return _mm256_min_ps(_mm256_max_ps(x, _mm256_set1_ps(-1.0f)), _mm256_set1_ps(1.0f));
}

// 32 numbers below 256 in four registers of dwords, as bytes in order.
static inline __m256i bytes_of(__m256i a, __m256i b, __m256i c, __m256i d) {
    const __m256i mixed = _mm256_packus_epi16(_mm256_packus_epi32(a, b), _mm256_packus_epi32(c, d));
    return _mm256_permutevar8x32_epi32(mixed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}

class Magnitudes {
  public:
    template <class In>
    void chunk(const In* weight) {
        for (int i = 0; i < kChunk; i += 8) {
            const __m256i bits = _mm256_castps_si256(eight(weight + i));
            most_ = _mm256_max_epu32(most_, _mm256_and_si256(bits, _mm256_set1_epi32(0x7fffffff)));
        }
    }

    uint32_t most() const {
        __m128i most = _mm_max_epu32(_mm256_castsi256_si128(most_), _mm256_extracti128_si256(most_, 1));
        most = _mm_max_epu32(most, _mm_shuffle_epi32(most, 0x4e));
        most = _mm_max_epu32(most, _mm_shuffle_epi32(most, 0xb1));
        return (uint32_t)_mm_cvtsi128_si32(most);
    }

  private:
    __m256i most_ = _mm256_setzero_si256();
};

// How many of 15 sorted bounds are less than x, by bisection. A register holds the 1, 2, 4 or 8 bounds that a level
// may compare with; the count so far, divided by the distance between them, is the index of the one.
class Pack4 {
  public:
    Pack4(const float* bounds, const uint8_t* codes)
        : codes_(_mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)))) {
        for (int level = 0; level < 4; level++) {
            float step[8] = {};
            for (int i = 0; i < 1 << level; i++) step[i] = load(bounds, (8 >> level) * (2 * i + 1) - 1);
            steps_[level] = _mm256_loadu_ps(step);
        }
    }

    void set_factor(float factor) { factor_ = _mm256_set1_ps(factor); }

    template <class In>
    void chunk(const In* weight, uint8_t* packed) const {
        const __m256i less = bytes_of(less_than(eight(weight)), less_than(eight(weight + 8)),
                                      less_than(eight(weight + 16)), less_than(eight(weight + 24)));
        const __m256i codes = _mm256_shuffle_epi8(codes_, less);
        const __m256i words = _mm256_maddubs_epi16(codes, _mm256_set1_epi16(0x0110));  // first * 16 + second
        const __m256i bytes = _mm256_permute4x64_epi64(_mm256_packus_epi16(words, words), 0x88);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(packed), _mm256_castsi256_si128(bytes));
    }

  private:
    __m256i less_than(__m256 weight) const {
        const __m256 x = clamped(_mm256_mul_ps(weight, factor_));
        __m256i index = _mm256_setzero_si256();
        for (int level = 0; level < 4; level++) {
            const __m256 bound = _mm256_permutevar8x32_ps(steps_[level], index);
            const __m256i above = _mm256_castps_si256(_mm256_cmp_ps(bound, x, _CMP_LT_OQ));
            index = _mm256_sub_epi32(_mm256_add_epi32(index, index), above);  // `above` is -1 where true
        }
        return index;
    }

    __m256i codes_;
    __m256 steps_[4];
    __m256 factor_;
};

class Pack8 {
  public:
    explicit Pack8(const uint8_t* nearest) : nearest_(nearest) {}

    void set_factor(float factor) { factor_ = _mm256_set1_ps(factor); }

    template <class In>
    void chunk(const In* weight, uint8_t* packed) const {
        for (int i = 0; i < kChunk; i += 8) {
            const __m256 x = clamped(_mm256_mul_ps(eight(weight + i), factor_));
            const __m256 half = _mm256_mul_ps(_mm256_add_ps(x, _mm256_set1_ps(1.0f)), _mm256_set1_ps(0.5f));
            const __m256 place = _mm256_fmadd_ps(half, _mm256_set1_ps(65535.0f), _mm256_set1_ps(0.5f));
            uint32_t index[8];
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(index), _mm256_cvttps_epi32(place));
            for (int j = 0; j < 8; j++) packed[i + j] = nearest_[index[j]];
        }
    }

  private:
    const uint8_t* nearest_;
    __m256 factor_;
};

}  // namespace

#include "quantize.inc"

int hf_qmoe_quantize_4bit_avx2(uint8_t* packed, float* absmax, const void* weight, int dtype, const float* bounds,
                               const uint8_t* codes, int64_t count, int64_t blocksize, int threads) {
    return quantize<4>(Pack4(bounds, codes), packed, absmax, weight, dtype, count, blocksize, threads);
}

int hf_qmoe_quantize_8bit_avx2(uint8_t* packed, float* absmax, const void* weight, int dtype, const uint8_t* nearest,
                               int64_t count, int64_t blocksize, int threads) {
    return quantize<8>(Pack8(nearest), packed, absmax, weight, dtype, count, blocksize, threads);
}
