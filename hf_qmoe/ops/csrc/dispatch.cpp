// The exported functions, and which instruction set they run on.
#include "kernels.h"

#include "common.h"

// HF_QMOE_NO_AMX: the compiler is too old for it.
#if defined(__x86_64__) && !defined(HF_QMOE_NO_AMX)
#define HF_QMOE_AMX
#endif
#if defined(HF_QMOE_AMX) && defined(__linux__) && !defined(HF_QMOE_EMULATE_AMX)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#define HF_QMOE_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

struct Kernels {
    const char* name;
    decltype(&hf_qmoe_dequantize_generic) dequantize;
    decltype(&hf_qmoe_quantize_4bit_generic) quantize_4bit;
    decltype(&hf_qmoe_quantize_8bit_generic) quantize_8bit;
    decltype(&hf_qmoe_combine_generic) combine;
    int (*lora)(const LoraCall*);        // null where there is none
    int (*transpose)(const TransposeCall*);
    int (*experts)(const ExpertsCall*);  // null where there are none
    int (*grouped_linear)(const GroupedLinearCall*);
};

#define HF_QMOE_KERNELS(isa) \
    hf_qmoe_dequantize_##isa, hf_qmoe_quantize_4bit_##isa, hf_qmoe_quantize_8bit_##isa, hf_qmoe_combine_##isa
#define HF_QMOE_LORA(isa) hf_qmoe_lora_##isa, hf_qmoe_transpose_##isa
#define HF_QMOE_PRODUCTS(isa) hf_qmoe_experts_##isa, hf_qmoe_grouped_linear_##isa

// Lowest first; each processor that has one has those before it.
const Kernels kAll[] = {
    {"generic", HF_QMOE_KERNELS(generic), nullptr, nullptr, nullptr, nullptr},
#ifdef __x86_64__
    {"avx2", HF_QMOE_KERNELS(avx2), HF_QMOE_LORA(avx2), HF_QMOE_PRODUCTS(avx2)},
    {"avx512", HF_QMOE_KERNELS(avx512), HF_QMOE_LORA(avx512), HF_QMOE_PRODUCTS(avx512)},
    {"avx512bf16", HF_QMOE_KERNELS(avx512), HF_QMOE_LORA(avx512), HF_QMOE_PRODUCTS(avx512bf16)},
#endif
#ifdef HF_QMOE_AMX
    {"amx", HF_QMOE_KERNELS(avx512), HF_QMOE_LORA(avx512), HF_QMOE_PRODUCTS(amx)},
#endif
};

#ifdef HF_QMOE_AMX

// Whether the processor has AMX-BF16, and the system lets this process use it. Call only where there is AVX512-BF16.
bool may_use_amx() {
#ifdef HF_QMOE_EMULATE_AMX
    return true;
#elif defined(__linux__)
    unsigned a, b, c, d;
    constexpr unsigned kBF16 = 1u << 22, kTile = 1u << 24, kTileState = 3u << 17;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d & kBF16) || !(d & kTile)) return false;
    __asm__ volatile("xgetbv" : "=a"(a), "=d"(d) : "c"(0));  // which registers the system saves
    if ((a & kTileState) != kTileState) return false;
    // The tiles are 8 KB, which Linux (5.16) saves for processes that have asked for them.
    constexpr long kRequestPermission = 0x1023, kTileData = 18;
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
    return false;
#endif
}

// Found out once. The product is tried since it has not been run on such a processor.
bool amx_works() {
    static int known = -1;
    int works = __atomic_load_n(&known, __ATOMIC_RELAXED);
    if (works < 0) {
        works = may_use_amx() && hf_qmoe_agrees_amx();
        __atomic_store_n(&known, works, __ATOMIC_RELAXED);
    }
    return works != 0;
}

#else

bool amx_works() { return false; }

#endif

