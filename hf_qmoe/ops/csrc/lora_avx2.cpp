// Low-rank terms of routed rows with AVX2, FMA and F16C.
#include "kernels.h"
#include "lanes_avx2.h"
#include "lora.inc"
#include "transpose.inc"

int hf_qmoe_lora_avx2(const LoraCall* call) { return lora(*call); }

int hf_qmoe_transpose_avx2(const TransposeCall* call) { return transpose(*call); }
