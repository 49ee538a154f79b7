// Packing for any processor.
#include "kernels.h"
#include "scalar.h"

namespace {

constexpr int kChunk = 2;

// A NaN becomes -1.
static inline float clamped(float x) { return x > -1.0f ? (x < 1.0f ? x : 1.0f) : -1.0f; }

class Magnitudes {
  public:
    template <class In>
    void chunk(const In* weight) {
        for (int i = 0; i < kChunk; i++) {
            const uint32_t magnitude = bits_of(to_float(load(weight, i))) & 0x7fffffffu;
            if (magnitude > most_) most_ = magnitude;
        }
    }

    uint32_t most() const { return most_; }

  private:
    uint32_t most_ = 0;
};

class Pack4 {
  public:
    Pack4(const float* bounds, const uint8_t* codes) : bounds_(bounds), codes_(codes) {}

    void set_factor(float factor) { factor_ = factor; }

    template <class In>
    void chunk(const In* weight, uint8_t* packed) const {
        *packed = (uint8_t)(code(to_float(load(weight, 0))) << 4 | code(to_float(load(weight, 1))));
    }

  private:
    uint8_t code(float weight) const {
        const float x = clamped(weight * factor_);
        int less = 0;
        for (int bound = 0; bound < 15; bound++) less += load(bounds_, bound) < x;
        return codes_[less];
    }

    const float* bounds_;
    const uint8_t* codes_;
    float factor_;
};

class Pack8 {
  public:
    explicit Pack8(const uint8_t* nearest) : nearest_(nearest) {}

    void set_factor(float factor) { factor_ = factor; }

    template <class In>
    void chunk(const In* weight, uint8_t* packed) const {
        for (int i = 0; i < kChunk; i++) packed[i] = code(to_float(load(weight, i)));
    }

  private:
    uint8_t code(float weight) const {
        const float x = clamped(weight * factor_);
        // Product and sum are exact in double: one rounding to float, as a fused multiply-add.
        return nearest_[(int)(float)((double)((x + 1.0f) * 0.5f) * 65535.0 + 0.5)];
    }

    const uint8_t* nearest_;
    float factor_;
};

}  // namespace

#include "quantize.inc"

int hf_qmoe_quantize_4bit_generic(uint8_t* packed, float* absmax, const void* weight, int dtype, const float* bounds,
                                  const uint8_t* codes, int64_t count, int64_t blocksize, int threads) {
    return quantize<4>(Pack4(bounds, codes), packed, absmax, weight, dtype, count, blocksize, threads);
}

int hf_qmoe_quantize_8bit_generic(uint8_t* packed, float* absmax, const void* weight, int dtype,
                                  const uint8_t* nearest, int64_t count, int64_t blocksize, int threads) {
    return quantize<8>(Pack8(nearest), packed, absmax, weight, dtype, count, blocksize, threads);
}
