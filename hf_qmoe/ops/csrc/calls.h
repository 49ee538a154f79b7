// Arguments of the functions that multiply, as the caller lays them out (hf_qmoe/ops/native_product.py). All members
// take eight bytes, all memory is the caller's, and nothing need be aligned.
#pragma once

#include <stdint.h>

// Weights of all experts for one projection; the memory is the caller's. Nothing need be aligned.
struct PackedStack {
    const uint8_t* packed;         // [E, N, K * bits / 8]; of two 4-bit codes in a byte the high one is first
    const void* absmax;            // [E, G], one per block of an expert: floats, or bytes if `nested_absmax` is there
    const float* nested_absmax;    // [E, ceil(G / 256)], or null
    const float* nested_offset;    // [E], or null
    const float* nested_codebook;  // 256 values of the bytes in `absmax`, or null
    const float* codebook;         // 16 or 256 values
    int64_t rows;                  // N
    int64_t columns;               // K, even for 4 bits
    int64_t blocksize;             // even, divides N * K
    int64_t bits;                  // 4 or 8
};

// out[s] = x[s] @ W_e^T for rows sorted by expert.
struct GroupedLinearCall {
    void* out;               // [S, N] of `dtype`; rows of no expert are left as they are
    const void* x;           // [S, K]
    int64_t dtype;           // 0 float, 1 bfloat16, 2 float16
    int64_t count;           // S
    const int64_t* offsets;  // [E + 1], rising from 0 to at most S
    int64_t num_experts;     // E
    int64_t threads;
    PackedStack weights;
};

// A layer of experts: the sum over slots of top_k_weights * down(activation(up(x))).
struct ExpertsCall {
    int64_t dtype;           // 0 float, 1 bfloat16, 2 float16
    int64_t out_dtype;       // that of `x`, or 0
    int64_t weights_dtype;   // of the tokens' weights
    int64_t tokens;          // T
    int64_t top_k;           // k
    int64_t num_experts;     // E
    const float* up_bias;    // [E, N of `up`], or null
    const float* down_bias;  // [E, H], or null
    int64_t gate;            // 0 none, 1 rows [gate; up], 2 rows gate0, up0, gate1, ...
    int64_t activation;      // 0 SiLU, 1 GELU by tanh, 2 ReLU, 3 its square
    PackedStack up;          // [E, 2I, H], or [E, I, H] without a gate
    PackedStack down;        // [E, H, I]
    // What differs from one call to the next; arguments of the function, which puts them here.
    void* out;                   // [T, H] of `out_dtype`
    const void* x;               // [T, H]
    const int64_t* top_k_index;  // [T, k]; E and more name no expert
    const void* top_k_weights;   // [T, k]
    int64_t threads;
};