int highest() {
#ifdef __x86_64__
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") || !__builtin_cpu_supports("f16c")) return 0;
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512vbmi"))
        return !__builtin_cpu_supports("avx512bf16") ? 2 : (amx_works() ? 4 : 3);
    return 1;
#else
    return 0;
#endif
}

// An index of kAll; -1 before the first use.
int selected = -1;

const Kernels& kernels() {
    int level = __atomic_load_n(&selected, __ATOMIC_RELAXED);
    if (level < 0) {
        level = highest();
        __atomic_store_n(&selected, level, __ATOMIC_RELAXED);
    }
    return kAll[level];
}

}  // namespace

// A digest of the sources that this library was built from.
HF_QMOE_EXPORT const char* hf_qmoe_source_digest() { return HF_QMOE_SOURCE_DIGEST; }

// Name of the instruction set in use.
HF_QMOE_EXPORT const char* hf_qmoe_instruction_set() { return kernels().name; }

// Uses the instruction set `name` from now on, the best one for a null pointer. Returns whether this processor has it.
HF_QMOE_EXPORT int hf_qmoe_select(const char* name) {
    const int best = highest();
    for (int level = name ? 0 : best; level <= best; level++) {
        if (name && strcmp(name, kAll[level].name) != 0) continue;
        __atomic_store_n(&selected, level, __ATOMIC_RELAXED);
        return 1;
    }
    return 0;
}

// Whether AMX is emulated in this library.
HF_QMOE_EXPORT int hf_qmoe_emulates_amx() {
#ifdef HF_QMOE_EMULATE_AMX
    return 1;
#else
    return 0;
#endif
}

// One instruction of AMX-BF16, for tests; see kernels.h. Returns 0, or 2 where there is no AMX.
HF_QMOE_EXPORT int hf_qmoe_multiply_tile(float* sums, const uint16_t* a, const uint16_t* b) {
#ifdef HF_QMOE_AMX
    if (__builtin_cpu_supports("avx512bf16") && may_use_amx()) {
        hf_qmoe_multiply_tile_amx(sums, a, b);
        return kDone;
    }
#endif
    (void)sums, (void)a, (void)b;
    return kBadArgument;
}

// Whether work is spread over threads.
HF_QMOE_EXPORT int hf_qmoe_has_openmp() {
#ifdef _OPENMP
    return 1;
#else
    return 0;
#endif
}

// Unpacks `count` weights.
//
//   out        `count` values of `dtype` (0 float, 1 bfloat16, 2 float16)
//   packed     uint8, `bits` (4 or 8) per weight; of two 4-bit codes in a byte the high one is first
//   absmax     one float per block of `blocksize` weights, the last of which may be cut short
//   codebook   16 or 256 floats
//   blocksize  even for 4 bits
//   flush_subnormals  4 bits only: products below 2^-126 become zeros
//   threads    at most this many
//
// No pointer needs an alignment. Returns 0, or 2 for a dtype or a number of bits that is not known.
HF_QMOE_EXPORT int hf_qmoe_dequantize(void* out, int dtype, const uint8_t* packed, const float* absmax,
                                      const float* codebook, int bits, int64_t count, int64_t blocksize,
                                      int flush_subnormals, int threads) {
    if ((bits != 4 && bits != 8) || count < 0 || blocksize <= 0 || (bits == 4 && blocksize % 2)) return kBadArgument;
    return kernels().dequantize(out, dtype, packed, absmax, codebook, bits, count, blocksize, flush_subnormals,
                                threads);
}

// Packs `count` weights of `dtype` into 4-bit codes and one absmax per block; `blocksize` is even and divides `count`.
//
//   bounds  15 sorted floats: a weight takes `codes[number of bounds below weight / absmax]`
//   codes   16 bytes
//
// Returns 0, 1 if a weight is not finite (the outputs then hold nothing of use), or 2 for an argument out of range.
HF_QMOE_EXPORT int hf_qmoe_quantize_4bit(uint8_t* packed, float* absmax, const void* weight, int dtype,
                                         const float* bounds, const uint8_t* codes, int64_t count, int64_t blocksize,
                                         int threads) {
    if (count < 0 || blocksize <= 0 || blocksize % 2 || count % blocksize) return kBadArgument;
    return kernels().quantize_4bit(packed, absmax, weight, dtype, bounds, codes, count, blocksize, threads);
}

