// Unpacking with AVX-512 (F, BW, DQ, VL, VBMI: Intel from Ice Lake, AMD from Zen 4), chunk by chunk.
#pragma once

#include <immintrin.h>

#include "common.h"

namespace {

static inline __m512 flushed(__m512 values, bool flush) {
    const __m512i bits = _mm512_castps_si512(values);
    const __mmask16 tiny = flush ? _mm512_testn_epi32_mask(bits, _mm512_set1_epi32((int)kInfinityBits)) : 0;
    return _mm512_castsi512_ps(_mm512_mask_and_epi32(bits, tiny, bits, _mm512_set1_epi32((int)0x80000000u)));
}

// Bits of which the upper half is `values` in bfloat16, rounded to nearest even. Not the instruction for it: that one
// takes subnormal numbers for zeros.
static inline __m512i rounded_to_bfloat16(__m512 values) {
    const __m512i bits = _mm512_castps_si512(values);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    return _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
}

// 16 values in the upper or lower half; as 32 twice the same, so that bit 4 of an index does not matter.
static inline __m512i twice(__m256i table) { return _mm512_broadcast_i64x4(table); }

static inline __m512i table_of(__m512 values, const BFloat16*) {
    return twice(_mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded_to_bfloat16(values), 16)));
}

static inline __m512i table_of(__m512 values, const Float16*) {
    return twice(_mm512_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

// The 32 codes in 16 bytes, at the bottom of a word each. `multishift` puts the eight bits from any bit offset of a
// quadword into each of its bytes, so one of them lines up the codes of several bytes, high half first. What lies above
// the four bits is not looked at.
static inline __m512i codes_32(const uint8_t* in) {
    const __m512i pairs = _mm512_cvtepu16_epi64(_mm_loadu_si128(reinterpret_cast<const __m128i*>(in)));
    return _mm512_multishift_epi64_epi8(_mm512_set1_epi64(0x0008000c00000004), pairs);
}

// The 16 possible results of a block are worked out once; weights are then table lookups.
template <class Out>
struct Unpack4 {
    static constexpr int kChunk = 32;

    Unpack4(const float* codebook, bool flush) : codebook_(_mm512_loadu_ps(codebook)), flush_(flush) {}

    void set_scale(float scale) {
        const __m512 values = flushed(_mm512_mul_ps(codebook_, _mm512_set1_ps(scale)), flush_);
        table_ = table_of(values, static_cast<const Out*>(nullptr));
    }

    void chunk(const uint8_t* in, Out* out) const {
        _mm512_storeu_si512(out, _mm512_permutexvar_epi16(codes_32(in), table_));
    }

  private:
    __m512 codebook_;
    __m512i table_;
    bool flush_;
};

// The 16 codes in 8 bytes, at the bottom of a dword each.
static inline __m512i codes_16(const uint8_t* in) {
    // Quadword k takes bits 8k + 4 (to its low dword) and 8k (to its high dword).
    const __m512i offsets = _mm512_setr_epi32(4, 0, 12, 8, 20, 16, 28, 24, 36, 32, 44, 40, 52, 48, 60, 56);
    return _mm512_multishift_epi64_epi8(offsets, _mm512_set1_epi64(load(reinterpret_cast<const int64_t*>(in), 0)));
}

template <>
struct Unpack4<float> {
    static constexpr int kChunk = 32;

    Unpack4(const float* codebook, bool flush) : codebook_(_mm512_loadu_ps(codebook)), flush_(flush) {}

    void set_scale(float scale) { table_ = flushed(_mm512_mul_ps(codebook_, _mm512_set1_ps(scale)), flush_); }

    __m512 look_up(const uint8_t* in) const { return _mm512_permutexvar_ps(codes_16(in), table_); }

    void chunk(const uint8_t* in, float* out) const {
        _mm512_storeu_ps(out, look_up(in));
        _mm512_storeu_ps(out + 16, look_up(in + 8));
    }

  private:
    __m512 codebook_, table_;
    bool flush_;
};

static inline void store_32(float* out, __m512 low, __m512 high) {
    _mm512_storeu_ps(out, low);
    _mm512_storeu_ps(out + 16, high);
}

static inline void store_32(BFloat16* out, __m512 low, __m512 high) {
    const __m512i odd_words = _mm512_set_epi16(63, 61, 59, 57, 55, 53, 51, 49, 47, 45, 43, 41, 39, 37, 35, 33,  //
                                               31, 29, 27, 25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
    const __m512i first = rounded_to_bfloat16(low), second = rounded_to_bfloat16(high);
    _mm512_storeu_si512(out, _mm512_permutex2var_epi16(first, odd_words, second));
}

static inline void store_32(Float16* out, __m512 low, __m512 high) {
    constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), _mm512_cvtps_ph(low, kNearest));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + 16), _mm512_cvtps_ph(high, kNearest));
}

// Of a table of 256 floats, each of their four bytes makes a table of 256 bytes that four registers hold. 64 codes are
// looked up in each, then the bytes are put together again. Gathering from memory takes several times as long.
template <class Out>
struct Unpack8 {
    static constexpr int kChunk = 64;

    Unpack8(const float* codebook, bool) {
        for (int byte = 0; byte < 4; byte++) {
            uint8_t plane[256];
            for (int code = 0; code < 256; code++) plane[code] = (uint8_t)(bits_of(load(codebook, code)) >> 8 * byte);
            for (int part = 0; part < 4; part++) planes_[byte][part] = _mm512_loadu_si512(plane + 64 * part);
        }
    }

    void set_scale(float scale) { scale_ = _mm512_set1_ps(scale); }

    void chunk(const uint8_t* in, Out* out) const {
        // Interleaving works within 128-bit lanes. With the dwords transposed first, 16 neighbours come out together.
        const __m512i transpose = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
        const __m512i codes = _mm512_permutexvar_epi32(transpose, _mm512_loadu_si512(in));
        const __mmask64 upper = _mm512_movepi8_mask(codes);
        const __m512i byte0 = look_up(planes_[0], codes, upper), byte1 = look_up(planes_[1], codes, upper);
        const __m512i byte2 = look_up(planes_[2], codes, upper), byte3 = look_up(planes_[3], codes, upper);
        const __m512i low01 = _mm512_unpacklo_epi8(byte0, byte1), high01 = _mm512_unpackhi_epi8(byte0, byte1);
        const __m512i low23 = _mm512_unpacklo_epi8(byte2, byte3), high23 = _mm512_unpackhi_epi8(byte2, byte3);
        store_32(out, scaled(_mm512_unpacklo_epi16(low01, low23)), scaled(_mm512_unpackhi_epi16(low01, low23)));
        store_32(out + 32, scaled(_mm512_unpacklo_epi16(high01, high23)),
                 scaled(_mm512_unpackhi_epi16(high01, high23)));
    }

  private:
    static __m512i look_up(const __m512i* plane, __m512i codes, __mmask64 upper) {
        return _mm512_mask_blend_epi8(upper, _mm512_permutex2var_epi8(plane[0], codes, plane[1]),
                                      _mm512_permutex2var_epi8(plane[2], codes, plane[3]));
    }

    __m512 scaled(__m512i bits) const { return _mm512_mul_ps(_mm512_castsi512_ps(bits), scale_); }

    __m512i planes_[4][4];
    __m512 scale_;
};

}  // namespace
