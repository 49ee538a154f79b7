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
        """Values times the scale of their block, in float32, rounded to `dtype`.

        The last block of a row or column may be cut short, as in DeepSeek-V3. transformers' own `Fp8Dequantize` takes
        all blocks for equal, and so reads other scales than were meant.
        """
        values, scale = require(parts, "", "_scale_inv")
        if scale.ndim not in (values.ndim, values.ndim - 2) and scale.numel() > 1:
            raise ValueError(f"scales {tuple(scale.shape)} do not belong to a weight {tuple(values.shape)}")
        if values.dtype == torch.int8:
            values = Fp8Dequantize(None)._unpack_fp4(values)  # some store experts as two e2m1 codes to the byte
        if scale.dtype == torch.uint8:
            scale = (scale.float() - 127).exp2()  # e8m0, as mxfp8 has it
        scale = scale.float()
        if scale.ndim < 2:  # one scale for a matrix, or for each matrix of a stack
            scale = scale.reshape(*values.shape[:-2] if scale.numel() > 1 else (), 1, 1)
        for dim in (-2, -1):
            size = values.shape[dim]
            block = self._block(size, scale.shape[dim], dim)
            scale = scale.repeat_interleave(block, dim).narrow(dim, 0, size)
        return (values.float() * scale).to(dtype)

    def _block(self, size: int, count: int, dim: int) -> int:
        """Weights to a block along `dim`, of which there are `count` for `size` weights."""
        sizes = self.config.get("weight_block_size") or (None, None)
        declared = sizes[dim]
        if declared and -(size // -declared) == count:
            return int(declared)
        block = size // count
        # One scale for all, or experts in blocks of 32 beside linears in blocks of 128; anything else is a mistake.
        if size % count or (declared and count > 1 and block & (block - 1)):
            raise ValueError(f"{count} scales for {size} weights are not what blocks of {declared} weights give")
        return block

    def expert(self, parts: Parts, index: int) -> Parts:
        """One expert's weight and scales."""
        one = {role: tensor for role, tensor in parts.items() if role != "activation"}
        return {role: tensor[index] if tensor.ndim else tensor for role, tensor in one.items()}
