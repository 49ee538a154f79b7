"""Differentiable pieces of an experts layer with frozen, packed weights.

`frozen_grouped_linear` is the product (its gradient is defined with the operator, `hf_qmoe.ops.schema`).
`gather_tokens` and `scatter_tokens` move rows between token order and expert order: their gradients are the inverse
permutation and a sum over a token's experts, rather than autograd's ``index_put_(accumulate=True)``, which adds in the
low precision of the rows and in no fixed order on CUDA.
"""

from typing import Any

import torch
from torch import Tensor

from hf_qmoe.ops.schema import grouped_linear
from hf_qmoe.packed import PackedStack


def frozen_grouped_linear(x: Tensor, stack: PackedStack, expert_offsets: Tensor) -> Tensor:
    """``x[s] @ W_e.T`` for rows sorted by expert; differentiable in `x` alone.

    Args:
        x: ``[S, K]``; the product is computed in its dtype.
        stack: ``[E, N, K]``.
        expert_offsets: int64 ``[E + 1]``, see `hf_qmoe.ops.schema.grouped_linear`.

    Returns:
        ``[S, N]``.
    """
    out: Tensor = grouped_linear(
        x, stack.packed, stack.absmax, stack.nested_absmax, stack.nested_offset, expert_offsets, stack.quant_type
    )
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
        per_token = grad.index_select(0, inverse).view(-1, ctx.top_k, grad.shape[1])
        return per_token.sum(dim=1), None, None, None


class _ScatterTokens(torch.autograd.Function):
    @staticmethod
    def forward(y: Tensor, perm: Tensor, inverse: Tensor) -> Tensor:
        return y.index_select(0, inverse)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, perm, _ = inputs
        ctx.save_for_backward(perm)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (perm,) = ctx.saved_tensors
        return grad.index_select(0, perm), None, None


def gather_tokens(x: Tensor, perm: Tensor, inverse: Tensor, top_k: int) -> Tensor:
    """Rows of `x` in expert order: ``[T, H]`` to ``[T * top_k, H]``.

    Args:
        perm: int64 ``[T * top_k]``, sorts the flattened (token, slot) pairs by expert.
        inverse: its inverse permutation.
        top_k: experts per token.
    """
    return _GatherTokens.apply(x, perm, inverse, top_k)  # type: ignore[no-any-return, no-untyped-call]


def scatter_tokens(y: Tensor, perm: Tensor, inverse: Tensor) -> Tensor:
    """Undoes the order of `gather_tokens`: ``[T * top_k, H]`` by expert to ``[T * top_k, H]`` by (token, slot)."""
    return _ScatterTokens.apply(y, perm, inverse)  # type: ignore[no-any-return, no-untyped-call]
