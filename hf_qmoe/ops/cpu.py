"""CPU: dequantize into a caller's buffer through bitsandbytes' own library.

bitsandbytes registers no CPU kernel for its ``.out`` operators, and a fresh 8 MB buffer per expert costs more in page
faults than the unpacking itself. Its native library has the entry points that its operators call; they are used here
with the same arguments, so the bits are the same.
"""

import ctypes

import torch
from bitsandbytes.cextension import lib
from torch import Tensor

from hf_qmoe.ops.formats import codebook, get_format, rows_for_dequantize
from hf_qmoe.ops.native_library import address, has_memory


_DTYPE_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}

# bitsandbytes leaves its AVX512 kernel for blocks of 2048 and more, where it is not accurate.
_MAX_NATIVE_BLOCKSIZE = 1024


def dequantize_into(out: Tensor, packed: Tensor, absmax: Tensor, quant_type: str, blocksize: int) -> bool:
    """Unpacks one matrix into `out`, if the native library can.

    Args:
        out: contiguous ``[N, K]`` float32, bfloat16 or float16 on the CPU; overwritten.
        packed: contiguous uint8 ``[N, K * bits / 8]``.
        absmax: contiguous fp32, one per block.

    Returns:
        `False`, with `out` untouched, where the library has no such entry point.
    """
    suffix = _DTYPE_NAMES.get(out.dtype)
    if suffix is None or blocksize > _MAX_NATIVE_BLOCKSIZE or not all(map(has_memory, (out, packed, absmax))):
        return False
    is_4bit = get_format(quant_type).bits == 4
    name = f"cdequantize_blockwise_cpu_{quant_type}_{suffix}" if is_4bit else f"cdequantize_blockwise_cpu_{suffix}"
    # Asked directly, `lib` answers for every name, with a function that raises where there is none.
    function = getattr(getattr(lib, "_lib", None), name, None)
    if function is None:
        return False
    pointers = [ctypes.c_void_p(address(t)) for t in (packed, absmax, out)]
    sizes: tuple[int, ...]
    if is_4bit:
        sizes = (blocksize, *rows_for_dequantize(out.shape[0], out.shape[1], blocksize))
    else:
        pointers.insert(0, ctypes.c_void_p(address(codebook(quant_type, "cpu"))))
        sizes = (blocksize, out.numel())
    function(*pointers, *(ctypes.c_longlong(size) for size in sizes))
    return True
