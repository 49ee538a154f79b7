"""LoRA of routed rows in factored form: adds ``scaling * (x A_e^T) B_e^T`` for each expert that was hit.

The two matrices are PEFT's (`hf_qmoe.factors`). No update ``B_e A_e`` is built, and autograd keeps `x` and the factors
themselves: ``x A_e^T`` is computed again in backward. Experts without rows get zero gradients. Operators rather than
autograd functions, so that ``torch.compile`` need not look inside.
"""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from hf_qmoe.ops import native_lora
from hf_qmoe.ops.checks import check
from hf_qmoe.ops.cuda import READS_ON_HOST
from hf_qmoe.ops.torch_ops import take_scratch


#: Below this share of experts with rows, only their columns of ``lora_B`` are read.
_FEW = 0.25

#: Larger buffers are not kept.
_REUSED_ELEMENTS = 1 << 23


@torch.library.custom_op("hf_qmoe::add_expert_lora", mutates_args=(), **READS_ON_HOST)
def add_expert_lora(
    rows: Tensor, x: Tensor, lora_A: Tensor, lora_B: Tensor, expert_offsets: Tensor, scaling: float
) -> Tensor:
    """Adds the low-rank term of each expert to its rows; rows of no expert stay as they are.

    Products run in the dtype of `x`, to which the factors are cast, one expert at a time; the sum is rounded once.

    Args:
        rows: ``[S, N]``, sorted by expert, in the dtype of `x`.
        x: ``[S, K]``, rows ``expert_offsets[e]:expert_offsets[e + 1]`` for expert e.
        lora_A: ``[E * R, K]``, any float dtype.
        lora_B: ``[N, R * E]``.
        expert_offsets: int64 ``[E + 1]``, see `hf_qmoe.ops.schema.grouped_linear`.
        scaling: of the product.

    Returns:
        ``[S, N]``.

    Raises:
        RuntimeError: shapes or dtypes that do not belong together.
    """
    _check(rows, x, lora_A, lora_B, expert_offsets)
    hits = _hits(expert_offsets)
    out = torch.empty_like(rows, memory_format=torch.contiguous_format)
    experts_A, experts_B = _by_expert(lora_A, expert_offsets), _transposed(lora_B, expert_offsets, hits, x.dtype)
    if native_lora.can_add(x, lora_A, rows, lora_B):
        native_lora.add_into(out, rows, x, experts_A, experts_B, hits, scaling)
    else:
        for expert, start, end, index in hits:
            hidden = x[start:end] @ experts_A[expert].to(x.dtype).t()
            # `scaling` is applied to the result: what lies between may overflow in float16 where the result does not.
            torch.addmm(rows[start:end], hidden, experts_B[index], alpha=scaling, out=out[start:end])
    tail = hits[-1][2] if hits else 0
    out[tail:] = rows[tail:]
    return out


@add_expert_lora.register_fake
def _(rows: Tensor, x: Tensor, lora_A: Tensor, lora_B: Tensor, expert_offsets: Tensor, scaling: float) -> Tensor:
    _check(rows, x, lora_A, lora_B, expert_offsets)
    return rows.new_empty(rows.shape)


