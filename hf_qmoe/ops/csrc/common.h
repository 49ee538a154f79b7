// Types and helpers shared by every translation unit.
//
// The files named *_avx512.cpp and *_avx2.cpp are compiled for processors that the one running this may not be. A
// function that the linker merges across units (an inline one, a template of the standard library) could end up in its
// AVX512 version everywhere. So everything here is `static` or in an anonymous namespace, and the standard library's
// C++ headers are not used.
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

#ifdef _OPENMP
#include <omp.h>
#endif

namespace {

// A 16-bit float as it lies in memory; arithmetic is done in float.
struct BFloat16 {
    uint16_t bits;
};
struct Float16 {
    uint16_t bits;
};

// Numbers that the caller passes for a dtype.
enum Dtype { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };

// Results of the exported functions.
enum Status { kDone = 0, kNotFinite = 1, kBadArgument = 2, kNoMemory = 3, kNoKernel = 4 };

constexpr uint32_t kInfinityBits = 0x7f800000u;

static inline uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float float_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

// Tensors may start at any address: a plain `pointer[i]` would be undefined there.
template <class T>
static inline char* bytes_at(T* pointer, int64_t i) {
    return reinterpret_cast<char*>(pointer) + i * (int64_t)sizeof(T);
}

template <class T>
static inline const char* bytes_at(const T* pointer, int64_t i) {
    return reinterpret_cast<const char*>(pointer) + i * (int64_t)sizeof(T);
}

template <class T>
static inline T load(const T* pointer, int64_t i) {
    T value;
    memcpy(&value, bytes_at(pointer, i), sizeof(T));
    return value;
}

template <class T>
static inline void store(T* pointer, int64_t i, T value) {
    memcpy(bytes_at(pointer, i), &value, sizeof(T));
}

static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

static inline int64_t blocks_of(int64_t count, int64_t blocksize) { return (count + blocksize - 1) / blocksize; }

// The scale that a block is multiplied with. Rounding to bfloat16 adds to the bits of a float and would turn a NaN
// whose payload is all ones into a number; the plain NaN survives it.
static inline float scale_of(const float* absmax, int64_t block) {
    const float scale = load(absmax, block);
    return scale != scale ? float_of(0x7fc00000u) : scale;
}

// Below this many weights per thread, waking another one costs more than it brings.
constexpr int64_t kWeightsPerThread = 1 << 14;

// Calls `function(first, last)` for consecutive ranges of `blocks` blocks on at most `threads` threads.
template <class Function>
static void for_ranges(int64_t blocks, int64_t blocksize, int threads, const Function& function) {
#ifdef _OPENMP
    const int64_t useful = blocks * blocksize / kWeightsPerThread;
    if (threads > useful) threads = (int)useful;
    if (threads > blocks) threads = (int)blocks;
    if (threads > 1) {
#pragma omp parallel num_threads(threads)
        {
            const int64_t self = omp_get_thread_num(), all = omp_get_num_threads();
            function(blocks * self / all, blocks * (self + 1) / all);
        }
        return;
    }
#else
    (void)blocksize, (void)threads;
#endif
    function(0, blocks);
}

}  // namespace
