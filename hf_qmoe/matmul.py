"""`matmul_4bit`: bitsandbytes' product with a packed linear weight, whose backward sees what autograd saved.

bitsandbytes keeps the packed weight and its `QuantState` as attributes of the autograd node. Saved-tensor hooks do not
see attributes: a checkpointed region that re-materialises its weights recomputes into tensors that backward never
looks at, and backward reads whatever lies in the recycled buffer by then. Here every tensor of the weight is an
operand and is saved as one, so it is recomputed with its region, and an overwrite without checkpointing raises.
"""

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import bitsandbytes
import torch
from bitsandbytes.functional import QuantState
from torch import Tensor
from torch.nn.functional import linear

from hf_qmoe.ops.bnb_tables import make_bnb_tables
from hf_qmoe.ops.formats import NESTED_BLOCKSIZE, decompress_absmax, rows_for_dequantize
from hf_qmoe.ops.native_library import refuse_freed
from hf_qmoe.ops.torch_ops import dequantize_expert


class _Weight(NamedTuple):
    """A packed matrix as operands: bytes ``[N * K / 2, 1]`` and every tensor of its `QuantState`, or `None`."""

    packed: Tensor
    absmax: Tensor
    code: Tensor | None
    offset: Tensor | None
    nested_absmax: Tensor | None
    nested_code: Tensor | None

    @classmethod
    def of(cls, packed: Tensor, state: QuantState) -> "_Weight":
        # A view, not the parameter: it keeps the bytes of now if someone assigns to `parameter.data`.
        packed = packed.detach().view(-1, 1)
        if not state.nested:
            return cls(packed, state.absmax, state.code, None, None, None)
        return cls(packed, state.absmax, state.code, state.offset, state.state2.absmax, state.state2.code)

    def scales(self) -> Tensor:
        """fp32, one per block."""
        if self.nested_absmax is None or self.offset is None:
            return self.absmax
        return decompress_absmax(self.absmax, self.nested_absmax, self.offset, self.nested_code)


class _Facts(NamedTuple):
    """What of a `QuantState` is not a tensor."""

    shape: tuple[int, int]
    blocksize: int
    quant_type: str

    def fused(self, device: torch.device) -> bool:
        """Whether bitsandbytes has a fused product for `device` that is right for this weight."""
        # Its fallback, all that a CPU has, dequantizes into fresh memory; the same is done here with reused memory.
        # Where rows end mid-block, that fallback takes wrong scales on AVX512.
        if not _HAS_FUSED or self.shape[1] % self.blocksize:
            return False
        return torch.compiler.is_compiling() or torch._C._dispatch_has_kernel_for_dispatch_key(
            "bitsandbytes::gemm_4bit", device.type.upper()
        )


_HAS_FUSED = hasattr(torch.ops.bitsandbytes, "gemm_4bit")  # from bitsandbytes 0.50 on


def _dequantize(weight: _Weight, facts: _Facts, dtype: torch.dtype) -> Tensor:
    """``[N, K]`` in `dtype`. On a CPU in a buffer that the next product reuses."""
    rows, columns = facts.shape
    numel = rows * columns
    if numel % facts.blocksize == 0 and columns % 2 == 0 and not torch.compiler.is_compiling():
        packed = weight.packed.reshape(-1).view(torch.uint8)
        return dequantize_expert(packed.view(rows, -1), weight.scales(), facts.quant_type, dtype)
    # The last block is not full, or a byte is shared by two rows: as one row.
    shape = (1, numel) if numel % facts.blocksize else rows_for_dequantize(rows, columns, facts.blocksize)
    if not torch.compiler.is_compiling():
        make_bnb_tables(facts.quant_type, weight.packed.device)
    refuse_freed(weight.packed, weight.absmax)
    unpack = torch.ops.bitsandbytes.dequantize_4bit.default
    out: Tensor = unpack(weight.packed, weight.scales(), facts.blocksize, facts.quant_type, list(shape), dtype)
    return out.view(rows, columns)


def _fused(x: Tensor, weight: _Weight, facts: _Facts, bias: Tensor | None) -> Tensor:
    """bitsandbytes' fused kernel: it unpacks within the product."""
    refuse_freed(*(t for t in (weight.packed, weight.absmax, weight.nested_absmax) if t is not None))
    fixed = (list(facts.shape), weight.absmax, facts.blocksize, facts.quant_type)
    nested: dict[str, Any] = {}
    if weight.nested_absmax is not None:
        fixed = (list(facts.shape), weight.nested_absmax, facts.blocksize, facts.quant_type)
        nested = {
            "absmax_8bit": weight.absmax,
            "absmax_code": weight.nested_code,
            "absmax_offset": weight.offset,
        }
    out: Tensor = torch.ops.bitsandbytes.gemm_4bit.default(x, weight.packed, *fixed, bias=bias, **nested)
    return out


