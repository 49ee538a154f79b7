// AMX-BF16, as the tile kernel uses it: eight tiles of up to 16 rows of 64 bytes. With HF_QMOE_EMULATE_AMX the
// instructions are computed in C++ (amx_emulation.h), so that the kernel can be tested on processors without them.
//
//   tile_load_config(const TileConfig*), tile_release()   before and after, on each thread
//   tile_zero(tile)
//   tile_load(tile, from, stride), tile_store(tile, to, stride)   rows `stride` bytes apart
//   tile_dot(sums, a, b)   sums[m][n] += sum over k and i of a[m][2k + i] * b[k][2n + i]
//   tile_fence()           what was written to memory before is seen by the loads after it
//
// Tiles are literals from 0 to 7: GCC 12 pastes them into the instruction, so these are macros.
#pragma once

#include "common.h"

namespace {

struct TileConfig {
    uint8_t palette, start_row, reserved[14];
    uint16_t column_bytes[16];
    uint8_t rows[16];
};
static_assert(sizeof(TileConfig) == 64, "the layout is the instruction's");

}  // namespace

#ifdef HF_QMOE_EMULATE_AMX

#include "amx_emulation.h"

#else

#include <immintrin.h>

// GCC does not know that the instructions below read memory, and might write it later or not at all.
#define tile_fence() __asm__ volatile("" ::: "memory")

#define tile_load_config(config) \
    do {                         \
        tile_fence();            \
        _tile_loadconfig(config); \
    } while (0)
#define tile_release() _tile_release()
#define tile_zero(tile) _tile_zero(tile)
#define tile_load(tile, from, stride) _tile_loadd(tile, from, stride)
#define tile_store(tile, to, stride) _tile_stored(tile, to, stride)
#define tile_dot(sums, a, b) _tile_dpbf16ps(sums, a, b)

#endif
