"""Low-rank terms of routed rows by the package's own CPU kernels; `hf_qmoe.ops.lora` asks for them.

All experts in one call: a dozen small products for each cost more in calls than in arithmetic. What lies between the
two products of a term stays in float32.
"""

import ctypes

import torch
from torch import Tensor

from hf_qmoe.ops.native_library import DTYPES, address, has_memory, load


#: An expert that was hit, its first row, the end of its rows, and which of the transposed factors is its.
Hit = tuple[int, int, int, int]


class _LoraCall(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("out", "grad_A", "grad_Bt", "rows", "x", "lora_A", "lora_Bt")),
        *((name, ctypes.c_void_p) for name in ("hidden", "factors", "hits")),
        *((name, ctypes.c_int64) for name in ("num_hits", "num_experts", "rank", "in_features", "out_features")),
        *((name, ctypes.c_int64) for name in ("B_each", "B_rank", "dtype", "factor_dtype", "count")),
        *((name, ctypes.c_int64) for name in ("backward", "threads")),
        ("scaling", ctypes.c_double),
    )


class _TransposeCall(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("out", "matrix")),
        *((name, ctypes.c_int64) for name in ("rows", "columns", "out_dtype", "dtype", "threads")),
    )


def can_add(x: Tensor, *others: Tensor) -> bool:
    """Whether there are kernels for products in the dtype of `x`, and memory that they can read."""
    library = load().library
    if library is None or x.dtype not in DTYPES or not library.hf_qmoe_has_lora():
        return False
    return all(map(has_memory, (x, *others)))


def add_into(
    out: Tensor, rows: Tensor, x: Tensor, lora_A: Tensor, experts_B: Tensor, hits: list[Hit], scaling: float
) -> None:
    """``out[s] = rows[s] + scaling * (x[s] A_e^T) B_e^T`` for rows of experts in `hits`; call `can_add` first.

    Args:
        out: contiguous ``[S, N]``; rows of no expert are left as they are.
        rows: ``[S, N]``; x: ``[S, K]``, in the dtype of `out`.
        lora_A: ``[E, R, K]``.
        experts_B: ``B_e^T`` ``[., R, N]`` in the dtype of `out`, the last dimension contiguous; `hits` says whose.
    """
    down = lora_A if lora_A.dtype in DTYPES else lora_A.to(x.dtype)
    _call(out, None, None, rows, x, down, experts_B, hits, scaling)


def backward_into(
    grad_x: Tensor,
    grad_A: Tensor,
    grad_Bt: Tensor,
    grad: Tensor,
    x: Tensor,
    lora_A: Tensor,
    experts_B: Tensor,
    hits: list[Hit],
    scaling: float,
) -> None:
    """Gradients of `add_into`, where `grad` ``[S, N]`` is that of its result; call `can_add` first.

    Args:
        grad_x: contiguous ``[S, K]``; rows of no expert are left as they are.
        grad_A: contiguous ``[E, R, K]`` in the dtype of `lora_A`, overwritten, zeros where no row is.
        grad_Bt: contiguous float32 ``[R, E, N]``, likewise.
    """
    if lora_A.dtype in DTYPES:
        _call(grad_x, grad_A, grad_Bt, grad, x, lora_A, experts_B, hits, scaling)
        return
    rounded = torch.empty_like(grad_A, dtype=x.dtype)
    _call(grad_x, rounded, grad_Bt, grad, x, lora_A.to(x.dtype), experts_B, hits, scaling)
    grad_A.copy_(rounded)


def transpose_into(out: Tensor, matrix: Tensor) -> None:
    """``out.copy_(matrix.t())`` by the package's own kernel where there is one, by torch elsewhere.

    Half the time that torch takes to cast and then to transpose; at once it takes longer still.

    Args:
        out: contiguous ``[M, N]``, any float dtype.
        matrix: ``[N, M]``, any float dtype.
    """
    library = load().library
    is_known = matrix.dtype in DTYPES and out.dtype in DTYPES and has_memory(matrix) and has_memory(out)
    if library is None or not is_known or not library.hf_qmoe_has_lora():
        out.copy_(matrix.t())
        return
    matrix = matrix.contiguous()
    call = _TransposeCall(
        *(address(out), address(matrix), *matrix.shape),
        *(DTYPES[out.dtype], DTYPES[matrix.dtype], torch.get_num_threads()),
    )
    status = library.hf_qmoe_transpose(ctypes.byref(call))
    assert status == 0, status


def _call(
    out: Tensor,
    grad_A: Tensor | None,
    grad_Bt: Tensor | None,
    rows: Tensor,
    x: Tensor,
    lora_A: Tensor,
    experts_B: Tensor,
    hits: list[Hit],
    scaling: float,
) -> None:
    library = load().library
    assert library is not None
    rows, x, lora_A = rows.contiguous(), x.contiguous(), lora_A.contiguous()
    num_experts, rank, in_features = lora_A.shape
    threads, (count, out_features) = torch.get_num_threads(), rows.shape
    hidden = torch.empty(2, count, rank, dtype=torch.float32, device="cpu")
    factors = torch.empty(threads, rank, in_features, dtype=torch.float32, device="cpu")
    flat = [number for hit in hits for number in hit]
    call = _LoraCall(
        *(address(out), None if grad_A is None else address(grad_A)),
        *(None if grad_Bt is None else address(grad_Bt), address(rows), address(x), address(lora_A)),
        *(address(experts_B), address(hidden), address(factors)),
        *(ctypes.addressof(array := (ctypes.c_int64 * max(1, len(flat)))(*flat)), len(hits)),
        *(num_experts, rank, in_features, out_features, experts_B.stride(0), experts_B.stride(1)),
        *(DTYPES[x.dtype], DTYPES[lora_A.dtype], count, grad_A is not None, threads, scaling),
    )
    status = library.hf_qmoe_lora(ctypes.byref(call))
    assert status == 0, status
    del array  # until here
