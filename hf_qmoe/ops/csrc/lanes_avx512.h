// A register of floats, with AVX-512 F and BW: loaded from and rounded to every dtype, at any address.
#pragma once

#include <immintrin.h>

#include "scalar.h"

namespace {

constexpr int kLanes = 16;
typedef __m512 Lanes;

static inline Lanes lanes(float value) { return _mm512_set1_ps(value); }
static inline Lanes product(Lanes a, Lanes b) { return _mm512_mul_ps(a, b); }
static inline Lanes sum(Lanes a, Lanes b) { return _mm512_add_ps(a, b); }

// a * b + c, rounded once.
static inline Lanes fused(Lanes a, Lanes b, Lanes c) { return _mm512_fmadd_ps(a, b, c); }

static inline float total(Lanes values) { return _mm512_reduce_add_ps(values); }

static inline Lanes lanes_of(const float* in) { return _mm512_loadu_ps(in); }

static inline Lanes lanes_of(const BFloat16* in) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(in));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}

static inline Lanes lanes_of(const Float16* in) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(in)));
}

static inline Lanes plain(Lanes values) {
    const Lanes nan = _mm512_castsi512_ps(_mm512_set1_epi32(0x7fc00000));
    return _mm512_mask_mov_ps(values, _mm512_cmp_ps_mask(values, values, _CMP_UNORD_Q), nan);
}

static inline void store_lanes(Lanes values, float* out) { _mm512_storeu_ps(out, plain(values)); }

// Not the instruction for it: that one takes subnormal numbers for zeros.
static inline void store_lanes(Lanes values, BFloat16* out) {
    const __m512i bits = _mm512_castps_si512(plain(values));
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
    const __m256i words = _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), words);
}

static inline void store_lanes(Lanes values, Float16* out) {
    constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), _mm512_cvtps_ph(plain(values), kNearest));
}

}  // namespace
