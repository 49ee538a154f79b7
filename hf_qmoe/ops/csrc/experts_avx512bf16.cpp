// Products with AVX512-BF16: pairs of bfloat16 at a time, added in float. Other inputs are multiplied in float.
#include "bfloat16_math_avx512bf16.h"

#include "kernels.h"

#include "product.inc"

#include "experts.inc"

int hf_qmoe_experts_avx512bf16(const ExpertsCall* call) {
    return call->dtype == kBFloat16 ? experts<BFloat16Math, BFloat16>(*call) : experts_in_float<FloatMath>(*call);
}

int hf_qmoe_grouped_linear_avx512bf16(const GroupedLinearCall* call) {
    return call->dtype == kBFloat16 ? grouped_linear<BFloat16Math, BFloat16>(*call)
                                    : grouped_linear_in_float<FloatMath>(*call);
}
