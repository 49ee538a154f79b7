// Products with AVX-512, in float whatever the inputs are.
#include "float_math_avx512.h"

#include "kernels.h"

#include "product.inc"

#include "experts.inc"

int hf_qmoe_experts_avx512(const ExpertsCall* call) { return experts_in_float<FloatMath>(*call); }

int hf_qmoe_grouped_linear_avx512(const GroupedLinearCall* call) { return grouped_linear_in_float<FloatMath>(*call); }
