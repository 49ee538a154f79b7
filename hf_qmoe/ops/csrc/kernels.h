// The kernels of one instruction set, as `dispatch.cpp` calls them.
#pragma once

#include <stdint.h>

#include "calls.h"
#include "lora.h"

// The arguments are documented at the exported functions in dispatch.cpp.
#define HF_QMOE_DECLARE(isa)                                                                                        \
    int hf_qmoe_dequantize_##isa(void* out, int dtype, const uint8_t* packed, const float* absmax,                  \
                                 const float* codebook, int bits, int64_t count, int64_t blocksize,                 \
                                 int flush_subnormals, int threads);                                                \
    int hf_qmoe_quantize_4bit_##isa(uint8_t* packed, float* absmax, const void* weight, int dtype,                  \
                                    const float* bounds, const uint8_t* codes, int64_t count, int64_t blocksize,    \
                                    int threads);                                                                   \
    int hf_qmoe_quantize_8bit_##isa(uint8_t* packed, float* absmax, const void* weight, int dtype,                  \
                                    const uint8_t* nearest, int64_t count, int64_t blocksize, int threads);         \
    int hf_qmoe_combine_##isa(void* tokens, int tokens_dtype, void* rows, int rows_dtype, const float* weights,     \
                              const int64_t* inverse, int64_t owned, int64_t count, int64_t top_k, int64_t width,   \
                              int combines, int threads);

// See lora.h.
int hf_qmoe_lora_avx2(const LoraCall* call);
int hf_qmoe_lora_avx512(const LoraCall* call);
int hf_qmoe_transpose_avx2(const TransposeCall* call);
int hf_qmoe_transpose_avx512(const TransposeCall* call);

// Products with packed weights; see calls.h.
#define HF_QMOE_DECLARE_PRODUCTS(isa)                          \
    int hf_qmoe_experts_##isa(const ExpertsCall* call);        \
    int hf_qmoe_grouped_linear_##isa(const GroupedLinearCall* call);

HF_QMOE_DECLARE_PRODUCTS(avx2)
HF_QMOE_DECLARE_PRODUCTS(avx512)
HF_QMOE_DECLARE_PRODUCTS(avx512bf16)
HF_QMOE_DECLARE_PRODUCTS(amx)

// sums[16][16] += a[16][32] * b[16][16][2] by one instruction, for tests; `b` has pairs of rows side by side.
void hf_qmoe_multiply_tile_amx(float* sums, const uint16_t* a, const uint16_t* b);

// Whether a product with AMX is the one with AVX512-BF16 but for roundings.
bool hf_qmoe_agrees_amx();

#undef HF_QMOE_DECLARE_PRODUCTS

HF_QMOE_DECLARE(generic)
HF_QMOE_DECLARE(avx2)
HF_QMOE_DECLARE(avx512)

#undef HF_QMOE_DECLARE
