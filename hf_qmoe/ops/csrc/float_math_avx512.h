// Products in float with AVX-512.
#pragma once

#include "scalar.h"
#include "unpack_avx512.h"

namespace {

struct FloatMath {
    using Elem = float;
    using Vector = __m512;
    using Sum = __m512;
    using Unpack4 = ::Unpack4<float>;
    using Unpack8 = ::Unpack8<float>;
    static constexpr int kLanes = 16, kTokens = 6, kDirectTokens = 2;
    static constexpr bool kSplits = false;

    static void look_up(const Unpack4& unpack, const uint8_t* in, Vector (&out)[4]) {
        for (int i = 0; i < 4; i++) out[i] = unpack.look_up(in + 8 * i);
    }

    static Vector load(const Elem* from) { return _mm512_loadu_ps(from); }
    static Sum zero() { return _mm512_setzero_ps(); }
    static Sum dot(Sum sum, Vector weights, Vector row) { return _mm512_fmadd_ps(weights, row, sum); }
    static Sum add(Sum a, Sum b) { return _mm512_add_ps(a, b); }

    __attribute__((always_inline)) static void store_sums(const Sum (&sums)[4], float* out) {
        const __m512 first = _mm512_add_ps(_mm512_unpacklo_ps(sums[0], sums[1]), _mm512_unpackhi_ps(sums[0], sums[1]));
        const __m512 second = _mm512_add_ps(_mm512_unpacklo_ps(sums[2], sums[3]), _mm512_unpackhi_ps(sums[2], sums[3]));
        const __m512d low = _mm512_unpacklo_pd(_mm512_castps_pd(first), _mm512_castps_pd(second));
        const __m512d high = _mm512_unpackhi_pd(_mm512_castps_pd(first), _mm512_castps_pd(second));
        const __m512 lanes = _mm512_add_ps(_mm512_castpd_ps(low), _mm512_castpd_ps(high));
        const __m256 pairs = _mm256_add_ps(_mm512_castps512_ps256(lanes), _mm512_extractf32x8_ps(lanes, 1));
        _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(pairs), _mm256_extractf128_ps(pairs, 1)));
    }
};

}  // namespace
