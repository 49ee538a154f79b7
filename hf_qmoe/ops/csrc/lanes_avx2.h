// A register of floats, with AVX2, FMA and F16C: loaded from and rounded to every dtype, at any address.
#pragma once

#include <immintrin.h>

#include "scalar.h"

namespace {

constexpr int kLanes = 8;
typedef __m256 Lanes;

static inline Lanes lanes(float value) { return _mm256_set1_ps(value); }
static inline Lanes product(Lanes a, Lanes b) { return _mm256_mul_ps(a, b); }
static inline Lanes sum(Lanes a, Lanes b) { return _mm256_add_ps(a, b); }

// a * b + c, rounded once.
static inline Lanes fused(Lanes a, Lanes b, Lanes c) { return _mm256_fmadd_ps(a, b, c); }

static inline float total(Lanes values) {
    __m128 sums = _mm_add_ps(_mm256_castps256_ps128(values), _mm256_extractf128_ps(values, 1));
    sums = _mm_add_ps(sums, _mm_movehl_ps(sums, sums));
    return _mm_cvtss_f32(_mm_add_ss(sums, _mm_movehdup_ps(sums)));
}

static inline Lanes lanes_of(const float* in) { return _mm256_loadu_ps(in); }

static inline Lanes lanes_of(const BFloat16* in) {
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(in));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}

static inline Lanes lanes_of(const Float16* in) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(in)));
}

static inline Lanes plain(Lanes values) {
    const Lanes nan = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fc00000));
    return _mm256_blendv_ps(values, nan, _mm256_cmp_ps(values, values, _CMP_UNORD_Q));
}

static inline void store_lanes(Lanes values, float* out) { _mm256_storeu_ps(out, plain(values)); }

static inline void store_lanes(Lanes values, BFloat16* out) {
    const __m256i bits = _mm256_castps_si256(plain(values));
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
    const __m256i halves = _mm256_srli_epi32(rounded, 16);
    const __m256i words = _mm256_permute4x64_epi64(_mm256_packus_epi32(halves, halves), 0x08);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm256_castsi256_si128(words));
}

static inline void store_lanes(Lanes values, Float16* out) {
    constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm256_cvtps_ph(plain(values), kNearest));
}

}  // namespace
