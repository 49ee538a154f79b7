"""Operators on packed weights for any device: hit experts only, one at a time, unpacked into one reused buffer.

No autograd here (`hf_qmoe.ops.schema` adds it) and no device names but the two files dispatched to below.
"""

import threading
from itertools import pairwise

import torch
from torch import Tensor

from hf_qmoe.ops import cpu, cuda, grouped_mm, native, native_product
from hf_qmoe.ops.formats import decompress_absmax, dequantize, get_format
from hf_qmoe.ops.operands import Operands


class _Scratch(threading.local):
    """One buffer per dtype and thread, on the CPU; elsewhere the caching allocator already reuses memory."""

    def __init__(self) -> None:
        self.buffers: dict[torch.dtype, Tensor] = {}

    def take(self, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """An uninitialised ``shape`` buffer, valid until the next call in this thread."""
        if device.type != "cpu":
            return torch.empty(shape, dtype=dtype, device=device)
        numel = shape[0] * shape[1]
        buffer = self.buffers.get(dtype)
        if buffer is None or buffer.numel() < numel:
            with torch.inference_mode(False):  # or a later call outside of inference mode could not write to it
                buffer = torch.empty(numel, dtype=dtype, device=device)
            if type(buffer) is Tensor:  # not a fake one, which has no memory
                self.buffers[dtype] = buffer
        return buffer[:numel].view(shape)


_scratch = _Scratch()


def take_scratch(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """An uninitialised ``shape`` buffer, valid until this thread takes or unpacks into another one of this dtype."""
    return _scratch.take(shape, dtype, device)


def release_scratch() -> None:
    """Frees this thread's buffers; the next call allocates them again."""
    _scratch.buffers.clear()


def logical_shape(packed: Tensor, quant_type: str) -> tuple[int, int]:
    """``(N, K)`` of a stack stored as uint8 ``[E, N, K * bits / 8]``."""
    return packed.shape[1], packed.shape[2] * 8 // get_format(quant_type).bits


def expert_absmax(
    absmax: Tensor | None, nested_absmax: Tensor | None, nested_offset: Tensor | None, expert: int
) -> Tensor | None:
    """The fp32 scales ``[G]`` of one expert, decompressed if they are double-quantized."""
    if absmax is None:
        return None
    scales = absmax[expert].reshape(-1)
    if nested_absmax is None or nested_offset is None:
        return scales
    return decompress_absmax(scales, nested_absmax[expert], nested_offset[expert])


def dequantize_expert(
    packed: Tensor, absmax: Tensor | None, quant_type: str, dtype: torch.dtype, out: Tensor | None = None
) -> Tensor:
    """One expert as ``[N, K]`` in `dtype`; without `out`, in a buffer that the next call in the same thread reuses.

    Args:
        packed: uint8 ``[N, K * bits / 8]``.
        absmax: fp32 ``[G]``, or `None` for bf16 and fp16.
        out: contiguous ``[N, K]`` in `dtype`, to be written and returned.
    """
    fmt = get_format(quant_type)
    rows, columns = packed.shape[0], packed.shape[1] * 8 // fmt.bits
    if out is None and fmt.passthrough == dtype:
        return dequantize(packed, None, quant_type, 0, dtype)  # a view
    buffer = _scratch.take((rows, columns), dtype, packed.device) if out is None else out
    if absmax is None:
        return buffer.copy_(dequantize(packed, None, quant_type, 0, fmt.passthrough or dtype))
    blocksize = rows * columns // absmax.numel()
    modules = (native, cpu) if packed.device.type == "cpu" else (cuda,)
    operands = buffer, packed.contiguous(), absmax.contiguous(), quant_type, blocksize
    if not any(module.dequantize_into(*operands) for module in modules):
        buffer.copy_(dequantize(packed, absmax, quant_type, blocksize, dtype))
    return buffer


def grouped_linear(
    x: Tensor,
    packed: Tensor,
    absmax: Tensor | None,
    nested_absmax: Tensor | None,
    nested_offset: Tensor | None,
    expert_offsets: Tensor,
    quant_type: str,
    transpose: bool,
    exact: bool = True,
) -> Tensor:
    """``y = x @ W_e.T`` (or ``x @ W_e`` with `transpose`) for rows sorted by expert; see `hf_qmoe.ops.schema`."""
    stack = Operands(packed, absmax, nested_absmax, nested_offset, quant_type)
    if not exact and not transpose:
        if x.device.type != "cpu" and (result := grouped_mm.grouped_linear(x, stack, expert_offsets)) is not None:
            return result
        if native_product.multiplies(x, stack):
            result = x.new_empty(x.shape[0], stack.shape[1])
            end = _checked_bounds(x, expert_offsets)[-1]
            native_product.grouped_linear_into(result, x, stack, expert_offsets)
            result[end:].zero_()
            return result
    _, rows, columns = stack.shape
    out = x.new_empty(x.shape[0], columns if transpose else rows)
    bounds = _checked_bounds(x, expert_offsets)
    for expert, (start, end) in enumerate(pairwise(bounds)):
        if start == end:
            continue
        scales = expert_absmax(absmax, nested_absmax, nested_offset, expert)
        weight = dequantize_expert(packed[expert], scales, quant_type, x.dtype)
        result = out[start:end]
        # MKL's last bits depend on where operands lie, and `F.linear` writes to aligned memory. Always `out=`: unlike
        # `torch.mm(a, b)`, it is left alone by autocast.
        target = torch.empty_like(result) if result.data_ptr() % 64 else result
        torch.mm(x[start:end], weight if transpose else weight.t(), out=target)
        if target is not result:
            result.copy_(target)
    out[bounds[-1] :].zero_()
    return out


def _checked_bounds(x: Tensor, expert_offsets: Tensor) -> list[int]:
    bounds: list[int] = expert_offsets.tolist()
    if bounds[0] != 0 or bounds[-1] > x.shape[0] or bounds != sorted(bounds):
        raise ValueError(
            f"expert_offsets must rise from 0 to at most {x.shape[0]}, got {bounds}; a negative expert index does this"
        )
    return bounds


def dequantize_stack(
    packed: Tensor,
    absmax: Tensor | None,
    nested_absmax: Tensor | None,
    nested_offset: Tensor | None,
    quant_type: str,
    dtype: torch.dtype,
) -> Tensor:
    """The whole stack as ``[E, N, K]`` in `dtype`; see `hf_qmoe.ops.schema`."""
    out = torch.empty(packed.shape[0], *logical_shape(packed, quant_type), dtype=dtype, device=packed.device)
    for expert in range(packed.shape[0]):
        scales = expert_absmax(absmax, nested_absmax, nested_offset, expert)
        dequantize_expert(packed[expert], scales, quant_type, dtype, out[expert])
    return out
