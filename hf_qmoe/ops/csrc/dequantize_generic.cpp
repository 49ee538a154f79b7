// Unpacking for any processor.
#include "kernels.h"
#include "scalar.h"

namespace {

template <class Out>
static inline Out rounded(float value, bool flush) {
    Out out;
    if (flush && (bits_of(value) & kInfinityBits) == 0) value = float_of(bits_of(value) & 0x80000000u);
    from_float(value, &out);
    return out;
}

// The 16 possible results of a block are worked out once.
template <class Out>
struct Unpack4 {
    static constexpr int kChunk = 2;

    Unpack4(const float* codebook, bool flush) : codebook_(codebook), flush_(flush) {}

    void set_scale(float scale) {
        for (int code = 0; code < 16; code++) table_[code] = rounded<Out>(load(codebook_, code) * scale, flush_);
    }

    void chunk(const uint8_t* in, Out* out) const {
        store(out, 0, table_[*in >> 4]);  // the first weight of a byte is its high half
        store(out, 1, table_[*in & 15]);
    }

  private:
    const float* codebook_;
    bool flush_;
    Out table_[16];
};

template <class Out>
struct Unpack8 {
    static constexpr int kChunk = 1;

    Unpack8(const float* codebook, bool) : codebook_(codebook) {}

    void set_scale(float scale) { scale_ = scale; }

    void chunk(const uint8_t* in, Out* out) const {
        store(out, 0, rounded<Out>(load(codebook_, *in) * scale_, false));
    }

  private:
    const float* codebook_;
    float scale_;
};

}  // namespace

#include "dequantize.inc"

int hf_qmoe_dequantize_generic(void* out, int dtype, const uint8_t* packed, const float* absmax, const float* codebook,
                               int bits, int64_t count, int64_t blocksize, int flush_subnormals, int threads) {
    return dequantize(out, dtype, packed, absmax, codebook, bits, count, blocksize, flush_subnormals, threads);
}
