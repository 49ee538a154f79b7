"""The gate ``silu(gate) * up`` of a projection's rows. Autograd keeps the projection alone.

Plain autograd would keep ``silu(gate)`` beside it: half as much again. Here it is computed again in backward, a few
rows at a time, so that what lies between stays in cache. Results and gradients are those of the plain formula, but for
last bits where torch, with several threads, would split a row: it computes the ends of its parts in another way.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from hf_qmoe.ops.checks import check


#: Elements of a result that are computed at a time, on the CPU.
_AT_ONCE = 1 << 16


@torch.library.custom_op("hf_qmoe::silu_gate", mutates_args=())
def silu_gate(rows: Tensor, is_concatenated: bool) -> Tensor:
    """``silu(gate) * up``.

    Args:
        rows: ``[S, 2I]``.
        is_concatenated: columns are ``[gate; up]`` if true, ``gate0, up0, gate1, ...`` if not.

    Returns:
        ``[S, I]``.

    Raises:
        RuntimeError: `rows` has another shape, or an odd number of columns.
    """
    _check(rows)
    out = rows.new_empty(rows.shape[0], rows.shape[1] // 2)
    for part in _parts(out):
        gate, up = _split(rows[part], is_concatenated)
        torch.ops.aten.silu.out(gate, out=out[part])
        out[part].mul_(up)
    return out


@silu_gate.register_fake
def _(rows: Tensor, is_concatenated: bool) -> Tensor:
    _check(rows)
    return rows.new_empty(rows.shape[0], rows.shape[1] // 2)


@torch.library.custom_op("hf_qmoe::silu_gate_backward", mutates_args=())
def silu_gate_backward(grad: Tensor, rows: Tensor, is_concatenated: bool) -> Tensor:
    """The gradient of `silu_gate` to `rows`, ``[S, 2I]``."""
    out = torch.empty_like(rows, memory_format=torch.contiguous_format)
    grad = grad.contiguous()  # torch computes strided values one by one, with another exponential function
    parts = list(_parts(grad))
    activated = grad.new_empty(grad[parts[0]].shape) if parts else grad
    for part in parts:
        grad_out, own = grad[part], activated[: grad[part].shape[0]]
        gate, up = _split(rows[part], is_concatenated)
        grad_gate, grad_up = _split(out[part], is_concatenated)
        torch.ops.aten.silu.out(gate, out=own)
        torch.mul(grad_out, own, out=grad_up)
        torch.mul(grad_out, up, out=own)
        torch.ops.aten.silu_backward.grad_input(own, gate, grad_input=grad_gate)
    return out


@silu_gate_backward.register_fake
def _(grad: Tensor, rows: Tensor, is_concatenated: bool) -> Tensor:
    return torch.empty_like(rows, memory_format=torch.contiguous_format)


def _parts(out: Tensor) -> Iterator[slice]:
    """Runs of rows."""
    count, width = out.shape
    step = max(1, _AT_ONCE // max(1, width)) if out.device.type == "cpu" else max(1, count)
    return (slice(start, start + step) for start in range(0, count, step))


def _split(rows: Tensor, is_concatenated: bool) -> tuple[Tensor, ...]:
    return rows.chunk(2, dim=-1) if is_concatenated else (rows[..., ::2], rows[..., 1::2])


def _check(rows: Tensor) -> None:
    check(rows.ndim == 2 and rows.shape[1] % 2 == 0, lambda: f"rows must be [S, 2 * I], got {tuple(rows.shape)}")


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rows, ctx.is_concatenated = inputs
    ctx.save_for_backward(rows)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    (rows,) = ctx.saved_tensors
    return silu_gate_backward(grad, rows, ctx.is_concatenated), None


def _save_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    grad, rows, ctx.is_concatenated = inputs
    ctx.save_for_backward(grad, rows)


def _second_backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, ...]:
    """Gradients of `silu_gate_backward` to ``grad`` and ``rows``, in differentiable torch; a gradient penalty's."""
    grad, rows = ctx.saved_tensors
    wide = torch.promote_types(rows.dtype, torch.float32)
    d, (gate, up) = grad.to(wide), _split(rows.to(wide), ctx.is_concatenated)
    for_gate, for_up = _split(cotangent.to(wide), ctx.is_concatenated)
    sigmoid = torch.sigmoid(gate)
    first = sigmoid * (1 + gate * (1 - sigmoid))
    second = sigmoid * (1 - sigmoid) * (2 + gate * (1 - 2 * sigmoid))
    to_grad = for_gate * up * first + for_up * silu(gate)
    to_gate, to_up = d * (for_gate * up * second + for_up * first), d * for_gate * first
    joined = torch.cat((to_gate, to_up), dim=-1)
    if not ctx.is_concatenated:
        joined = torch.stack((to_gate, to_up), dim=-1).flatten(-2)
    return to_grad.to(grad.dtype), joined.to(rows.dtype), None


silu_gate.register_autograd(_backward, setup_context=_save)
silu_gate_backward.register_autograd(_second_backward, setup_context=_save_backward)
