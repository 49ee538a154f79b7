"""Differentiable pieces of an experts layer with frozen, packed weights.

`frozen_grouped_linear` is the product (its gradient is defined with the operator, `hf_qmoe.ops.schema`).
`gather_tokens` brings tokens into expert order: its gradient is a sum over a token's experts, rather than autograd's
``index_put_(accumulate=True)``, which adds in the low precision of the rows and in no fixed order on CUDA. The way
back is `hf_qmoe.ops.combine`.
"""

from typing import Any

import torch
from torch import Tensor

from hf_qmoe.ops.combine import combine_experts
from hf_qmoe.ops.schema import grouped_linear
from hf_qmoe.packed import PackedStack


def frozen_grouped_linear(x: Tensor, stack: PackedStack, expert_offsets: Tensor, exact: bool = True) -> Tensor:
    """``x[s] @ W_e.T`` for rows sorted by expert; differentiable in `x` alone.

    Args:
        x: ``[S, K]``; the product is computed in its dtype.
        stack: ``[E, N, K]``.
        expert_offsets: int64 ``[E + 1]``, see `hf_qmoe.ops.schema.grouped_linear`.
        exact: whether the bits of the result matter, see there.

    Returns:
        ``[S, N]``.
    """
    scales = stack.absmax, stack.nested_absmax, stack.nested_offset
    out: Tensor = grouped_linear(x, stack.packed, *scales, expert_offsets, stack.quant_type, False, exact)
    return out


class _GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, perm: Tensor, inverse: Tensor, top_k: int) -> Tensor:
        return x.index_select(0, perm // top_k)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, _, inverse, ctx.top_k = inputs
        ctx.save_for_backward(inverse)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (inverse,) = ctx.saved_tensors
        return combine_experts(grad, None, inverse.view(-1, ctx.top_k), None, grad.dtype), None, None, None


def gather_tokens(x: Tensor, perm: Tensor, inverse: Tensor, top_k: int) -> Tensor:
    """Rows of `x` in expert order: ``[T, H]`` to ``[T * top_k, H]``.

    Args:
        perm: int64 ``[T * top_k]``, sorts the flattened (token, slot) pairs by expert.
        inverse: its inverse permutation.
        top_k: experts per token.
    """
    return _GatherTokens.apply(x, perm, inverse, top_k)  # type: ignore[no-any-return, no-untyped-call]
