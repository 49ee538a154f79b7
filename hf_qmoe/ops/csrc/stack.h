// The weights of one expert of a packed stack.
#pragma once

#include "calls.h"
#include "common.h"

namespace {

constexpr int64_t kNestedBlocksize = 256;

// One expert of a stack.
class Expert {
  public:
    Expert(const PackedStack& stack, int64_t expert) : stack_(stack) {
        const int64_t weights = stack.rows * stack.columns, blocks = weights / stack.blocksize;
        packed_ = stack.packed + expert * (weights * stack.bits / 8);
        if (stack.nested_absmax) {
            codes_ = static_cast<const uint8_t*>(stack.absmax) + expert * blocks;
            const int64_t nested = expert * blocks_of(blocks, kNestedBlocksize);
            nested_ = reinterpret_cast<const float*>(bytes_at(stack.nested_absmax, nested));
            offset_ = load(stack.nested_offset, expert);
        } else {
            scales_ = reinterpret_cast<const float*>(bytes_at(static_cast<const float*>(stack.absmax), expert * blocks));
        }
    }

    const uint8_t* codes(int64_t weight) const { return packed_ + weight * stack_.bits / 8; }

    // Scales of `count` blocks from `first` on: where they lie, or decoded to `buffer`.
    const float* scales(int64_t first, int64_t count, float* buffer) const {
        if (!codes_) return reinterpret_cast<const float*>(bytes_at(scales_, first));
        for (int64_t i = 0; i < count; i++) {
            const float nested = load(nested_, (first + i) / kNestedBlocksize);
            buffer[i] = load(stack_.nested_codebook, codes_[first + i]) * nested + offset_;
        }
        return buffer;
    }

    // Where the scale of a block lies, and the bytes that a scale takes.
    const char* scale_at(int64_t block) const { return codes_ ? bytes_at(codes_, block) : bytes_at(scales_, block); }
    int64_t scale_bytes() const { return codes_ ? 1 : (int64_t)sizeof(float); }

  private:
    const PackedStack& stack_;
    const uint8_t* packed_;
    const uint8_t* codes_ = nullptr;
    const float* scales_ = nullptr;
    const float* nested_ = nullptr;
    float offset_ = 0;
};

}  // namespace
