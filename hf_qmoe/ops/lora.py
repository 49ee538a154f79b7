"""LoRA of routed rows in factored form: adds ``scaling * (x A_e^T) B_e^T`` for each expert that was hit.

The two matrices are PEFT's (`hf_qmoe.factors`). No update ``B_e A_e`` is built, and autograd keeps `x` and the factors
themselves: ``x A_e^T`` is computed again in backward. Experts without rows get zero gradients. Operators rather than
autograd functions, so that ``torch.compile`` need not look inside.
"""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor


#: Below this share of experts with rows, only their columns of ``lora_B`` are read.
_FEW = 0.25


@torch.library.custom_op("hf_qmoe::add_expert_lora", mutates_args=())
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
    for index, (expert, start, end) in enumerate(hits):
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


@torch.library.custom_op("hf_qmoe::expert_lora_backward", mutates_args=())
def expert_lora_backward(
    grad: Tensor, x: Tensor, lora_A: Tensor, lora_B: Tensor, expert_offsets: Tensor, scaling: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `add_expert_lora` to ``x``, ``lora_A`` and ``lora_B``, each in its tensor's shape and dtype."""
    hits = _hits(expert_offsets)
    grad_x, grad_A = torch.empty_like(x), torch.zeros_like(lora_A)
    num_experts, rank = expert_offsets.shape[0] - 1, lora_A.shape[0] // (expert_offsets.shape[0] - 1)
    # One row per (rank, expert), as in the transposed `lora_B`: each expert's rows are written where they belong.
    grad_Bt = lora_B.new_zeros(rank, num_experts, lora_B.shape[0])
    experts_A, experts_B = _by_expert(lora_A, expert_offsets), _transposed(lora_B, expert_offsets, hits, x.dtype)
    grads_A = _by_expert(grad_A, expert_offsets)
    for index, (expert, start, end) in enumerate(hits):
        rows, down = x[start:end], experts_A[expert].to(x.dtype)
        grad_rows, out = grad[start:end], grad_x[start:end]
        grad_hidden = grad_rows @ experts_B[index].t()
        torch.mul((rows @ down.t()).t() @ grad_rows, scaling, out=grad_Bt[:, expert])
        torch.mul(grad_hidden.t() @ rows, scaling, out=grads_A[expert])
        torch.addmm(out, grad_hidden, down, beta=0, alpha=scaling, out=out)
    grad_x[hits[-1][2] if hits else 0 :] = 0
    return grad_x, grad_A, grad_Bt.view(rank * num_experts, -1).t().contiguous()


@expert_lora_backward.register_fake
def _(
    grad: Tensor, x: Tensor, lora_A: Tensor, lora_B: Tensor, expert_offsets: Tensor, scaling: float
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(lora_A), torch.empty_like(lora_B)


def _hits(expert_offsets: Tensor) -> list[tuple[int, int, int]]:
    """Experts with rows: ``(expert, start, end)``."""
    bounds = pairwise(expert_offsets.tolist())
    return [(expert, start, end) for expert, (start, end) in enumerate(bounds) if end > start]


def _by_expert(lora_A: Tensor, expert_offsets: Tensor) -> Tensor:
    return lora_A.view(expert_offsets.shape[0] - 1, -1, lora_A.shape[1])


def _transposed(
    lora_B: Tensor, expert_offsets: Tensor, hits: list[tuple[int, int, int]], dtype: torch.dtype
) -> list[Tensor]:
    """``B_e^T`` ``[R, N]`` of the experts in `hits`, in `dtype`."""
    features, num_experts = lora_B.shape[0], expert_offsets.shape[0] - 1
    if len(hits) < _FEW * num_experts:
        experts = lora_B.view(features, -1, num_experts)
        return [experts[:, :, expert].t().to(dtype, memory_format=torch.contiguous_format) for expert, _, _ in hits]
    rows = lora_B.to(dtype).t().contiguous()  # a quarter of the time that casting while transposing takes
    return [rows.view(-1, num_experts, features)[:, expert] for expert, _, _ in hits]


def _check(rows: Tensor, x: Tensor, lora_A: Tensor, lora_B: Tensor, expert_offsets: Tensor) -> None:
    num_experts = expert_offsets.shape[0] - 1
    torch._check(
        x.ndim == 2 and lora_A.ndim == 2 and lora_A.shape[1] == x.shape[1],
        lambda: f"lora_A must be [E * R, {x.shape[-1]}], got {tuple(lora_A.shape)}",
    )
    torch._check(
        lora_B.ndim == 2 and lora_B.shape[1] == lora_A.shape[0] and lora_A.shape[0] % num_experts == 0,
        lambda: (
            f"lora_A {tuple(lora_A.shape)} and lora_B {tuple(lora_B.shape)} are no [E * R, K] and [N, R * E] for "
            f"{num_experts} experts"
        ),
    )
    expected = (x.shape[0], lora_B.shape[0])
    torch._check(
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
