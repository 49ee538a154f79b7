// Conversions between float and the 16-bit floats without any instruction set, rounding to nearest even.
#pragma once

#include "common.h"

namespace {

static inline uint16_t bfloat16_bits(float value) {
    const uint32_t bits = bits_of(value);
    // Rounded, a NaN whose bits are all set would become zero.
    const uint32_t rounded = bits + 0x7fffu + ((bits >> 16) & 1), quiet = bits | 0x400000u;
    return (uint16_t)(((bits & 0x7fffffffu) > kInfinityBits ? quiet : rounded) >> 16);
}

static inline uint16_t float16_bits(float value) {
    const uint32_t bits = bits_of(value), sign = (bits >> 16) & 0x8000u;
    uint32_t magnitude = bits & 0x7fffffffu;
    if (magnitude > kInfinityBits) return (uint16_t)(sign | 0x7e00u);
    if (magnitude >= 0x477ff000u) return (uint16_t)(sign | 0x7c00u);  // 65520, halfway to the first power beyond
    if (magnitude < 0x38800000u) {
        // Below 2^-14 the result counts steps of 2^-24. Added to 0.5, whose own steps are that wide, the sum is
        // rounded by the processor as wanted.
        return (uint16_t)(sign | (bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f)));
    }
    magnitude += 0xfffu + ((magnitude >> 13) & 1);
    return (uint16_t)(sign | ((magnitude - (112u << 23)) >> 13));  // exponents are biased by 127 and by 15
}

static inline float to_float(float value) { return value; }

static inline float to_float(BFloat16 value) { return float_of((uint32_t)value.bits << 16); }

static inline float to_float(Float16 value) {
    const uint32_t sign = (uint32_t)(value.bits & 0x8000u) << 16, magnitude = value.bits & 0x7fffu;
    if (magnitude < 0x400u) return float_of(sign | bits_of((float)magnitude * 0x1p-24f));
    if (magnitude >= 0x7c00u) return float_of(sign | kInfinityBits | ((magnitude & 0x3ffu) << 13));
    return float_of(sign | ((magnitude << 13) + (112u << 23)));
}

static inline void from_float(float value, float* out) { *out = value; }
static inline void from_float(float value, BFloat16* out) { out->bits = bfloat16_bits(value); }
static inline void from_float(float value, Float16* out) { out->bits = float16_bits(value); }

}  // namespace
