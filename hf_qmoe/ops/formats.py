"""The storage formats of a weight: how many bits, which codebook, how values become bytes and back.

Everything here works on one matrix ``[N, K]`` (out_features, in_features). The arithmetic is bitsandbytes' own
(``quantize_4bit``, ``quantize_blockwise`` and their inverses): packing, block order, codebooks and scales are
byte for byte what its functions give for the same matrix. What this file adds is bookkeeping: which block size a
shape allows, bounded temporaries, and the two 16-bit passthrough formats stored as bytes like the others.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_qmoe.once import once
from hf_qmoe.ops import native
from hf_qmoe.ops.bnb_tables import make_bnb_tables
from hf_qmoe.ops.defaults import torch_defaults
from hf_qmoe.ops.native_library import refuse_freed


#: Block sizes that bitsandbytes implements on every device, for 4-bit and for 8-bit codebooks.
BLOCKSIZES_4BIT = (32, 64, 128, 256, 512, 1024, 2048, 4096)
BLOCKSIZES_8BIT = (64, 128, 256, 512, 1024, 2048, 4096)

#: Block size of the second quantization (of the scales themselves), as in bitsandbytes' ``compress_statistics``.
NESTED_BLOCKSIZE = 256

# On a CPU quantizing builds several fp32 temporaries of the input's size. Blocks are independent: a matrix is handed
# to bitsandbytes in runs of whole blocks, or loading would peak far above the packed model.
_QUANTIZE_ELEMENTS_AT_ONCE = 1 << 18


@dataclass(frozen=True)
class StorageFormat:
    """One storage format.

    Attributes:
        name: its ``quant_type``, in bitsandbytes' spelling.
        bits: bits per weight, without scales.
        passthrough: the 16-bit dtype whose bytes are stored as they are, or `None` for a codebook format with one
            fp32 scale (``absmax``) per block.
    """

    name: str
    bits: int
    passthrough: torch.dtype | None = None

    @property
    def has_scales(self) -> bool:
        """Whether a block carries an ``absmax``."""
        return self.passthrough is None

    @property
    def blocksizes(self) -> tuple[int, ...]:
        """Block sizes this format supports, in weights; empty for the passthrough formats."""
        if not self.has_scales:
            return ()
        return BLOCKSIZES_4BIT if self.bits == 4 else BLOCKSIZES_8BIT


FORMATS = {
    f.name: f
    for f in (
        StorageFormat("nf4", 4),
        StorageFormat("fp4", 4),
        StorageFormat("int8", 8),
        StorageFormat("fp8", 8),
        StorageFormat("bf16", 16, torch.bfloat16),
        StorageFormat("fp16", 16, torch.float16),
    )
}
QUANT_TYPES = tuple(FORMATS)


def get_format(quant_type: str) -> StorageFormat:
    """Returns the format named `quant_type`.

    Raises:
        ValueError: `quant_type` is not one of `QUANT_TYPES`.
    """
    try:
        return FORMATS[quant_type]
    except (KeyError, TypeError):
        raise ValueError(f"unknown quant_type {quant_type!r}; choose one of {', '.join(QUANT_TYPES)}") from None


def codebook(quant_type: str, device: torch.device | str) -> Tensor:
    """The sorted (nf4, int8, fp8) or bit-pattern ordered (fp4) table of values a code stands for, fp32.

    Returns a tensor of shape ``[16]`` or ``[256]`` in ``[-1, 1]``, from bitsandbytes' ``get_4bit_type``,
    ``create_dynamic_map`` (int8) or ``create_fp8_map(True, 4, 3, 8)`` (fp8, e4m3). It is shared: do not write to it.

    Raises:
        ValueError: the format stores values, not codes.
    """
    fmt = get_format(quant_type)
    if not fmt.has_scales:
        raise ValueError(f"{quant_type} stores 16-bit values as they are and has no codebook")
    table: Tensor = _codebook(quant_type, str(device))
    return table


@once
def _codebook(quant_type: str, device: str) -> Tensor:
    with torch_defaults():
        # Moved within, too: under a mode of fake tensors it would become one of them.
        shared = native.make_codebook(quant_type).to(device)
    return shared


def row_bytes(in_features: int, quant_type: str) -> int:
    """Bytes that a row of `in_features` weights takes, without scales.

    Raises:
        ValueError: an odd row cannot be packed two weights to the byte.
    """
    bits = in_features * get_format(quant_type).bits
    if bits % 8:
        raise ValueError(
            f"in_features={in_features} is odd: {quant_type} packs two weights to the byte along in_features. "
            "Use quant_type='int8' for this stack, or leave it out with `modules_to_not_convert`."
        )
    return bits // 8


def choose_blocksize(out_features: int, in_features: int, quant_type: str, blocksize: int) -> int | None:
    """The block size used for ``[out_features, in_features]`` when `blocksize` was asked for.

    Blocks run along a row if `blocksize` divides `in_features`, else over the flattened matrix, never beyond its
    end (a block must not straddle two experts). If `blocksize` does not divide the matrix, the largest supported
    smaller one that does is taken.

    Returns the block size; 0 for a format without scales; `None` if no supported block size divides the matrix.

    Raises:
        ValueError: `blocksize` is not supported by the format, or `in_features` is odd for a 4-bit format.
    """
    fmt = get_format(quant_type)
    row_bytes(in_features, quant_type)
    if not fmt.has_scales:
        return 0
    check_blocksize(quant_type, blocksize)
    numel = out_features * in_features
    fitting = [b for b in fmt.blocksizes if b <= blocksize and numel % b == 0]
    return max(fitting, default=None)


def check_blocksize(quant_type: str, blocksize: int) -> None:
    """Raises `ValueError` unless the format supports `blocksize` (any is accepted where there are no scales)."""
    allowed = get_format(quant_type).blocksizes
    if allowed and blocksize not in allowed:
        raise ValueError(
            f"blocksize={blocksize!r} is not supported for {quant_type}; choose one of {', '.join(map(str, allowed))}"
        )


def quantize(weight: Tensor, quant_type: str, blocksize: int) -> tuple[Tensor, Tensor | None]:
    """Packs one matrix.

    Args:
        weight: ``[N, K]`` float32, bfloat16 or float16 (float64 is rounded to float32 first).
        quant_type: one of `QUANT_TYPES`.
        blocksize: weights per scale; must divide ``N * K``. Ignored by bf16 and fp16.

    Returns:
        uint8 ``[N, K * bits / 8]`` and the fp32 scales ``[N * K / blocksize]`` (`None` for bf16 and fp16).

    Raises:
        ValueError: unsupported dtype, shape or block size, or a weight that is not finite in this format.
    """
    if weight.ndim != 2 or not weight.is_floating_point():
        raise ValueError(f"expected a float matrix [N, K], got {tuple(weight.shape)} {weight.dtype}")
    fmt = get_format(quant_type)
    rows, columns = weight.shape
    packed_shape = (rows, row_bytes(columns, quant_type))
    if fmt.passthrough is not None:
        values = weight.to(fmt.passthrough).contiguous()
        if not torch.isfinite(values).all():
            raise ValueError(f"the weight holds values that are not finite in {quant_type}")
        return values.view(torch.uint8), None
    check_blocksize(quant_type, blocksize)
    if weight.numel() % blocksize:
        raise ValueError(f"blocksize={blocksize} does not divide the {rows} x {columns} weights of an expert")
    if weight.is_contiguous() and (done := native.quantize(weight, quant_type, blocksize)) is not None:
        return done
    packed = torch.empty(weight.numel() * fmt.bits // 8, dtype=torch.uint8, device=weight.device)
    absmax = torch.empty(weight.numel() // blocksize, dtype=torch.float32, device=weight.device)
    step = _rows_at_once(weight, blocksize)
    for row in range(0, rows, step):
        start = row * columns
        run = weight[row : row + step].reshape(-1)  # of a transposed weight, this copies a few rows
        if run.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            run = run.float()
        if not torch.isfinite(run).all():  # bitsandbytes' 8-bit kernel would pack NaN as some number
            raise ValueError("the weight holds NaN or infinite values")
        codes, scales = _quantize_blocks(run, quant_type, blocksize)
        packed[start * fmt.bits // 8 :][: codes.numel()] = codes
        absmax[start // blocksize :][: scales.numel()] = scales
    return packed.view(packed_shape), absmax


def _rows_at_once(weight: Tensor, blocksize: int) -> int:
    """How many rows of a matrix to quantize together, such that no block is cut."""
    rows, columns = weight.shape
    if weight.device.type != "cpu" or not weight.numel():
        return max(1, rows)
    rows_to_block_end = blocksize // math.gcd(columns, blocksize)
    return max(1, _QUANTIZE_ELEMENTS_AT_ONCE // (columns * rows_to_block_end)) * rows_to_block_end


def _quantize_blocks(run: Tensor, quant_type: str, blocksize: int) -> tuple[Tensor, Tensor]:
    done = native.quantize(run, quant_type, blocksize)
    if done is not None:
        return done
    if get_format(quant_type).bits == 4:
        make_bnb_tables(quant_type, run.device)
        codes, absmax = torch.ops.bitsandbytes.quantize_4bit.default(run, blocksize, quant_type, torch.uint8)
        return codes.view(-1), absmax
    code = codebook(quant_type, run.device).clone()  # bitsandbytes 0.48 writes -1 into its first value
    codes, absmax = torch.ops.bitsandbytes.quantize_blockwise.default(run, code, blocksize)
    return codes, absmax


def dequantize(packed: Tensor, absmax: Tensor | None, quant_type: str, blocksize: int, dtype: torch.dtype) -> Tensor:
    """Unpacks one matrix: bitsandbytes' own dequantization, in `dtype`.

    Args:
        packed: uint8 ``[N, K * bits / 8]``.
        absmax: fp32, one scale per block; `None` for bf16 and fp16.
        quant_type: one of `QUANT_TYPES`.
        blocksize: weights per scale.
        dtype: float32, bfloat16, float16; any other float dtype is computed in float32 and cast.

    Returns:
        ``[N, K]`` in `dtype`, newly allocated except for bf16 (fp16) read as bfloat16 (float16), which is a view.
    """
    fmt = get_format(quant_type)
    if fmt.passthrough is not None:
        return packed.view(fmt.passthrough).to(dtype)
    if absmax is None or absmax.dtype != torch.float32:
        raise ValueError(f"{quant_type} needs float32 scales, got {None if absmax is None else absmax.dtype}")
    shape = (packed.shape[0], packed.shape[1] * 8 // fmt.bits)
    computed = dtype if dtype in (torch.float32, torch.bfloat16, torch.float16) else torch.float32
    refuse_freed(packed, absmax)
    scales = absmax.reshape(-1)
    weight: Tensor
    if fmt.bits == 4:
        flat = packed.reshape(-1, 1)
        rows = rows_for_dequantize(shape[0], shape[1], blocksize)
        make_bnb_tables(quant_type, packed.device)
        weight = torch.ops.bitsandbytes.dequantize_4bit.default(flat, scales, blocksize, quant_type, rows, computed)
        weight = weight.view(shape)
    else:
        code = codebook(quant_type, packed.device)
        weight = torch.ops.bitsandbytes.dequantize_blockwise.default(packed, scales, code, blocksize, computed)
    return weight.to(dtype)


def rows_for_dequantize(out_features: int, in_features: int, blocksize: int) -> tuple[int, int]:
    """The shape under which a 4-bit matrix is handed to bitsandbytes' dequantization.

    Its AVX512 kernel (0.50.2) starts a new block at each row: for in_features such as 32 or 96 with block size 64 it
    reads wrong scales, where its own quantization let blocks run on. A row per block avoids that.
    """
    if in_features % blocksize == 0:
        return out_features, in_features
    return out_features * in_features // blocksize, blocksize


def compress_absmax(absmax: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Quantizes the scales of one matrix, as bitsandbytes' ``compress_statistics=True`` does.

    Args:
        absmax: fp32 ``[G]``.

    Returns:
        uint8 ``[G]``, their fp32 scales ``[ceil(G / 256)]`` and the fp32 scalar ``offset`` (the mean of `absmax`).
    """
    offset = absmax.mean()
    codes, nested_absmax = _quantize_blocks(absmax - offset, "int8", NESTED_BLOCKSIZE)
    return codes, nested_absmax, offset


def decompress_absmax(codes: Tensor, nested_absmax: Tensor, offset: Tensor, code: Tensor | None = None) -> Tensor:
    """Inverse of `compress_absmax`: fp32 ``[G]``. `code` is the codebook, if it is not the one used there."""
    if code is None:
        values = torch.empty(codes.numel(), dtype=torch.float32, device=codes.device)
        if native.dequantize_into(values, codes, nested_absmax, "int8", NESTED_BLOCKSIZE):
            return values.add_(offset)
    code = codebook("int8", codes.device) if code is None else code
    refuse_freed(codes, nested_absmax, code)
    absmax: Tensor = torch.ops.bitsandbytes.dequantize_blockwise.default(
        codes.reshape(-1), nested_absmax, code, NESTED_BLOCKSIZE, torch.float32
    )
    return absmax + offset
