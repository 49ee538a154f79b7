// Unpacking with AVX2, FMA and F16C, chunk by chunk.
#pragma once

#include <immintrin.h>

#include "common.h"

namespace {

static inline __m256 flushed(__m256 values, bool flush) {
    if (!flush) return values;
    const __m256i bits = _mm256_castps_si256(values), exponent = _mm256_set1_epi32((int)kInfinityBits);
    const __m256i tiny = _mm256_cmpeq_epi32(_mm256_and_si256(bits, exponent), _mm256_setzero_si256());
    const __m256i sign = _mm256_and_si256(bits, _mm256_set1_epi32((int)0x80000000u));
    return _mm256_castsi256_ps(_mm256_blendv_epi8(bits, sign, tiny));
}

static inline __m256i bfloat16_dwords(__m256 values) {
    const __m256i bits = _mm256_castps_si256(values);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    return _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd), 16);
}

// 16 floats as 16 numbers of 16 bits.
static inline __m256i halves_of(__m256 low, __m256 high, const BFloat16*) {
    const __m256i mixed = _mm256_packus_epi32(bfloat16_dwords(low), bfloat16_dwords(high));
    return _mm256_permute4x64_epi64(mixed, 0xd8);
}

static inline __m256i halves_of(__m256 low, __m256 high, const Float16*) {
    constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return _mm256_setr_m128i(_mm256_cvtps_ph(low, kNearest), _mm256_cvtps_ph(high, kNearest));
}

// The 16 possible results of a block are worked out once, and their low and high bytes looked up apart.
template <class Out>
struct Unpack4 {
    static constexpr int kChunk = 32;

    Unpack4(const float* codebook, bool flush)
        : low_(_mm256_loadu_ps(codebook)), high_(_mm256_loadu_ps(codebook + 8)), flush_(flush) {}

    void set_scale(float scale) {
        const __m256 factor = _mm256_set1_ps(scale);
        const __m256 low = flushed(_mm256_mul_ps(low_, factor), flush_);
        const __m256 high = flushed(_mm256_mul_ps(high_, factor), flush_);
        const __m256i table = halves_of(low, high, static_cast<const Out*>(nullptr));
        const __m256i mask = _mm256_set1_epi16(0xff);
        low_bytes_ = ordered(_mm256_and_si256(table, mask));
        high_bytes_ = ordered(_mm256_srli_epi16(table, 8));
    }

    void chunk(const uint8_t* in, Out* out) const {
        const __m128i mask = _mm_set1_epi8(15), bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(in));
        const __m128i first = _mm_and_si128(_mm_srli_epi16(bytes, 4), mask), second = _mm_and_si128(bytes, mask);
        const __m256i codes = _mm256_setr_m128i(_mm_unpacklo_epi8(first, second), _mm_unpackhi_epi8(first, second));
        const __m256i low = _mm256_shuffle_epi8(low_bytes_, codes), high = _mm256_shuffle_epi8(high_bytes_, codes);
        const __m256i even = _mm256_unpacklo_epi8(low, high), odd = _mm256_unpackhi_epi8(low, high);
        __m256i* to = reinterpret_cast<__m256i*>(out);
        _mm256_storeu_si256(to, _mm256_permute2x128_si256(even, odd, 0x20));
        _mm256_storeu_si256(to + 1, _mm256_permute2x128_si256(even, odd, 0x31));
    }

  private:
    // 16 words below 256 as 16 bytes, the same in both lanes.
    static __m256i ordered(__m256i words) {
        return _mm256_permute4x64_epi64(_mm256_packus_epi16(words, words), 0x88);
    }

    __m256 low_, high_;
    __m256i low_bytes_, high_bytes_;
    bool flush_;
};

template <>
struct Unpack4<float> {
    static constexpr int kChunk = 8;

    Unpack4(const float* codebook, bool flush)
        : low_(_mm256_loadu_ps(codebook)), high_(_mm256_loadu_ps(codebook + 8)), flush_(flush) {}

    void set_scale(float scale) {
        low_table_ = flushed(_mm256_mul_ps(low_, _mm256_set1_ps(scale)), flush_);
        high_table_ = flushed(_mm256_mul_ps(high_, _mm256_set1_ps(scale)), flush_);
    }

    void chunk(const uint8_t* in, float* out) const {
        const __m256i bytes = _mm256_cvtepu8_epi64(_mm_cvtsi32_si128(load(reinterpret_cast<const int32_t*>(in), 0)));
        const __m256i shifts = _mm256_setr_epi32(4, 0, 4, 0, 4, 0, 4, 0);
        const __m256i codes = _mm256_srlv_epi32(_mm256_shuffle_epi32(bytes, 0xa0), shifts);
        const __m256 upper = _mm256_castsi256_ps(_mm256_slli_epi32(codes, 28));  // bit 3 of the code as the sign
        const __m256 low = _mm256_permutevar8x32_ps(low_table_, codes);
        const __m256 high = _mm256_permutevar8x32_ps(high_table_, codes);
        _mm256_storeu_ps(out, _mm256_blendv_ps(low, high, upper));
    }

  private:
    __m256 low_, high_, low_table_, high_table_;
    bool flush_;
};

static inline void store_16(float* out, __m256 low, __m256 high) {
    _mm256_storeu_ps(out, low);
    _mm256_storeu_ps(out + 8, high);
}

template <class Out>
static inline void store_16(Out* out, __m256 low, __m256 high) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), halves_of(low, high, out));
}

template <class Out>
struct Unpack8 {
    static constexpr int kChunk = 16;

    Unpack8(const float* codebook, bool) : codebook_(codebook) {}

    void set_scale(float scale) { scale_ = _mm256_set1_ps(scale); }

    void chunk(const uint8_t* in, Out* out) const { store_16(out, eight(in), eight(in + 8)); }

  private:
    __m256 eight(const uint8_t* in) const {
        float values[8];
        for (int i = 0; i < 8; i++) values[i] = load(codebook_, in[i]);  // gathering is no faster, on AMD slower
        return _mm256_mul_ps(_mm256_loadu_ps(values), scale_);
    }

    const float* codebook_;
    __m256 scale_;
};

}  // namespace
