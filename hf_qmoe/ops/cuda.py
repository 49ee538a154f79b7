"""CUDA (and XPU, MPS): dequantize into a caller's buffer through bitsandbytes' ``.out`` operators."""

import torch
from torch import Tensor

from hf_qmoe.ops.formats import codebook, get_format


def dequantize_into(out: Tensor, packed: Tensor, absmax: Tensor, quant_type: str, blocksize: int) -> bool:
    """Unpacks one matrix into `out`; the arguments are those of `hf_qmoe.ops.cpu.dequantize_into`.

    Returns:
        `False`, with `out` untouched, where bitsandbytes has no ``.out`` kernel for this device or dtype.
    """
    if out.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return False
    ops = torch.ops.bitsandbytes
    is_4bit = get_format(quant_type).bits == 4
    operator = ops.dequantize_4bit.out if is_4bit else ops.dequantize_blockwise.out
    if not torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), out.device.type.upper()):
        return False
    if is_4bit:
        operator(packed.view(-1, 1), absmax, blocksize, quant_type, out.shape, out.dtype, out=out)
    else:
        operator(packed, absmax, codebook(quant_type, out.device), blocksize, out.dtype, out=out)
    return True
