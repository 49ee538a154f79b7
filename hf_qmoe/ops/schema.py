"""The operators as torch sees them: schemas, shape functions, autograd.

``hf_qmoe::grouped_linear`` is the one differentiable product of the package. Autograd may keep only what
`_save_operands` hands to ``save_for_backward``: the packed bytes and every tensor of their scales, which are operands
of the operator (not a closure, not an attribute). Backward unpacks again. So no dequantized weight outlives a call, a
weight re-materialised inside a checkpointed region gives the right gradient, and one overwritten in place between
forward and backward raises through autograd's version counter.
"""

from typing import Any

import torch
from torch import Tensor

from hf_qmoe.ops import torch_ops
from hf_qmoe.ops.checks import check
from hf_qmoe.ops.cuda import READS_ON_HOST
from hf_qmoe.ops.formats import NESTED_BLOCKSIZE, get_format


_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@torch.library.custom_op("hf_qmoe::grouped_linear", mutates_args=(), **READS_ON_HOST)
def grouped_linear(
    x: Tensor,
    packed: Tensor,
    absmax: Tensor | None,
    nested_absmax: Tensor | None,
    nested_offset: Tensor | None,
    expert_offsets: Tensor,
    quant_type: str,
    transpose: bool = False,
    exact: bool = True,
) -> Tensor:
    """Product with a packed stack, for rows sorted by expert.

    Each expert's result equals ``torch.nn.functional.linear(x, dequantized)`` bit for bit, in ``x.dtype``; without
    `exact`, its error is at most 1.1 times the error of that. The gradient is exact either way.

    Args:
        x: ``[S, K]`` (``[S, N]`` with `transpose`), rows ``expert_offsets[e]:expert_offsets[e + 1]`` for expert ``e``.
        packed: uint8 ``[E, N, K * bits / 8]``.
        absmax: fp32 (uint8 if double-quantized) ``[E, ...]``, one per block; `None` for bf16 and fp16.
        nested_absmax: fp32 ``[E, ceil(G / 256)]`` if the scales are double-quantized.
        nested_offset: fp32 ``[E]`` if the scales are double-quantized.
        expert_offsets: int64 ``[E + 1]``, from 0; rows past the last offset belong to no expert and give zeros.
        quant_type: one of `hf_qmoe.ops.formats.QUANT_TYPES`.
        transpose: multiply by ``W_e`` instead of ``W_e.T``.
        exact: whether the bits matter; with `transpose` they are always those.

    Returns:
        ``[S, N]`` (``[S, K]`` with `transpose`) in ``x.dtype``.

    Raises:
        RuntimeError: an argument has the wrong shape or dtype.
        ValueError: `expert_offsets` does not rise from 0 to at most S.
    """
    check_stack(packed, absmax, nested_absmax, nested_offset, quant_type)
    _check_product(x, packed, expert_offsets, quant_type, transpose)
    return torch_ops.grouped_linear(
        x.contiguous(), packed, absmax, nested_absmax, nested_offset, expert_offsets, quant_type, transpose, exact
    )


@grouped_linear.register_fake
def _(
    x: Tensor,
    packed: Tensor,
    absmax: Tensor | None,
    nested_absmax: Tensor | None,
    nested_offset: Tensor | None,
    expert_offsets: Tensor,
    quant_type: str,
    transpose: bool = False,
    exact: bool = True,
) -> Tensor:
    check_stack(packed, absmax, nested_absmax, nested_offset, quant_type)
    _check_product(x, packed, expert_offsets, quant_type, transpose)
    rows, columns = torch_ops.logical_shape(packed, quant_type)
    return x.new_empty(x.shape[0], columns if transpose else rows)


