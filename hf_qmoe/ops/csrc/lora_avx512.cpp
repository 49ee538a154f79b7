// Low-rank terms of routed rows with AVX-512 F.
#include "kernels.h"
#include "lanes_avx512.h"
#include "lora.inc"
#include "transpose.inc"

int hf_qmoe_lora_avx512(const LoraCall* call) { return lora(*call); }

int hf_qmoe_transpose_avx512(const TransposeCall* call) { return transpose(*call); }