// Packs into 8-bit codes; the last block may be cut short.
//
//   nearest  65536 codes, for weight / absmax from -1 to 1 in equal steps
HF_QMOE_EXPORT int hf_qmoe_quantize_8bit(uint8_t* packed, float* absmax, const void* weight, int dtype,
                                         const uint8_t* nearest, int64_t count, int64_t blocksize, int threads) {
    if (count < 0 || blocksize <= 0) return kBadArgument;
    return kernels().quantize_8bit(packed, absmax, weight, dtype, nearest, count, blocksize, threads);
}

// Between tokens and the rows of their (token, slot) pairs, which are sorted by expert. With `combines`
// `tokens[t] = sum over slots of weights[t, slot] * rows[inverse[t, slot]]`, else `rows[inverse[t, slot]] =
// weights[t, slot] * tokens[t]`; in float, rounded once. Rows from `owned` on count nothing, and are set to zeros.
//
//   tokens   [count, width] of `tokens_dtype` (0 float, 1 bfloat16, 2 float16)
//   rows     [count * top_k, width] of `rows_dtype`
//   weights  [count, top_k], or null: all of them 1
//   inverse  a permutation of the rows
//
// No pointer needs an alignment. Returns 0, or 2 for an unknown dtype or a row that does not exist.
HF_QMOE_EXPORT int hf_qmoe_combine(void* tokens, int tokens_dtype, void* rows, int rows_dtype, const float* weights,
                                   const int64_t* inverse, int64_t owned, int64_t count, int64_t top_k, int64_t width,
                                   int combines, int threads) {
    if (count < 0 || top_k < 0 || width < 0) return kBadArgument;
    return kernels().combine(tokens, tokens_dtype, rows, rows_dtype, weights, inverse, owned, count, top_k, width,
                             combines, threads);
}

// Whether the instruction set in use has `hf_qmoe_lora` and `hf_qmoe_transpose`.
HF_QMOE_EXPORT int hf_qmoe_has_lora() { return kernels().lora != nullptr; }

// See lora.h. Returns 0, or 2 for an unknown dtype.
HF_QMOE_EXPORT int hf_qmoe_lora(const LoraCall* call) {
    return kernels().lora ? kernels().lora(call) : kBadArgument;
}

// See lora.h. Returns 0, or 2 for an unknown dtype.
HF_QMOE_EXPORT int hf_qmoe_transpose(const TransposeCall* call) {
    return kernels().transpose ? kernels().transpose(call) : kBadArgument;
}

// Whether the instruction set in use multiplies.
HF_QMOE_EXPORT int hf_qmoe_has_products() { return kernels().experts != nullptr; }

// See calls.h. Returns 0, 2 for an argument out of range (the outputs then hold nothing of use), 3 if there was no
// memory, or 4 if the instruction set in use does not multiply.
HF_QMOE_EXPORT int hf_qmoe_grouped_linear(const GroupedLinearCall* call) {
    return kernels().grouped_linear ? kernels().grouped_linear(call) : kNoKernel;
}

// As `hf_qmoe_grouped_linear`; 2 for a negative index. `call` may be used by many threads: it is not written to.
HF_QMOE_EXPORT int hf_qmoe_experts(const ExpertsCall* call, void* out, const void* x, const int64_t* top_k_index,
                                   const void* top_k_weights, int threads) {
    ExpertsCall complete = *call;
    complete.out = out, complete.x = x, complete.threads = threads;
    complete.top_k_index = top_k_index, complete.top_k_weights = top_k_weights;
    return kernels().experts ? kernels().experts(&complete) : kNoKernel;
}
