"""Packing and unpacking on the CPU by the package's own kernels: the bits of bitsandbytes, several times its speed.

Where there is no library (`hf_qmoe.ops.native_library`), or its results are not those of the installed bitsandbytes
(another version may round differently), the functions here decline and the caller goes on with bitsandbytes.
"""

import ctypes
from functools import cache
from typing import NamedTuple

import bitsandbytes.functional as bnb_functional
import torch
from torch import Tensor

from hf_qmoe.logging import get_logger
from hf_qmoe.ops.bnb_tables import make_bnb_tables
from hf_qmoe.ops.defaults import torch_defaults
from hf_qmoe.ops.native_library import DTYPES, address, has_memory, load


logger = get_logger(__name__)

_BITS = {"nf4": 4, "fp4": 4, "int8": 8, "fp8": 8}
_NOT_FINITE = 1

# From this block size on bitsandbytes unpacks with torch, which keeps subnormal values in bfloat16.
_FLUSH_BELOW_BLOCKSIZE = 2048


def dequantize_into(out: Tensor, packed: Tensor, absmax: Tensor, quant_type: str, blocksize: int) -> bool:
    """Unpacks one matrix into `out`, if the kernels can.

    Args:
        out: ``[N, K]`` float32, bfloat16 or float16 on the CPU; overwritten.
        packed: uint8 ``[N, K * bits / 8]``.
        absmax: fp32, one per block of the flattened matrix; the last block may be cut short.
        blocksize: any; even for 4-bit formats.

    Returns:
        `False`, with `out` untouched, where the caller has to do it another way.

    Raises:
        ValueError: `packed` or `absmax` does not belong to a matrix of this size; native code would read beyond it.
    """
    dtype, bits = DTYPES.get(out.dtype), _BITS.get(quant_type)
    if dtype is None or bits is None or blocksize <= 0 or blocksize * bits % 8:
        return False
    if not all(has_memory(tensor) for tensor in (out, packed, absmax)):
        return False
    _check_sizes(out, packed, absmax, bits, blocksize)
    library, _, unpacks = load()
    unpacking = _unpacking(quant_type, out.dtype) if unpacks else None
    if library is None or unpacking is None:
        return False
    if out.numel():
        target = out if out.is_contiguous() else torch.empty(out.shape, dtype=out.dtype, device=out.device)
        flush = unpacking.flush and blocksize < _FLUSH_BELOW_BLOCKSIZE
        _dequantize(library, target, packed, absmax, unpacking.codebook, bits, blocksize, flush)
        if target is not out:
            out.copy_(target)
    return True


