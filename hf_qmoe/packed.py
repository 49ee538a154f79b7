"""`PackedStack`: the packed bytes and scales of one ``[E, N, K]`` stack, as one value.

A stack owns no state of its own: it groups tensors that live as parameters on a module, and every size is derived
from their shapes, so nothing can disagree with the bytes.
"""

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from hf_qmoe.ops import formats, torch_ops
from hf_qmoe.ops.schema import dequantize_stack


@dataclass(frozen=True, eq=False)
class PackedStack:
    """Packed weights of all experts for one projection.

    Attributes:
        packed: uint8 ``[E, N, K * bits / 8]``.
        absmax: scales: fp32 ``[E, N, K / blocksize]`` where blocks run along rows, ``[E, G]`` where they run over the
            flattened expert; uint8 if double-quantized; `None` for bf16 and fp16.
        nested_absmax: fp32 ``[E, ceil(G / 256)]``, scales of the scales, or `None`.
        nested_offset: fp32 ``[E]``, mean of the scales, or `None`.
        quant_type: one of `hf_qmoe.ops.formats.QUANT_TYPES`.
    """

    packed: Tensor
    absmax: Tensor | None
    nested_absmax: Tensor | None
    nested_offset: Tensor | None
    quant_type: str

    @classmethod
    def empty(
        cls,
        num_experts: int,
        out_features: int,
        in_features: int,
        quant_type: str,
        blocksize: int,
        double_quant: bool = False,
        device: torch.device | str | None = None,
    ) -> "PackedStack":
        """A stack of zeros, with the block size that `hf_qmoe.ops.formats.choose_blocksize` allows.

        Raises:
            ValueError: no supported block size divides an expert, `blocksize` is unknown, or `in_features` is odd for
                a 4-bit format.
        """
        chosen = formats.choose_blocksize(out_features, in_features, quant_type, blocksize)
        if chosen is None:
            raise ValueError(
                f"no block size that {quant_type} supports divides an expert of {out_features} x {in_features} "
                "weights; store it as bf16 or leave it unquantized"
            )

        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(num_experts, *shape, dtype=dtype, device=device)

        packed = zeros(out_features, formats.row_bytes(in_features, quant_type), dtype=torch.uint8)
        if not chosen:
            return cls(packed, None, None, None, quant_type)
        blocks = out_features * in_features // chosen
        per_row = in_features % chosen == 0
        scales_shape = (out_features, in_features // chosen) if per_row else (blocks,)
        if not double_quant:
            return cls(packed, zeros(*scales_shape), None, None, quant_type)
        codes = zeros(*scales_shape, dtype=torch.uint8)
        return cls(packed, codes, zeros(-(blocks // -formats.NESTED_BLOCKSIZE)), zeros(), quant_type)

    @classmethod
    def from_float(cls, weights: Tensor, quant_type: str, blocksize: int, double_quant: bool = False) -> "PackedStack":
        """Packs float ``[E, N, K]``, one expert at a time."""
        if weights.ndim != 3:
            raise ValueError(f"expected a stack [E, N, K], got {tuple(weights.shape)}")
        experts, rows, columns = weights.shape
        stack = cls.empty(experts, rows, columns, quant_type, blocksize, double_quant, weights.device)
        for expert, weight in enumerate(weights):
            stack.quantize_expert_(expert, weight)
        return stack

    @property
    def num_experts(self) -> int:
        """E."""
        return self.packed.shape[0]

    @property
    def out_features(self) -> int:
        """N."""
        return self.packed.shape[1]

    @property
    def in_features(self) -> int:
        """K."""
        return torch_ops.logical_shape(self.packed, self.quant_type)[1]

    @property
    def blocksize(self) -> int:
        """Weights per scale; 0 for bf16 and fp16."""
        if self.absmax is None:
            return 0
        return self.out_features * self.in_features // self.absmax.shape[1:].numel()

    @property
    def double_quant(self) -> bool:
        """Whether the scales are quantized themselves."""
        return self.nested_absmax is not None

    @property
    def numel(self) -> int:
        """Logical weights in the stack, ``E * N * K``."""
        return self.num_experts * self.out_features * self.in_features

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, scales included."""
        return sum(t.nbytes for t in self.tensors().values())

    def tensors(self) -> dict[str, Tensor]:
        """Tensors that exist, by field name (``packed``, ``absmax``, ``nested_absmax``, ``nested_offset``)."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}

    def quantize_expert_(self, expert: int, weight: Tensor) -> None:
        """Overwrites one expert with the packed form of `weight`, float ``[N, K]``.

        Raises:
            ValueError: wrong shape, or values that are not finite.
        """
        if tuple(weight.shape) != (self.out_features, self.in_features):
            raise ValueError(
                f"expert {expert} has shape {tuple(weight.shape)}, expected {(self.out_features, self.in_features)}"
            )
        packed, absmax = formats.quantize(weight.detach(), self.quant_type, self.blocksize)
        self.packed[expert] = packed
        if absmax is None or self.absmax is None:
            return
        if self.nested_absmax is not None and self.nested_offset is not None:
            absmax, self.nested_absmax[expert], self.nested_offset[expert] = formats.compress_absmax(absmax)
        self.absmax[expert] = absmax.view(self.absmax.shape[1:])

    def dequantize_expert(self, expert: int, dtype: torch.dtype, reuse: bool = False) -> Tensor:
        """One expert as a new tensor ``[N, K]``; with `reuse`, in the buffer that this thread's next call reuses."""
        absmax = torch_ops.expert_absmax(self.absmax, self.nested_absmax, self.nested_offset, expert)
        values = torch_ops.dequantize_expert(self.packed[expert], absmax, self.quant_type, dtype)
        return values if reuse else values.clone()

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """All experts as a new tensor ``[E, N, K]``."""
        out: Tensor = dequantize_stack(
            self.packed, self.absmax, self.nested_absmax, self.nested_offset, self.quant_type, dtype
        )
        return out
