"""Block-scaled fp8 (DeepSeek-V3, Qwen3 fp8): e4m3 weights with one scale for each block of rows and columns."""

import re
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from hf_qmoe.sources.source import Parts, Source, require


class Fp8(Source):
    """``quant_method: fp8`` (and ``mxfp8``, whose scales are powers of two)."""

    method: ClassVar[str] = "fp8"

    def stored_names(self, name: str) -> dict[str, str]:
        """``weight``, ``weight_scale_inv``, and the scale of activations, which 4-bit weights have no use for."""
        names = {"": name, "_scale_inv": f"{name}_scale_inv"}
        if re.search(r"(^|\.)weight$", name):
            names["activation"] = re.sub("weight$", "activation_scale", name)
        return names

    def is_quantized(self, roles: Mapping[str, Any]) -> bool:
        """Whether there is a scale."""
        return "_scale_inv" in roles

    def decode(self, parts: Parts, dtype: torch.dtype) -> Tensor:
        """transformers' own dequantization."""
        weight, scale = require(parts, "", "_scale_inv")
        stock = Fp8Dequantize(None)
        if scale.ndim == 0:
            scale = scale.view(1, 1)
        restored: Tensor = stock._dequantize_one(weight, scale, output_dtype=dtype)
        return restored

    def expert(self, parts: Parts, index: int) -> Parts:
        """One expert's weight and scales."""
        return {role: tensor[index] for role, tensor in parts.items() if role != "activation"}