def _product(x: Tensor, weight: _Weight, facts: _Facts, bias: Tensor | None, transpose: bool) -> Tensor:
    if not transpose and facts.fused(x.device):
        return _fused(x, weight, facts, bias)
    unpacked = _dequantize(weight, facts, x.dtype)
    return linear(x, unpacked.t() if transpose else unpacked, bias)


class _MatMul4bit(torch.autograd.Function):
    """``x @ W.T + bias``, or ``x @ W + bias`` with `transpose`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, facts: _Facts, transpose: bool, *operands: Any) -> Tensor:
        weight = _Weight(*operands)
        ctx.save_for_backward(*operands)
        ctx.facts, ctx.transpose = facts, transpose
        ctx.bias_dtype = None if bias is None else bias.dtype
        return _product(x, weight, facts, bias, transpose)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        operands = ctx.saved_tensors  # once: a second read raises under non-reentrant checkpointing
        grad_x = grad_bias = None
        if ctx.needs_input_grad[1]:
            grad_bias = grad.reshape(-1, grad.shape[-1]).sum(0, dtype=ctx.bias_dtype)
        if ctx.needs_input_grad[0]:
            if torch.is_grad_enabled():  # create_graph=True
                grad_x = _apply(grad, None, ctx.facts, not ctx.transpose, *operands)
            else:
                unpacked = _dequantize(_Weight(*operands), ctx.facts, grad.dtype)
                grad_x = torch.matmul(grad, unpacked.t() if ctx.transpose else unpacked)
        return grad_x, grad_bias, *(None,) * (2 + len(operands))


_apply: Callable[..., Any] = _MatMul4bit.apply


def matmul_4bit(
    A: Tensor,
    B: Tensor,
    quant_state: QuantState,
    out: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """``A @ W.T + bias`` for a weight packed by bitsandbytes' ``quantize_4bit``; differentiable in A and bias.

    Takes the place of ``bitsandbytes.matmul_4bit``: same arguments, same forward bits, through its fused kernel where
    it has one for the device. Backward multiplies by the weight dequantized in the gradient's dtype.

    Args:
        A: ``[..., K]`` float32, bfloat16 or float16.
        B: the packed weight, ``[N * K / 2, 1]`` bytes in any storage dtype, or its transpose.
        quant_state: of B, with ``shape == [N, K]``. A weight that was quantized as ``[K, N]`` works too, slower, and
            warns.
        out: ``[..., N]``, overwritten with the result if given.
        bias: ``[N]``.

    Returns:
        ``[..., N]`` in the dtype of A; `out` if it was given.

    Raises:
        TypeError: A is of another dtype.
        ValueError: `quant_state` is missing, is not that of a matrix, or its scales are quantized in other blocks than
            bitsandbytes' 256.
        RuntimeError: in backward, if bytes or scales were overwritten since forward; or at once, if a gradient is
            asked for through a weight that was rewritten for inference (``packing_format_for_cpu``).
    """
    if quant_state is None:
        raise ValueError("matmul_4bit needs the quant_state of the packed weight")
    if len(quant_state.shape) != 2:
        raise ValueError(f"matmul_4bit needs a matrix [N, K], quant_state.shape is {tuple(quant_state.shape)}")
    if A.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise TypeError(f"matmul_4bit multiplies float32, bfloat16 or float16, got {A.dtype}; cast the input")
    if quant_state.nested and quant_state.state2.blocksize != NESTED_BLOCKSIZE:
        raise ValueError(
            f"scales quantized in blocks of {quant_state.state2.blocksize} are not supported, only {NESTED_BLOCKSIZE}"
        )
    trains = torch.is_grad_enabled() and (A.requires_grad or (bias is not None and bias.requires_grad))
    if getattr(quant_state, "packing_format_for_cpu", False):
        if trains:
            raise RuntimeError(
                "bitsandbytes rewrote this weight for inference on the CPU, which has no gradient; it would be lost "
                "in silence. Load the model with QMoEConfig, or train before the first forward in eval mode."
            )
        return bitsandbytes.matmul_4bit(A, B, quant_state, out=out, bias=bias)  # type: ignore[no-any-return]
    facts = _Facts(tuple(quant_state.shape), quant_state.blocksize, quant_state.quant_type)
    rows, columns = facts.shape
    transpose = A.shape[-1] == rows and rows != columns
    if transpose and not torch.compiler.is_compiling():
        warnings.warn(
            f"matmul_4bit: the weight was quantized as [K, N] = {list(facts.shape)}; quantize it as [N, K] "
            "(out_features, in_features). bitsandbytes will make this an error.",
            DeprecationWarning,
            stacklevel=2,
        )
    weight = _Weight.of(B, quant_state)
    if not A.numel():
        nothing = A.new_zeros(()).expand(rows, columns)  # no memory
        result = linear(A, nothing.t() if transpose else nothing, bias)
    elif trains:
        result = _apply(A, bias, facts, transpose, *weight)
    else:
        result = _product(A, weight, facts, bias, transpose)
    return result if out is None else out.copy_(result)
