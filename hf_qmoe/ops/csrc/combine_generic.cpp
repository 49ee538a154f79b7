// Rows of routed pairs to tokens and back, for any processor.
#include "kernels.h"
#include "scalar.h"

namespace {

constexpr int kLanes = 1;
typedef float Lanes;

static inline Lanes lanes(float value) { return value; }
static inline Lanes product(Lanes a, Lanes b) { return a * b; }
static inline Lanes sum(Lanes a, Lanes b) { return a + b; }

template <class T>
static inline Lanes lanes_of(const T* in) {
    return to_float(load(in, 0));
}

template <class T>
static inline void store_lanes(Lanes values, T* out) {
    T value;
    from_float(values != values ? float_of(0x7fc00000u) : values, &value);
    store(out, 0, value);
}

}  // namespace

#include "combine.inc"

int hf_qmoe_combine_generic(void* tokens, int tokens_dtype, void* rows, int rows_dtype, const float* weights,
                            const int64_t* inverse, int64_t owned, int64_t count, int64_t top_k, int64_t width,
                            int combines, int threads) {
    const Pairs pairs = {inverse, weights, owned, count, top_k, width};
    return rows_and_tokens(tokens, tokens_dtype, rows, rows_dtype, pairs, combines != 0, threads);
}
