"""The library of the package's own CPU kernels: found, loaded and declared at the first use.

It is compiled from ``csrc`` when the package is installed, if there is a compiler. Where it is missing, callers go on
without: `load` says why.

Environment variables, read at the first use:

``HF_QMOE_CPU_KERNELS``
    ``auto`` (default): the best instruction set of the processor. ``amx`` (AMX-BF16), ``avx512bf16``, ``avx512`` (F,
    BW, DQ, VL and VBMI), ``avx2`` (with FMA and F16C) or ``generic``: that one, or an error if it cannot be had.
    ``off``: no kernels of our own. Packed bytes and unpacked values are the same whatever is chosen; products are
    not, and `generic` has none.
``HF_QMOE_NATIVE_LIBRARY``
    Path of a library to load instead of the installed one, e.g. one with sanitizers.
"""

import ctypes
import os
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from hf_qmoe.logging import get_logger


logger = get_logger(__name__)

INSTRUCTION_SETS = ("amx", "avx512bf16", "avx512", "avx2", "generic")
_MODES = ("auto", *INSTRUCTION_SETS, "off")

#: The dtypes that kernels take, and the numbers they have for them.
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}

_POINTER, _INT, _INT64 = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
_ARGUMENTS = {
    "hf_qmoe_dequantize": (_POINTER, _INT, *(_POINTER,) * 3, _INT, _INT64, _INT64, _INT, _INT),
    "hf_qmoe_quantize_4bit": (_POINTER, _POINTER, _POINTER, _INT, _POINTER, _POINTER, _INT64, _INT64, _INT),
    "hf_qmoe_quantize_8bit": (_POINTER, _POINTER, _POINTER, _INT, _POINTER, _INT64, _INT64, _INT),
    "hf_qmoe_combine": (*(_POINTER, _INT) * 2, _POINTER, _POINTER, *(_INT64,) * 4, _INT, _INT),
    "hf_qmoe_select": (ctypes.c_char_p,),
    "hf_qmoe_has_lora": (),
    "hf_qmoe_has_products": (),
    "hf_qmoe_grouped_linear": (_POINTER,),
    "hf_qmoe_experts": (*(_POINTER,) * 5, _INT),
    "hf_qmoe_lora": (_POINTER,),
    "hf_qmoe_transpose": (_POINTER,),
}


class Loaded(NamedTuple):
    """The library, or the reason why there is none, and whether to unpack with it."""

    library: ctypes.CDLL | None = None
    reason: str | None = None
    unpacks: bool = False


def available() -> bool:
    """Whether the kernels are there and not switched off.

    Raises:
        ValueError: ``HF_QMOE_CPU_KERNELS`` is none of the values above, or an instruction set this processor lacks.
        RuntimeError: it names an instruction set, but there is no library.
    """
    return load().library is not None


def why_not() -> str | None:
    """Why the kernels are not available, for the user; `None` if they are. Raises as `available` does."""
    return load().reason


def instruction_set() -> str | None:
    """The instruction set in use, one of `INSTRUCTION_SETS`; `None` if the kernels are not available."""
    library = load().library
    return None if library is None else library.hf_qmoe_instruction_set().decode()


def use_instruction_set(name: str | None) -> None:
    """Switches all threads to another instruction set, `None` for the best; tests and benchmarks compare them.

    Raises:
        ValueError: this processor does not have it.
        RuntimeError: the kernels are not available.
    """
    library = load().library
    if library is None:
        raise RuntimeError(f"the native CPU kernels are not available: {why_not()}")
    if not library.hf_qmoe_select(None if name is None else name.encode()):
        raise ValueError(f"this processor cannot run the CPU kernels for {name!r}; choose one of {INSTRUCTION_SETS}")
    _has_products.cache_clear()


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # asked while a graph is traced, too
def has_products() -> bool:
    """Whether the instruction set in use multiplies with packed weights."""
    return _has_products()


@cache
def _has_products() -> bool:
    library = load().library
    return library is not None and bool(library.hf_qmoe_has_products())


def has_memory(tensor: Tensor) -> bool:
    """Whether a pointer to it can be had: not for fake tensors and other wrappers, nor on other devices."""
    cls = type(tensor)
    wrapped = cls is not Tensor and cls.__torch_dispatch__ is not Tensor.__torch_dispatch__
    return tensor.device.type == "cpu" and tensor.layout is torch.strided and not wrapped


def address(tensor: Tensor) -> int:
    """Where the numbers of a tensor are, for a kernel to read or write.

    Raises:
        RuntimeError: it has none: it is on meta, or its storage has been freed, as FSDP1 does between two forwards.
    """
    pointer = tensor.data_ptr()
    # The address of a view of freed storage is its offset.
    if (not pointer or not tensor.untyped_storage().nbytes()) and tensor.numel():
        raise RuntimeError(
            f"a {tensor.dtype} tensor {tuple(tensor.shape)} has no memory: it is on meta, or its storage was freed"
        )
    return pointer


def refuse_freed(*tensors: Tensor) -> None:
    """For code of others that reads memory: raises as `address` does, but for fake tensors and the like."""
    if not torch.compiler.is_compiling():
        for tensor in filter(has_memory, tensors):
            address(tensor)


@cache
def load() -> Loaded:
    mode = os.environ.get("HF_QMOE_CPU_KERNELS") or "auto"
    if mode not in _MODES:
        raise ValueError(f"HF_QMOE_CPU_KERNELS={mode!r} is unknown; choose one of {', '.join(_MODES)}")
    if mode == "off":
        return Loaded(reason="HF_QMOE_CPU_KERNELS=off")
    library, reason = _open(os.environ.get("HF_QMOE_NATIVE_LIBRARY"))
    if library is None:
        if mode != "auto":
            raise RuntimeError(f"HF_QMOE_CPU_KERNELS={mode} asks for the native CPU kernels, but {reason}")
        logger.info(f"CPU kernels: those of bitsandbytes, because {reason}")
        return Loaded(reason=reason)
    if not library.hf_qmoe_select(None if mode == "auto" else mode.encode()):
        raise ValueError(f"HF_QMOE_CPU_KERNELS={mode}, but this processor does not have {mode}; leave it to `auto`")
    name = library.hf_qmoe_instruction_set().decode()
    logger.info(f"CPU kernels: native, {name}")
    # bitsandbytes' own code unpacks faster than plain C++ does.
    return Loaded(library, unpacks=mode != "auto" or name != "generic")


def _open(name: str | None) -> tuple[ctypes.CDLL | None, str]:
    """Loads and declares the library, or says why not."""
    # Not above: `python -m hf_qmoe.ops.build_native` warns if importing the package has imported it already.
    from hf_qmoe.ops import build_native

    path = Path(name or build_native.LIBRARY)
    build = "`python -m hf_qmoe.ops.build_native` builds it"
    if not path.is_file():
        return None, f"{path} does not exist; {build}"
    try:
        library = ctypes.CDLL(str(path))
        library.hf_qmoe_source_digest.restype = ctypes.c_char_p
        library.hf_qmoe_instruction_set.restype = ctypes.c_char_p
        for name, arguments in _ARGUMENTS.items():
            getattr(library, name).argtypes = arguments
        digest = library.hf_qmoe_source_digest().decode()
    except (OSError, AttributeError) as error:
        return None, f"{path} cannot be loaded ({error}); {build}"
    if digest != build_native.source_digest():
        return None, f"{path} was built from other sources; {build}"
    return library, ""
