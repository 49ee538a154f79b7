// The kernels of one instruction set, as `dispatch.cpp` calls them.
#pragma once

#include <stdint.h>

// The arguments are documented at the exported functions in dispatch.cpp.
#define HF_QMOE_DECLARE(isa)                                                                                        \
    int hf_qmoe_dequantize_##isa(void* out, int dtype, const uint8_t* packed, const float* absmax,                  \
                                 const float* codebook, int bits, int64_t count, int64_t blocksize,                 \
                                 int flush_subnormals, int threads);                                                \
    int hf_qmoe_quantize_4bit_##isa(uint8_t* packed, float* absmax, const void* weight, int dtype,                  \
                                    const float* bounds, const uint8_t* codes, int64_t count, int64_t blocksize,    \
                                    int threads);                                                                   \
    int hf_qmoe_quantize_8bit_##isa(uint8_t* packed, float* absmax, const void* weight, int dtype,                  \
                                    const uint8_t* nearest, int64_t count, int64_t blocksize, int threads);

HF_QMOE_DECLARE(generic)
HF_QMOE_DECLARE(avx2)
HF_QMOE_DECLARE(avx512)

#undef HF_QMOE_DECLARE
