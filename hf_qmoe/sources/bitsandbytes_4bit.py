"""bitsandbytes' 4-bit linears, and the experts that transformers v4 stored as such.

Each matrix has its bytes and up to five statistics beside it, from ``QuantState.as_dict(packed=True)``.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from bitsandbytes.functional import QuantState, dequantize_4bit
from torch import Tensor

from hf_qmoe.ops.formats import decompress_absmax
from hf_qmoe.sources.source import Parts, Source, require


_STATE = ".quant_state.bitsandbytes__"
_STATISTICS = (".nested_absmax", ".nested_quant_map", ".quant_map", ".absmax", f"{_STATE}nf4", f"{_STATE}fp4")


class BitsAndBytes4bit(Source):
    """``quant_method: bitsandbytes`` with ``load_in_4bit``."""

    method: ClassVar[str] = "bitsandbytes"

    @property
    def skipped(self) -> list[str]:
        """Those of ``llm_int8_skip_modules``: bytes that are kept leave no reason to quantize others."""
        return list(self.config.get("llm_int8_skip_modules") or [])

    def stored_names(self, name: str) -> dict[str, str]:
        """``weight`` and ``weight.absmax`` and so on."""
        return {role: name + role for role in ("", *_STATISTICS)}

    def is_quantized(self, roles: Mapping[str, Any]) -> bool:
        """Whether there are statistics: a quantized weight may be stored in any dtype."""
        return any(role in roles for role in _STATISTICS)

    def decode(self, parts: Parts, dtype: torch.dtype) -> Tensor:
        """What bitsandbytes dequantizes."""
        state = quant_state(parts)
        shape, state.dtype = state.shape, dtype
        # As one row: its AVX512 unpacking (0.50.2) takes the wrong scales where a block runs on from row to row.
        state.shape = torch.Size((1, shape.numel()))
        weight: Tensor = dequantize_4bit(parts[""], state)
        return weight.view(shape)


def quant_state(parts: Parts) -> QuantState:
    """bitsandbytes' state of one stored matrix.

    Raises:
        ValueError: statistics are missing.
    """
    require(parts, "", ".absmax", ".quant_map")
    if not any(role.startswith(_STATE) for role in parts):
        require(parts, f"{_STATE}nf4")
    if (".nested_absmax" in parts) != (".nested_quant_map" in parts):
        require(parts, ".nested_absmax", ".nested_quant_map")
    statistics = {role.removeprefix("."): tensor for role, tensor in parts.items() if role}
    return QuantState.from_dict(statistics, device=parts[""].device)


def packed_bytes(parts: Parts) -> tuple[Tensor, Tensor, QuantState]:
    """Bytes (uint8, flat), scales (fp32, flat, nested ones decompressed as bitsandbytes does) and state."""
    state = quant_state(parts)
    absmax = state.absmax
    if state.nested:
        absmax = decompress_absmax(absmax, state.state2.absmax, state.offset, state.state2.code)
    return parts[""].contiguous().view(-1).view(torch.uint8), absmax.to(torch.float32).view(-1), state
