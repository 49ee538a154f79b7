"""mxfp4 (gpt-oss): blocks of 32 e2m1 codes with a power-of-two scale each, for a whole stack of experts."""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from hf_qmoe.sources.source import Parts, Source, require


class Mxfp4(Source):
    """``quant_method: mxfp4``."""

    method: ClassVar[str] = "mxfp4"

    def stored_names(self, name: str) -> dict[str, str]:
        """``gate_up_proj_blocks`` ``[E, N, K / 32, 16]`` and ``gate_up_proj_scales`` ``[E, N, K / 32]``."""
        return {role: name + role for role in ("", "_blocks", "_scales")}

    def is_quantized(self, roles: Mapping[str, Any]) -> bool:
        """Whether there are blocks or scales."""
        return "_blocks" in roles or "_scales" in roles

    def decode(self, parts: Parts, dtype: torch.dtype) -> Tensor:
        """transformers' own dequantization: ``[E, K, N]``, the layout of gpt-oss, or ``[K, N]`` of one expert."""
        blocks, scales = require(parts, "_blocks", "_scales")
        if blocks.ndim == 3:
            one: Tensor = convert_moe_packed_tensors(blocks[None], scales[None], dtype=dtype)
            return one[0]
        stack: Tensor = convert_moe_packed_tensors(blocks, scales, dtype=dtype)
        return stack
