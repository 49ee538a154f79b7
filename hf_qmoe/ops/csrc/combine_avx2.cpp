// Rows of routed pairs to tokens and back, with AVX2 and F16C.
#include "kernels.h"
#include "lanes_avx2.h"
#include "combine.inc"

int hf_qmoe_combine_avx2(void* tokens, int tokens_dtype, void* rows, int rows_dtype, const float* weights,
                         const int64_t* inverse, int64_t owned, int64_t count, int64_t top_k, int64_t width,
                         int combines, int threads) {
    const Pairs pairs = {inverse, weights, owned, count, top_k, width};
    return rows_and_tokens(tokens, tokens_dtype, rows, rows_dtype, pairs, combines != 0, threads);
}
