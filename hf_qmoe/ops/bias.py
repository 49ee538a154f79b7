"""Biases of routed rows: add each expert's to its rows, and the gradient of that, one sum per expert.

Autograd's own gradient of indexing adds rows one by one in the dtype of the bias: in bfloat16 most of it is rounded
away. Operators rather than plain functions, since how many rows an expert has is known only at run time and
``torch.compile`` need not look inside.
"""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from hf_qmoe.ops.checks import check
from hf_qmoe.ops.cuda import READS_ON_HOST
from hf_qmoe.ops.grouped_mm import experts_of_rows


@torch.library.custom_op("hf_qmoe::add_expert_bias", mutates_args=())
def add_expert_bias(rows: Tensor, bias: Tensor, expert_offsets: Tensor) -> Tensor:
    """Adds each expert's bias to its rows; rows of no expert stay as they are.

    Args:
        rows: ``[S, N]``, sorted by expert.
        bias: ``[E, N]`` in the dtype of `rows`.
        expert_offsets: int64 ``[E + 1]``, see `hf_qmoe.ops.schema.grouped_linear`.

    Returns:
        ``[S, N]``.

    Raises:
        RuntimeError: shapes or dtypes that do not belong together.
    """
    _check(rows, bias, expert_offsets)
    if rows.device.type != "cpu":
        return _add_without_waiting(rows, bias, expert_offsets)
    out = rows.clone(memory_format=torch.contiguous_format)
    for expert, (start, end) in enumerate(pairwise(expert_offsets.tolist())):
        out[start:end] += bias[expert]
    return out


@add_expert_bias.register_fake
def _(rows: Tensor, bias: Tensor, expert_offsets: Tensor) -> Tensor:
    _check(rows, bias, expert_offsets)
    return rows.new_empty(rows.shape)


def _add_without_waiting(rows: Tensor, bias: Tensor, expert_offsets: Tensor) -> Tensor:
    """The same bits; the offsets stay on the device, at the price of a bias for each row."""
    experts, is_owned = experts_of_rows(rows.shape[0], expert_offsets)
    return torch.where(is_owned.unsqueeze(1), rows + bias.index_select(0, experts), rows).contiguous()


@torch.library.custom_op("hf_qmoe::sum_by_expert", mutates_args=(), **READS_ON_HOST)
def sum_by_expert(rows: Tensor, expert_offsets: Tensor) -> Tensor:
    """Sums of the rows of each expert: ``[S, N]`` to ``[E, N]``; the arguments are those of `add_expert_bias`."""
    bounds = pairwise(expert_offsets.tolist())
    return torch.stack([rows[start:end].sum(dim=0) for start, end in bounds])


@sum_by_expert.register_fake
def _(rows: Tensor, expert_offsets: Tensor) -> Tensor:
    return rows.new_empty(expert_offsets.shape[0] - 1, rows.shape[1])


def _check(rows: Tensor, bias: Tensor, expert_offsets: Tensor) -> None:
    expected = (expert_offsets.shape[0] - 1, rows.shape[1])
    check(
        bias.shape == expected and bias.dtype == rows.dtype,
        lambda: f"bias must be {rows.dtype} {expected}, got {bias.dtype} {tuple(bias.shape)}",
    )


def _save_for_add(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[2])


def _add_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    (expert_offsets,) = ctx.saved_tensors
    return grad, sum_by_expert(grad, expert_offsets) if ctx.needs_input_grad[1] else None, None


def _save_for_sum(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rows, expert_offsets = inputs
    ctx.save_for_backward(expert_offsets)
    ctx.num_rows = rows.shape[0]


def _sum_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    (expert_offsets,) = ctx.saved_tensors
    return add_expert_bias(grad.new_zeros(ctx.num_rows, grad.shape[1]), grad, expert_offsets), None


add_expert_bias.register_autograd(_add_backward, setup_context=_save_for_add)
sum_by_expert.register_autograd(_sum_backward, setup_context=_save_for_sum)