def _save_operands(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, packed, absmax, nested_absmax, nested_offset, expert_offsets, quant_type, transpose, _ = inputs
    ctx.save_for_backward(packed, absmax, nested_absmax, nested_offset, expert_offsets)
    ctx.quant_type, ctx.transpose = quant_type, transpose


def _grouped_linear_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    # Read `saved_tensors` once: a second read raises under non-reentrant checkpointing.
    grad_x = grouped_linear(grad, *ctx.saved_tensors, ctx.quant_type, not ctx.transpose)
    return (grad_x, *(None,) * 8)


grouped_linear.register_autograd(_grouped_linear_backward, setup_context=_save_operands)


@torch.library.custom_op("hf_qmoe::dequantize_stack", mutates_args=())
def dequantize_stack(
    packed: Tensor,
    absmax: Tensor | None,
    nested_absmax: Tensor | None,
    nested_offset: Tensor | None,
    quant_type: str,
    dtype: torch.dtype,
) -> Tensor:
    """A whole stack as ``[E, N, K]`` in `dtype`; the arguments are those of `grouped_linear`. Not differentiable."""
    check_stack(packed, absmax, nested_absmax, nested_offset, quant_type)
    check(dtype in _FLOATS, lambda: f"dtype must be a float dtype, got {dtype}")
    return torch_ops.dequantize_stack(packed, absmax, nested_absmax, nested_offset, quant_type, dtype)


@dequantize_stack.register_fake
def _(
    packed: Tensor,
    absmax: Tensor | None,
    nested_absmax: Tensor | None,
    nested_offset: Tensor | None,
    quant_type: str,
    dtype: torch.dtype,
) -> Tensor:
    check_stack(packed, absmax, nested_absmax, nested_offset, quant_type)
    check(dtype in _FLOATS, lambda: f"dtype must be a float dtype, got {dtype}")
    shape = (packed.shape[0], *torch_ops.logical_shape(packed, quant_type))
    return torch.empty(shape, dtype=dtype, device=packed.device)


def check_stack(
    packed: Tensor,
    absmax: Tensor | None,
    nested_absmax: Tensor | None,
    nested_offset: Tensor | None,
    quant_type: str,
) -> None:
    """Checks that the tensors of a stack belong together; see `grouped_linear`.

    Raises:
        RuntimeError: a shape or dtype that native code must not see.
    """
    fmt = get_format(quant_type)
    check(
        packed.ndim == 3 and packed.dtype == torch.uint8,
        lambda: f"packed must be uint8 [E, N, bytes], got {packed.dtype} {tuple(packed.shape)}",
    )
    check(
        (absmax is not None) == fmt.has_scales,
        lambda: f"{quant_type} {'needs' if fmt.has_scales else 'has no'} absmax",
    )
    check(packed.shape[2] * 8 % fmt.bits == 0, lambda: f"packed rows of {packed.shape[2]} bytes end mid-weight")
    if absmax is None:
        check(
            nested_absmax is None and nested_offset is None,
            lambda: f"{quant_type} has no nested_absmax and nested_offset",
        )
        return
    nested = nested_absmax is not None
    check(nested == (nested_offset is not None), lambda: "nested_absmax and nested_offset come together")
    expected = torch.uint8 if nested else torch.float32
    check(
        absmax.dtype == expected,
        lambda: (
            f"absmax must be {expected}, got {absmax.dtype}: the scales of packed weights must not be cast. "
            "Under FSDP2, keep the experts out of the mixed-precision policy."
        ),
    )
    for scale in (nested_absmax, nested_offset):
        if scale is not None:
            check(
                scale.dtype == torch.float32,
                lambda dtype=scale.dtype: f"nested scales must be float32, got {dtype}: they must not be cast",
            )
    check(
        absmax.shape[0] == packed.shape[0],
        lambda: f"absmax is for {absmax.shape[0]} experts, packed for {packed.shape[0]}",
    )
    # Native code reads one scale per block without asking how many there are.
    blocks, weights = absmax.shape[1:].numel(), packed.shape[1] * packed.shape[2] * 8 // fmt.bits
    check(
        blocks > 0 and weights % blocks == 0, lambda: f"absmax has {blocks} scales for {weights} weights of an expert"
    )
    if nested_absmax is not None and nested_offset is not None:
        shape = (packed.shape[0], -(blocks // -NESTED_BLOCKSIZE))
        check(nested_absmax.shape == shape, lambda: f"nested_absmax must be {shape}, got {tuple(nested_absmax.shape)}")
        check(
            nested_offset.shape == shape[:1],
            lambda: f"nested_offset must be {shape[:1]}, got {tuple(nested_offset.shape)}",
        )


def _check_product(x: Tensor, packed: Tensor, expert_offsets: Tensor, quant_type: str, transpose: bool) -> None:
    inner = torch_ops.logical_shape(packed, quant_type)[0 if transpose else 1]
    check(x.ndim == 2 and x.shape[1] == inner, lambda: f"x must be [S, {inner}], got {tuple(x.shape)}")
    check(x.dtype in _FLOATS, lambda: f"x must be a float tensor, got {x.dtype}")
    check(
        expert_offsets.shape == (packed.shape[0] + 1,) and expert_offsets.dtype == torch.int64,
        lambda: (
            f"expert_offsets must be int64 [{packed.shape[0] + 1}], got "
            f"{expert_offsets.dtype} {tuple(expert_offsets.shape)}"
        ),
    )
