"""CUDA (and XPU, MPS): bitsandbytes' ``.out`` operators, and what else may be used on which of these devices."""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from hf_qmoe.ops.formats import codebook, get_format


#: For `torch.library.custom_op`, of an operator that reads offsets on the host: no CUDA graph can hold that, so
#: ``torch.compile(mode="reduce-overhead")`` has to leave the operator out. torch before 2.9 has no such tag.
READS_ON_HOST: dict[str, Any] = (
    {"tags": (torch.Tag.cudagraph_unsafe,)} if hasattr(torch.Tag, "cudagraph_unsafe") else {}
)

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def dequantize_into(out: Tensor, packed: Tensor, absmax: Tensor, quant_type: str, blocksize: int) -> bool:
    """Unpacks one matrix into `out`; the arguments are those of `hf_qmoe.ops.cpu.dequantize_into`.

    Returns:
        `False`, with `out` untouched, where bitsandbytes has no ``.out`` kernel for this device or dtype.
    """
    if out.dtype not in _DTYPES:
        return False
    ops = torch.ops.bitsandbytes
    is_4bit = get_format(quant_type).bits == 4
    operator = ops.dequantize_4bit.out if is_4bit else ops.dequantize_blockwise.out
    if not _has_kernel(operator.name(), out.device):
        return False
    if is_4bit:
        operator(packed.view(-1, 1), absmax, blocksize, quant_type, out.shape, out.dtype, out=out)
    else:
        operator(packed, absmax, codebook(quant_type, out.device), blocksize, out.dtype, out=out)
    return True


def has_gemm_4bit(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether bitsandbytes (0.50 on) has a kernel that multiplies by a packed 4-bit matrix on `device`."""
    return dtype in _DTYPES and _has_kernel("bitsandbytes::gemm_4bit", device)


def has_grouped_mm(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether torch (2.10 on) has a grouped product for `device` and `dtype` that leaves the offsets where they are.

    Its CUDA kernel is for bfloat16 and the architectures below; elsewhere ``grouped_mm`` copies the offsets to the
    host and runs a loop. On the CPU they are there already.
    """
    if dtype != torch.bfloat16 or not hasattr(torch.nn.functional, "grouped_mm"):
        return False
    return device.type == "cpu" or (device.type == "cuda" and torch.version.hip is None and _has_cutlass(device))


@cache
def _has_cutlass(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device)[0] in (9, 10)


def _has_kernel(operator: str, device: torch.device) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(operator, device.type.upper())
