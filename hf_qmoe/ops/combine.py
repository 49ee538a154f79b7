"""Between tokens and the rows of their experts: the weighted sum at the end of a layer, and what its gradients need.

Three operators, each linear in two tensors, whose gradients are the other two: `combine_experts` adds up a token's
rows, `spread_tokens` gives each row its token's, `dot_rows` multiplies each row with its token's. None makes a
``[T, k, H]`` tensor, and autograd keeps rows in their own dtype. They are computed in float32 (float64 for float64),
slot by slot, and rounded once; kernels of the package's own and torch give the same bits.

Throughout, ``inverse`` int64 ``[T, k]`` is the row of each (token, slot) pair, a permutation of all ``S = T * k``
rows, and rows from ``expert_offsets[-1]`` on belong to no expert: whatever they hold, they count nothing, and get
zeros.
"""

from typing import Any

import torch
from torch import Tensor

from hf_qmoe.ops.checks import check
from hf_qmoe.ops.native_library import DTYPES, address, has_memory, load


#: Elements of rows that `dot_rows` multiplies at a time; the products stay in cache.
_AT_ONCE = 1 << 17


@torch.library.custom_op("hf_qmoe::combine_experts", mutates_args=())
def combine_experts(
    rows: Tensor, weights: Tensor | None, inverse: Tensor, expert_offsets: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """``out[t] = sum over slots of weights[t, slot] * rows[inverse[t, slot]]``.

    Args:
        rows: ``[S, H]``, sorted by expert.
        weights: ``[T, k]``, any float dtype; `None`: all of them 1.
        inverse: int64 ``[T, k]``.
        expert_offsets: int64 ``[E + 1]``, see `hf_qmoe.ops.schema.grouped_linear`; `None`: every row counts.
        dtype: of the result.

    Returns:
        ``[T, H]``.

    Raises:
        RuntimeError: shapes or dtypes that do not belong together.
        ValueError: `inverse` names a row that does not exist.
    """
    _check_pairs(weights, inverse, expert_offsets)
    _check_rows(rows, inverse)
    wide, (tokens, top_k) = _wide(rows), inverse.shape
    if _native(rows, weights, inverse, expert_offsets, dtype):
        out = rows.new_empty(tokens, rows.shape[1], dtype=dtype)
        _move(out, rows.contiguous(), weights, inverse, expert_offsets, combines=True)
        return out
    total = rows.new_zeros(tokens, rows.shape[1], dtype=wide)
    for slot in range(top_k):
        part = rows.index_select(0, inverse[:, slot]).to(wide)
        if weights is not None:
            part = part * weights[:, slot, None].to(wide)
        total += _owned(part, inverse[:, slot, None], expert_offsets)
    return total.to(dtype)


@combine_experts.register_fake
def _(
    rows: Tensor, weights: Tensor | None, inverse: Tensor, expert_offsets: Tensor | None, dtype: torch.dtype
) -> Tensor:
    _check_pairs(weights, inverse, expert_offsets)
    _check_rows(rows, inverse)
    return rows.new_empty(inverse.shape[0], rows.shape[1], dtype=dtype)


@torch.library.custom_op("hf_qmoe::spread_tokens", mutates_args=())
def spread_tokens(
    tokens: Tensor, weights: Tensor | None, inverse: Tensor, expert_offsets: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """``out[inverse[t, slot]] = weights[t, slot] * tokens[t]``: ``[T, H]`` to ``[S, H]``; see `combine_experts`."""
    _check_pairs(weights, inverse, expert_offsets)
    _check_tokens(tokens, inverse)
    out, wide = tokens.new_empty(inverse.numel(), tokens.shape[1], dtype=dtype), _wide(tokens)
    if _native(tokens, weights, inverse, expert_offsets, dtype):
        _move(tokens.contiguous(), out, weights, inverse, expert_offsets, combines=False)
        return out
    for slot in range(inverse.shape[1]):
        part = tokens.to(wide)
        if weights is not None:
            part = part * weights[:, slot, None].to(wide)
        out.index_copy_(0, inverse[:, slot], _owned(part, inverse[:, slot, None], expert_offsets).to(dtype))
    return out


@spread_tokens.register_fake
def _(
    tokens: Tensor, weights: Tensor | None, inverse: Tensor, expert_offsets: Tensor | None, dtype: torch.dtype
) -> Tensor:
    _check_pairs(weights, inverse, expert_offsets)
    _check_tokens(tokens, inverse)
    return tokens.new_empty(inverse.numel(), tokens.shape[1], dtype=dtype)


@torch.library.custom_op("hf_qmoe::dot_rows", mutates_args=())
def dot_rows(
    tokens: Tensor, rows: Tensor, inverse: Tensor, expert_offsets: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """``out[t, slot] = tokens[t] @ rows[inverse[t, slot]]``: ``[T, H]`` and ``[S, H]`` to ``[T, k]``."""
    _check_pairs(None, inverse, expert_offsets)
    _check_rows(rows, inverse)
    _check_tokens(tokens, inverse)
    (count, top_k), wide = inverse.shape, _wide(rows)
    out = rows.new_empty(count, top_k, dtype=wide)
    step = max(1, _AT_ONCE // max(1, top_k * rows.shape[1])) if rows.device.type == "cpu" else max(1, count)
    for start in range(0, count, step):
        pairs = inverse[start : start + step]
        part = rows.index_select(0, pairs.flatten()).view(*pairs.shape, -1)
        products = part.to(wide).mul_(tokens[start : start + step, None].to(wide))
        torch.sum(products, dim=-1, out=out[start : start + step])
    return _owned(out, inverse, expert_offsets).to(dtype)


@dot_rows.register_fake
def _(tokens: Tensor, rows: Tensor, inverse: Tensor, expert_offsets: Tensor | None, dtype: torch.dtype) -> Tensor:
    _check_pairs(None, inverse, expert_offsets)
    _check_rows(rows, inverse)
    _check_tokens(tokens, inverse)
    return rows.new_empty(inverse.shape, dtype=dtype)


def _wide(values: Tensor) -> torch.dtype:
    return torch.promote_types(values.dtype, torch.float32)


def _owned(values: Tensor, inverse: Tensor, expert_offsets: Tensor | None) -> Tensor:
    """`values` of pairs, zeros where `inverse` is a row of no expert."""
    return values if expert_offsets is None else values.masked_fill(inverse >= expert_offsets[-1], 0.0)


def _native(
    values: Tensor, weights: Tensor | None, inverse: Tensor, expert_offsets: Tensor | None, dtype: torch.dtype
) -> bool:
    """Whether the kernels can do it."""
    tensors = [t for t in (values, weights, inverse, expert_offsets) if t is not None]
    return values.dtype in DTYPES and dtype in DTYPES and all(map(has_memory, tensors)) and load().library is not None


def _move(
    tokens: Tensor,
    rows: Tensor,
    weights: Tensor | None,
    inverse: Tensor,
    expert_offsets: Tensor | None,
    combines: bool,
) -> None:
    library = load().library
    assert library is not None
    inverse = inverse.contiguous()
    weights = None if weights is None else weights.to(torch.float32).contiguous()
    owned = inverse.numel() if expert_offsets is None else int(expert_offsets[-1])
    status = library.hf_qmoe_combine(
        *(address(tokens), DTYPES[tokens.dtype], address(rows), DTYPES[rows.dtype]),
        *(None if weights is None else address(weights), address(inverse), owned),
        *(*inverse.shape, rows.shape[1], combines, torch.get_num_threads()),
    )
    if status:
        raise ValueError(f"inverse must name rows 0 to {inverse.numel() - 1}")


def _check_pairs(weights: Tensor | None, inverse: Tensor, expert_offsets: Tensor | None) -> None:
    check(
        inverse.ndim == 2 and inverse.dtype == torch.int64,
        lambda: f"inverse must be int64 [T, k], got {inverse.dtype} {tuple(inverse.shape)}",
    )
    if weights is not None:
        check(
            weights.shape == inverse.shape and weights.is_floating_point(),
            lambda: f"weights must be floats {tuple(inverse.shape)}, got {weights.dtype} {tuple(weights.shape)}",
        )
    if expert_offsets is not None:
        check(
            expert_offsets.ndim == 1 and expert_offsets.dtype == torch.int64 and expert_offsets.shape[0] > 0,
            lambda: f"expert_offsets must be int64 [E + 1], got {expert_offsets.dtype} {tuple(expert_offsets.shape)}",
        )


def _check_rows(rows: Tensor, inverse: Tensor) -> None:
    check(
        rows.ndim == 2 and rows.shape[0] == inverse.numel() and rows.is_floating_point(),
        lambda: f"rows must be floats [{inverse.numel()}, H], got {rows.dtype} {tuple(rows.shape)}",
    )


def _check_tokens(tokens: Tensor, inverse: Tensor) -> None:
    check(
        tokens.ndim == 2 and tokens.shape[0] == inverse.shape[0] and tokens.is_floating_point(),
        lambda: f"tokens must be floats [{inverse.shape[0]}, H], got {tokens.dtype} {tuple(tokens.shape)}",
    )


# What a gradient needs is saved only where that gradient is wanted: rows are the largest tensors of a layer.
def _save_for_moves(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    values, weights, inverse, expert_offsets, _ = inputs
    wanted, weighted = ctx.needs_input_grad[:2]
    ctx.save_for_backward(values if weighted else None, weights if wanted else None, inverse, expert_offsets)
    ctx.dtypes = values.dtype, None if weights is None else weights.dtype


def _combine_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    rows, weights, inverse, expert_offsets = ctx.saved_tensors
    grad_rows = grad_weights = None
    if ctx.needs_input_grad[0]:
        grad_rows = spread_tokens(grad, weights, inverse, expert_offsets, ctx.dtypes[0])
    if ctx.needs_input_grad[1]:
        grad_weights = dot_rows(grad, rows, inverse, expert_offsets, ctx.dtypes[1])
    return grad_rows, grad_weights, None, None, None


def _spread_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    tokens, weights, inverse, expert_offsets = ctx.saved_tensors
    grad_tokens = grad_weights = None
    if ctx.needs_input_grad[0]:
        grad_tokens = combine_experts(grad, weights, inverse, expert_offsets, ctx.dtypes[0])
    if ctx.needs_input_grad[1]:
        grad_weights = dot_rows(tokens, grad, inverse, expert_offsets, ctx.dtypes[1])
    return grad_tokens, grad_weights, None, None, None


def _save_for_dot(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    tokens, rows, inverse, expert_offsets, _ = inputs
    wanted = ctx.needs_input_grad[:2]
    ctx.save_for_backward(tokens if wanted[1] else None, rows if wanted[0] else None, inverse, expert_offsets)
    ctx.dtypes = tokens.dtype, rows.dtype


def _dot_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    tokens, rows, inverse, expert_offsets = ctx.saved_tensors
    grad_tokens = grad_rows = None
    if ctx.needs_input_grad[0]:
        grad_tokens = combine_experts(rows, grad, inverse, expert_offsets, ctx.dtypes[0])
    if ctx.needs_input_grad[1]:
        grad_rows = spread_tokens(tokens, grad, inverse, expert_offsets, ctx.dtypes[1])
    return grad_tokens, grad_rows, None, None, None


combine_experts.register_autograd(_combine_backward, setup_context=_save_for_moves)
spread_tokens.register_autograd(_spread_backward, setup_context=_save_for_moves)
dot_rows.register_autograd(_dot_backward, setup_context=_save_for_dot)