def quantize(weight: Tensor, quant_type: str, blocksize: int) -> tuple[Tensor, Tensor] | None:
    """Packs one matrix, if the kernels can.

    Args:
        weight: ``[N, K]`` float32, bfloat16 or float16 on the CPU.
        blocksize: weights per scale; must divide ``N * K`` for 4-bit formats.

    Returns:
        uint8 ``[N, K * bits / 8]`` and the fp32 scales, one per block of the flattened matrix; `None` where the caller
        has to do it another way.

    Raises:
        ValueError: a weight is NaN or infinite.
    """
    dtype, bits = DTYPES.get(weight.dtype), _BITS.get(quant_type)
    if dtype is None or bits is None or blocksize <= 0 or not weight.ndim or not has_memory(weight):
        return None
    if bits == 4 and (weight.numel() % blocksize or blocksize % 2 or weight.shape[-1] % 2):
        return None
    library = load().library
    tables = None if library is None else _packing(quant_type)
    if library is None or tables is None:
        return None
    shape = (*weight.shape[:-1], weight.shape[-1] * bits // 8)
    packed = torch.empty(shape, dtype=torch.uint8, device="cpu")
    absmax = torch.empty(-(weight.numel() // -blocksize), dtype=torch.float32, device="cpu")
    if weight.numel():
        _quantize(library, packed, absmax, weight, tables, bits, blocksize)
    return packed, absmax


def _check_sizes(out: Tensor, packed: Tensor, absmax: Tensor, bits: int, blocksize: int) -> None:
    weights = out.numel()
    if packed.dtype != torch.uint8 or packed.numel() != -(weights * bits // -8):
        raise ValueError(f"packed must be {weights} {bits}-bit codes, got {packed.dtype} {tuple(packed.shape)}")
    if absmax.dtype != torch.float32 or absmax.numel() != -(weights // -blocksize):
        raise ValueError(
            f"absmax must be float32, one per {blocksize} of {weights} weights, "
            f"got {absmax.dtype} {tuple(absmax.shape)}"
        )


_Table = ctypes.Array[ctypes.c_float] | ctypes.Array[ctypes.c_ubyte]


class _Unpacking(NamedTuple):
    """The two things about unpacking that bitsandbytes does in more than one way.

    Attributes:
        codebook: values by code; the sign of a zero in it depends on the code path.
        flush: its 4-bit code rounds to bfloat16 with an instruction that takes subnormal values for zeros, where the
            processor has it.
    """

    codebook: _Table
    flush: bool


class _Packing(NamedTuple):
    """Tables for packing; see ``csrc/quantize.inc``. `edges` are the values where the code changes."""

    edges: Tensor
    bounds: _Table | None = None
    codes: _Table | None = None
    nearest: _Table | None = None


@cache
def _unpacking(quant_type: str, dtype: torch.dtype) -> _Unpacking | None:
    """How to unpack such that the bits are those of the installed bitsandbytes; `None` if no way leads there."""
    library, bits = load().library, _BITS[quant_type]
    assert library is not None
    with torch_defaults():
        if bits == 4:
            digits = torch.tensor([0x01, 0x23, 0x45, 0x67, 0x89, 0xAB, 0xCD, 0xEF] * 4, dtype=torch.uint8)
            table = _bnb_dequantize(digits, torch.ones(1, dtype=torch.float32), quant_type, torch.float32)[:16]
        else:
            table = make_codebook(quant_type)
        codebook = _float_table(table)
        absmax = torch.tensor([1.0, 0.37, 3e38, 7e4, 1e-5, 1e-38, 1e-40, 0.0], dtype=torch.float32)
        packed = (torch.arange(8 * 64 * bits // 8) % 256).to(torch.uint8)
        expected = _bnb_dequantize(packed, absmax, quant_type, dtype)
        out = torch.empty_like(expected)
        for flush in (False, True):
            _dequantize(library, out, packed, absmax, codebook, bits, 64, flush)
            if torch.equal(out.view(torch.uint8), expected.view(torch.uint8)):
                return _Unpacking(codebook, flush)
    logger.info(f"CPU kernels: this bitsandbytes unpacks {quant_type} to {dtype} in another way; using its own")
    return None


@cache
def _packing(quant_type: str) -> _Packing | None:
    """Tables that give the codes of the installed bitsandbytes; `None` if it has another rule."""
    library = load().library
    assert library is not None
    with torch_defaults():
        tables = _packing_tables(quant_type)
        # Each edge and its neighbours, in blocks with absmax 1. Scaled to extremes only once ordinary values agree:
        # bitsandbytes 0.48, which has another rule, crashes at a block of zeros.
        edges = tables.edges
        values = torch.cat([edges, edges.nextafter(edges + 1), edges.nextafter(edges - 1)])
        rows = torch.nn.functional.pad(values, (0, -values.numel() % 63)).view(-1, 63)
        blocks = torch.nn.functional.pad(rows, (1, 0), value=1.0)
        probes = (
            torch.cat([blocks * scale for scale in scales]) for scales in ((1.0, 0.37), (3e38, 1e-38, 1e-40, 0.0))
        )
        if all(_packs_alike(library, probe, quant_type, tables) for probe in probes):
            return tables
    logger.info(f"CPU kernels: this bitsandbytes packs {quant_type} by another rule; using its own")
    return None


def _packs_alike(library: ctypes.CDLL, weight: Tensor, quant_type: str, tables: _Packing) -> bool:
    """Whether `weight`, in blocks of 64, is packed as bitsandbytes does it."""
    bits, ops = _BITS[quant_type], torch.ops.bitsandbytes
    packed = torch.empty(weight.numel() * bits // 8, dtype=torch.uint8)
    absmax = torch.empty(weight.numel() // 64, dtype=torch.float32)
    _quantize(library, packed, absmax, weight, tables, bits, 64)
    if bits == 4:
        make_bnb_tables(quant_type, weight.device)
        codes, scales = ops.quantize_4bit.default(weight, 64, quant_type, torch.uint8)
    else:
        codes, scales = ops.quantize_blockwise.default(weight, make_codebook(quant_type), 64)
    return torch.equal(packed, codes.view(-1)) and torch.equal(absmax, scales.view(-1))


def _packing_tables(quant_type: str) -> _Packing:
    codebook = make_codebook(quant_type)
    if _BITS[quant_type] == 4:
        order = codebook.argsort()
        bounds = (codebook[order[:-1]] + codebook[order[1:]]) / 2
        return _Packing(bounds, bounds=_float_table(bounds), codes=_byte_table(order))
    middles = (codebook[:-1] + codebook[1:]) * 0.5
    places = torch.arange(1 << 16, dtype=torch.float32) * 2 / 65535 - 1
    return _Packing(middles, nearest=_byte_table(torch.searchsorted(middles, places)))


def make_codebook(quant_type: str) -> Tensor:
    """bitsandbytes' table of a format, see `hf_qmoe.ops.formats.codebook`, new; call it within `torch_defaults`."""
    table: Tensor
    if quant_type in ("int8", "fp8"):
        is_int8 = quant_type == "int8"
        table = bnb_functional.create_dynamic_map() if is_int8 else bnb_functional.create_fp8_map(True, 4, 3, 8)
    else:
        table = bnb_functional.get_4bit_type(quant_type, device="cpu")
    return table


def _float_table(values: Tensor) -> _Table:
    return (ctypes.c_float * values.numel())(*values.tolist())


def _byte_table(values: Tensor) -> _Table:
    return (ctypes.c_ubyte * values.numel())(*values.tolist())


def _bnb_dequantize(packed: Tensor, absmax: Tensor, quant_type: str, dtype: torch.dtype) -> Tensor:
    """bitsandbytes' values of blocks of 64, flat."""
    values: Tensor
    ops = torch.ops.bitsandbytes
    if _BITS[quant_type] == 4:
        make_bnb_tables(quant_type, packed.device)
        shape = (1, packed.numel() * 2)
        values = ops.dequantize_4bit.default(packed.view(-1, 1), absmax, 64, quant_type, shape, dtype)
    else:
        values = ops.dequantize_blockwise.default(packed, absmax, make_codebook(quant_type), 64, dtype)
    return values.view(-1)


def _dequantize(
    library: ctypes.CDLL,
    out: Tensor,
    packed: Tensor,
    absmax: Tensor,
    codebook: _Table,
    bits: int,
    blocksize: int,
    flush: bool,
) -> None:
    packed, absmax = packed.contiguous(), absmax.contiguous()
    pointers = address(out), DTYPES[out.dtype], address(packed), address(absmax)
    threads = torch.get_num_threads()
    status = library.hf_qmoe_dequantize(*pointers, codebook, bits, out.numel(), blocksize, flush, threads)
    assert status == 0, status


def _quantize(
    library: ctypes.CDLL, packed: Tensor, absmax: Tensor, weight: Tensor, tables: _Packing, bits: int, blocksize: int
) -> None:
    weight = weight.contiguous()
    pointers = address(packed), address(absmax), address(weight), DTYPES[weight.dtype]
    sizes = weight.numel(), blocksize, torch.get_num_threads()
    if bits == 4:
        status = library.hf_qmoe_quantize_4bit(*pointers, tables.bounds, tables.codes, *sizes)
    else:
        status = library.hf_qmoe_quantize_8bit(*pointers, tables.nearest, *sizes)
    if status == _NOT_FINITE:
        raise ValueError("the weight holds NaN or infinite values")
    assert status == 0, status
