// The instructions of amx.h in C++, after their description in Intel's manual. What would be an invalid instruction
// (a tile that is not configured, or sizes that do not fit) ends the process here, too.
#pragma once

#include "amx.h"

namespace {

constexpr int kTiles = 8, kMaxRows = 16, kMaxBytes = 64;

// Of one thread. A palette of zero: nothing is configured.
struct TileState {
    TileConfig config;
    uint8_t data[kTiles][kMaxRows][kMaxBytes];
};
thread_local TileState tile_state;

static inline void tile_require(bool condition) {
    if (!condition) __builtin_trap();
}

static inline int tile_rows(int tile) {
    tile_require(tile_state.config.palette == 1 && tile_state.config.rows[tile] > 0);
    return tile_state.config.rows[tile];
}

static inline int tile_bytes(int tile) {
    tile_require(tile_state.config.palette == 1 && tile_state.config.column_bytes[tile] > 0);
    return tile_state.config.column_bytes[tile];
}

static inline void tile_fence() {}

static inline void tile_release() { memset(&tile_state, 0, sizeof tile_state); }

static inline void tile_load_config(const TileConfig* config) {
    tile_require(config->palette == 1 && config->start_row == 0);
    tile_require(tile_state.config.palette == 0);  // not the instruction's rule: ours, that tiles are given back
    for (int i = 0; i < 14; i++) tile_require(config->reserved[i] == 0);
    for (int tile = 0; tile < 16; tile++) {
        const int rows = config->rows[tile], bytes = config->column_bytes[tile];
        tile_require(rows <= (tile < kTiles ? kMaxRows : 0) && bytes <= kMaxBytes && (rows == 0) == (bytes == 0));
    }
    tile_release();
    tile_state.config = *config;
}

static inline void tile_zero(int tile) {
    tile_rows(tile);
    memset(tile_state.data[tile], 0, sizeof tile_state.data[tile]);
}

static inline void tile_load(int tile, const void* from, int64_t stride) {
    const int rows = tile_rows(tile), bytes = tile_bytes(tile);
    memset(tile_state.data[tile], 0, sizeof tile_state.data[tile]);
    for (int row = 0; row < rows; row++)
        memcpy(tile_state.data[tile][row], static_cast<const char*>(from) + row * stride, (size_t)bytes);
}

static inline void tile_store(int tile, void* to, int64_t stride) {
    const int rows = tile_rows(tile), bytes = tile_bytes(tile);
    for (int row = 0; row < rows; row++)
        memcpy(static_cast<char*>(to) + row * stride, tile_state.data[tile][row], (size_t)bytes);
}

constexpr float kLeastNormal = 0x1p-126f;

// Subnormal numbers become zeros of their sign.
static inline float flushed_to_zero(float value) {
    return __builtin_fabsf(value) < kLeastNormal ? __builtin_copysignf(0.0f, value) : value;
}

static inline float tile_sum(float a, float b) {
    return flushed_to_zero(flushed_to_zero(a) + flushed_to_zero(b));  // where subnormal, a sum is exact
}

// a * b + c rounded once, of numbers that are not subnormal. Whether the result is, is asked after rounding to 24
// bits, of which there are fewer below the least normal number: 2^-126 - 2^-150 becomes 2^-126 there. So such a result
// is worked out again, scaled. That is possible where it is rounded at all: then |a * b| < 2^-133 and |c| <= 2^-125.
static inline float tile_fused(float a, float b, float c) {
    const float result = __builtin_fmaf(a, b, c), scaled = __builtin_fmaf(a * 0x1p64f, b, c * 0x1p64f);
    const bool is_tiny = __builtin_fabsf(result) < kLeastNormal ||
                         (__builtin_fabsf(result) == kLeastNormal && __builtin_fabsf(scaled) < kLeastNormal * 0x1p64f);
    return is_tiny ? __builtin_copysignf(0.0f, result) : result;
}

// bfloat16 numbers `2 * column + i` of a row as floats.
static inline void tile_widen(const uint8_t* row, int columns, int i, float* out) {
    for (int column = 0; column < columns; column++) {
        uint16_t bits;
        memcpy(&bits, row + 4 * column + 2 * i, sizeof bits);
        out[column] = flushed_to_zero(float_of((uint32_t)bits << 16));
    }
}

static void tile_dot(int sums, int a, int b) {
    const int rows = tile_rows(sums), columns = tile_bytes(sums) / 4, pairs = tile_bytes(a) / 4;
    tile_require(sums != a && sums != b && a != b);
    tile_require(tile_rows(a) == rows && tile_rows(b) == pairs && tile_bytes(b) == tile_bytes(sums));
    tile_require(tile_bytes(sums) % 4 == 0 && tile_bytes(a) % 4 == 0);
    float factors[2][kMaxRows][kMaxBytes / 4] = {};
    for (int k = 0; k < pairs; k++)
        for (int i = 0; i < 2; i++) tile_widen(tile_state.data[b][k], columns, i, factors[i][k]);
    for (int m = 0; m < rows; m++) {
        float values[2][kMaxBytes / 4], part[2][kMaxBytes / 4] = {}, total[kMaxBytes / 4];
        for (int i = 0; i < 2; i++) {
            tile_widen(tile_state.data[a][m], pairs, i, values[i]);
            for (int k = 0; k < pairs; k++)
                for (int n = 0; n < kMaxBytes / 4; n++)
                    part[i][n] = tile_fused(values[i][k], factors[i][k][n], part[i][n]);
        }
        memcpy(total, tile_state.data[sums][m], sizeof total);
        for (int n = 0; n < columns; n++) total[n] = tile_sum(total[n], tile_sum(part[0][n], part[1][n]));
        memcpy(tile_state.data[sums][m], total, sizeof total);
    }
}

}  // namespace
