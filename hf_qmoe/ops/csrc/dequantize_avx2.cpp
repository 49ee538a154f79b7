// Unpacking with AVX2, FMA and F16C.
#include "unpack_avx2.h"

#include "dequantize.inc"
#include "kernels.h"

int hf_qmoe_dequantize_avx2(void* out, int dtype, const uint8_t* packed, const float* absmax, const float* codebook,
                            int bits, int64_t count, int64_t blocksize, int flush_subnormals, int threads) {
    return dequantize(out, dtype, packed, absmax, codebook, bits, count, blocksize, flush_subnormals, threads);
}
