// Products with AVX2 and FMA, in float whatever the inputs are.
#include "unpack_avx2.h"

#include "kernels.h"

#include "product.inc"

#include "experts.inc"

namespace {

struct FloatMath {
    using Elem = float;
    using Vector = __m256;
    using Sum = __m256;
    using Unpack4 = ::Unpack4<float>;
    using Unpack8 = ::Unpack8<float>;
    static constexpr int kLanes = 8, kTokens = 2, kDirectTokens = 0;
    static constexpr bool kSplits = false;

    static Vector load(const Elem* from) { return _mm256_loadu_ps(from); }
    static Sum zero() { return _mm256_setzero_ps(); }
    static Sum dot(Sum sum, Vector weights, Vector row) { return _mm256_fmadd_ps(weights, row, sum); }

    static void store_sums(const Sum (&sums)[4], float* out) {
        const __m256 first = _mm256_hadd_ps(sums[0], sums[1]), second = _mm256_hadd_ps(sums[2], sums[3]);
        const __m256 lanes = _mm256_hadd_ps(first, second);
        _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(lanes), _mm256_extractf128_ps(lanes, 1)));
    }
};

}  // namespace

int hf_qmoe_experts_avx2(const ExpertsCall* call) { return experts_in_float<FloatMath>(*call); }

int hf_qmoe_grouped_linear_avx2(const GroupedLinearCall* call) { return grouped_linear_in_float<FloatMath>(*call); }
