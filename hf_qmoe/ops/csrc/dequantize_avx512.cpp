// Unpacking with AVX-512 (F, BW, DQ, VL, VBMI: Intel from Ice Lake, AMD from Zen 4).
#include "unpack_avx512.h"

#include "dequantize.inc"
#include "kernels.h"

int hf_qmoe_dequantize_avx512(void* out, int dtype, const uint8_t* packed, const float* absmax, const float* codebook,
                              int bits, int64_t count, int64_t blocksize, int flush_subnormals, int threads) {
    return dequantize(out, dtype, packed, absmax, codebook, bits, count, blocksize, flush_subnormals, threads);
}
