// Arguments of the low-rank terms, as the caller lays them out (hf_qmoe/ops/native_lora.py). All members take eight
// bytes, all memory is the caller's, and nothing need be aligned.
#pragma once

#include <stdint.h>

// Forward: out[s] = rows[s] + scaling * (x[s] A_e^T) B_e^T. Backward, where `rows` is the gradient of `out`: gradients
// to x, A and B. Of the experts that were hit; the others' gradients are set to zeros.
struct LoraCall {
    void* out;               // [S, N], or in backward the gradient to x, [S, K]; rows of no expert are left as they are
    void* grad_A;            // backward: [E * R, K] of `factor_dtype`
    float* grad_Bt;          // backward: [R, E, N]
    const void* rows;        // [S, N] of `dtype`
    const void* x;           // [S, K]
    const void* lora_A;      // [E * R, K] of `factor_dtype`
    const void* lora_Bt;     // B_e^T of `dtype`: element (r, n) of the i-th one at i * B_each + r * B_rank + n
    float* hidden;           // memory for [2, S, R]
    float* factors;          // memory for [threads, R, K]
    const int64_t* hits;     // [num_hits, 4]: expert, first row, end of its rows, which of lora_Bt; by expert
    int64_t num_hits;
    int64_t num_experts;     // E
    int64_t rank;            // R
    int64_t in_features;     // K
    int64_t out_features;    // N
    int64_t B_each;
    int64_t B_rank;
    int64_t dtype;           // 0 float, 1 bfloat16, 2 float16
    int64_t factor_dtype;    // likewise; factors are rounded to `dtype` before they are multiplied
    int64_t count;           // S
    int64_t backward;        // whether
    int64_t threads;
    double scaling;
};

// out[c][r] = in[r][c], rounded to the dtype of `out`.
struct TransposeCall {
    void* out;               // [columns, rows] of `out_dtype`
    const void* in;          // [rows, columns] of `in_dtype`
    int64_t rows;
    int64_t columns;
    int64_t out_dtype;       // 0 float, 1 bfloat16, 2 float16
    int64_t in_dtype;
    int64_t threads;
};