@torch.library.custom_op("hf_qmoe::expert_lora_backward", mutates_args=(), **READS_ON_HOST)
def expert_lora_backward(
    grad: Tensor, x: Tensor, lora_A: Tensor, lora_B: Tensor, expert_offsets: Tensor, scaling: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `add_expert_lora` to ``x``, ``lora_A`` and ``lora_B``, each in its tensor's shape and dtype."""
    hits = _hits(expert_offsets)
    grad_x, grad_A, grad_B = _gradients(x, lora_A, lora_B)
    num_experts, rank = expert_offsets.shape[0] - 1, lora_A.shape[0] // (expert_offsets.shape[0] - 1)
    # One row per (rank, expert), as in the transposed `lora_B`: each expert's rows are written where they belong.
    is_native = native_lora.can_add(x, lora_A, grad, lora_B)
    shape, dtype = (rank * num_experts, lora_B.shape[0]), torch.float32 if is_native else lora_B.dtype
    # The buffer of the products' dtype holds `experts_B`.
    flat = lora_B.new_empty(shape, dtype=dtype) if dtype == x.dtype else _buffer(shape, dtype, lora_B)
    grad_Bt = flat.view(rank, num_experts, -1)
    experts_A, experts_B = _by_expert(lora_A, expert_offsets), _transposed(lora_B, expert_offsets, hits, x.dtype)
    grads_A = _by_expert(grad_A, expert_offsets)
    if is_native:
        native_lora.backward_into(grad_x, grads_A, grad_Bt, grad, x, experts_A, experts_B, hits, scaling)
    else:
        _backward_by_expert(grad_x, grads_A, grad_Bt, grad, x, experts_A, experts_B, hits, scaling)
    grad_x[hits[-1][2] if hits else 0 :] = 0
    native_lora.transpose_into(grad_B, flat)
    return grad_x, grad_A, grad_B


def _gradients(x: Tensor, lora_A: Tensor, lora_B: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Room for the gradients of each, as the kernels write it: in one run, however the tensors lie."""
    x, lora_A, lora_B = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (x, lora_A, lora_B))
    return x, lora_A, lora_B


def _backward_by_expert(
    grad_x: Tensor,
    grads_A: Tensor,
    grad_Bt: Tensor,
    grad: Tensor,
    x: Tensor,
    experts_A: Tensor,
    experts_B: Tensor,
    hits: list[native_lora.Hit],
    scaling: float,
) -> None:
    """As `native_lora.backward_into`, in torch."""
    grads_A.zero_()
    grad_Bt.zero_()
    for expert, start, end, index in hits:
        rows, down = x[start:end], experts_A[expert].to(x.dtype)
        grad_rows, out = grad[start:end], grad_x[start:end]
        grad_hidden = grad_rows @ experts_B[index].t()
        torch.mul((rows @ down.t()).t() @ grad_rows, scaling, out=grad_Bt[:, expert])
        torch.mul(grad_hidden.t() @ rows, scaling, out=grads_A[expert])
        torch.addmm(out, grad_hidden, down, beta=0, alpha=scaling, out=out)


@expert_lora_backward.register_fake
def _(
    grad: Tensor, x: Tensor, lora_A: Tensor, lora_B: Tensor, expert_offsets: Tensor, scaling: float
) -> tuple[Tensor, Tensor, Tensor]:
    return _gradients(x, lora_A, lora_B)


def _hits(expert_offsets: Tensor) -> list[native_lora.Hit]:
    """Experts with rows: ``(expert, start, end, index)``, where `index` is that in `_transposed`."""
    bounds = list(enumerate(pairwise(expert_offsets.tolist())))
    hits = [(expert, start, end) for expert, (start, end) in bounds if end > start]
    is_few = len(hits) < _FEW * len(bounds)
    return [(*hit, index if is_few else hit[0]) for index, hit in enumerate(hits)]


def _by_expert(lora_A: Tensor, expert_offsets: Tensor) -> Tensor:
    return lora_A.view(expert_offsets.shape[0] - 1, -1, lora_A.shape[1])


def _transposed(lora_B: Tensor, expert_offsets: Tensor, hits: list[native_lora.Hit], dtype: torch.dtype) -> Tensor:
    """``B_e^T`` in `dtype`, ``[E, R, N]``, or ``[hits, R, N]`` if they are few."""
    features, num_experts = lora_B.shape[0], expert_offsets.shape[0] - 1
    if len(hits) < _FEW * num_experts:
        experts = lora_B.view(features, -1, num_experts)
        out = lora_B.new_empty(len(hits), experts.shape[1], features, dtype=dtype)
        for expert, _, _, index in hits:
            out[index] = experts[:, :, expert].t()
        return out
    rows = _buffer((lora_B.shape[1], features), dtype, lora_B)
    native_lora.transpose_into(rows, lora_B)
    by_rank: Tensor = rows.view(-1, num_experts, features)
    return by_rank.transpose(0, 1)


def _buffer(shape: tuple[int, int], dtype: torch.dtype, like: Tensor) -> Tensor:
    """Uninitialised memory for the time of an operator: reused, since fresh pages take longer to get than to fill."""
    if shape[0] * shape[1] > _REUSED_ELEMENTS:
        return like.new_empty(shape, dtype=dtype)
    return take_scratch(shape, dtype, like.device)


def _check(rows: Tensor, x: Tensor, lora_A: Tensor, lora_B: Tensor, expert_offsets: Tensor) -> None:
    num_experts = expert_offsets.shape[0] - 1
    check(
        x.ndim == 2 and lora_A.ndim == 2 and lora_A.shape[1] == x.shape[1],
        lambda: f"lora_A must be [E * R, {x.shape[-1]}], got {tuple(lora_A.shape)}",
    )
    check(
        lora_B.ndim == 2 and lora_B.shape[1] == lora_A.shape[0] and lora_A.shape[0] % num_experts == 0,
        lambda: (
            f"lora_A {tuple(lora_A.shape)} and lora_B {tuple(lora_B.shape)} are no [E * R, K] and [N, R * E] for "
            f"{num_experts} experts"
        ),
    )
    expected = (x.shape[0], lora_B.shape[0])
    check(
        rows.shape == expected and rows.dtype == x.dtype,
        lambda: f"rows must be {x.dtype} {expected}, got {rows.dtype} {tuple(rows.shape)}",
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, *tensors, ctx.scaling = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, lora_A, lora_B, expert_offsets = ctx.saved_tensors
    grads = expert_lora_backward(grad.contiguous(), x, lora_A, lora_B, expert_offsets, ctx.scaling)
    return (grad, *grads, None, None)


add_expert_lora.register_autograd(_backward, setup_context=_save)
