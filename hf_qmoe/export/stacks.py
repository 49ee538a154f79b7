"""Packed stacks as they lie on disk, and where in them the matrices of single experts lie."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from hf_qmoe import metadata
from hf_qmoe.export.names import Piece
from hf_qmoe.export.writer import Span, span
from hf_qmoe.folders import CheckpointError, StoredTensor
from hf_qmoe.ops.formats import NESTED_BLOCKSIZE, decompress_absmax, get_format
from hf_qmoe.packed import PackedStack
from hf_qmoe.packed_module import SUFFIXES, as_stored


METADATA = ".quant_metadata"
_DTYPES = {torch.uint8: "U8", torch.int32: "I32"}


@dataclass(frozen=True)
class StoredStack:
    """One packed stack ``[E, N, K]`` of a checkpoint.

    Attributes:
        key: name of its packed bytes, ``...experts.gate_up_proj``.
        tensors: its tensors by field of `PackedStack`.
        shape: ``(E, N, K)``.
        quant_type: one of `hf_qmoe.ops.formats.QUANT_TYPES`.
        blocksize: weights per scale; 0 for bf16 and fp16.
        offsets: of double-quantized scales, fp32 ``[E]``.
    """

    key: str
    tensors: Mapping[str, StoredTensor]
    shape: tuple[int, int, int]
    quant_type: str
    blocksize: int
    offsets: Tensor | None

    @property
    def is_4bit(self) -> bool:
        """Whether bitsandbytes has the format among its 4-bit ones."""
        fmt = get_format(self.quant_type)
        return fmt.has_scales and fmt.bits == 4

    def packed(self, piece: Piece) -> Span:
        """Bytes of the rows of `piece`: one run, since experts and rows follow each other."""
        packed = self.tensors["packed"]
        row_bytes = packed.shape[2]
        first = piece.expert * self.shape[1] * row_bytes
        return span(packed, first + piece.start * row_bytes, first + piece.stop * row_bytes)

    def blocks(self, piece: Piece) -> tuple[int, int]:
        """First scale of `piece` within its expert, and the one behind its last.

        Raises:
            CheckpointError: its first or last row begins or ends within a block.
        """
        columns = self.shape[2]
        start, stop = piece.start * columns, piece.stop * columns
        if start % self.blocksize or stop % self.blocksize:
            cut = start if start % self.blocksize else stop
            raise CheckpointError(
                f"{self.key}: a block of {self.blocksize} weights runs from the rows of one projection on into those "
                f"of the next ({cut // columns} rows of {columns} are not a multiple of {self.blocksize}), so that "
                "packed bytes cannot be split. Quantize the float model with a smaller experts_blocksize"
            )
        return start // self.blocksize, stop // self.blocksize

    def can_stay_nested(self, piece: Piece) -> bool:
        """Whether each 256 scales of `piece`, counted from its own first, shared one second-level scale."""
        start, stop = self.blocks(piece)
        return start % NESTED_BLOCKSIZE == 0 or start // NESTED_BLOCKSIZE == (stop - 1) // NESTED_BLOCKSIZE

    def scales(self, piece: Piece) -> Span:
        """Scales of `piece` as they are stored, fp32 or double-quantized, ``[stop - start]`` of `blocks`."""
        start, stop = self.blocks(piece)
        first = piece.expert * (self.shape[1] * self.shape[2] // self.blocksize)
        return span(self.tensors["absmax"], first + start, first + stop)

    def nested_scales(self, piece: Piece) -> Span:
        """fp32 scales of the double-quantized scales of `piece`."""
        start, stop = self.blocks(piece)
        nested = self.tensors["nested_absmax"]
        first = piece.expert * nested.shape[1]
        stop_nested = first + (stop - 1) // NESTED_BLOCKSIZE + 1
        return span(nested, first + start // NESTED_BLOCKSIZE, stop_nested)

    def plain_scales(self, piece: Piece) -> Span | partial[bytes]:
        """fp32 scales of `piece`: those stored, or what makes the same values of double-quantized ones."""
        if self.offsets is None:
            return self.scales(piece)
        start, stop = self.blocks(piece)
        codes, nested = (self._of_expert(self.tensors[f], piece.expert) for f in ("absmax", "nested_absmax"))
        return partial(decompress, codes, nested, self.offsets[piece.expert], start, stop)

    def _of_expert(self, tensor: StoredTensor, expert: int) -> Span:
        size = prod(tensor.shape[1:])
        return span(tensor, expert * size, (expert + 1) * size)


def decompress(codes: Span, nested: Span, offset: Tensor, start: int, stop: int, code: Span | None = None) -> bytes:
    """Scales `start` to `stop` of one matrix, fp32, of those that are double-quantized."""
    book = None if code is None else _tensor(code, torch.float32)
    values = decompress_absmax(_tensor(codes, torch.uint8), _tensor(nested, torch.float32), offset, book)
    return values[start:stop].numpy().tobytes()


def _tensor(part: Span, dtype: torch.dtype) -> Tensor:
    return torch.frombuffer(bytearray(part.read()), dtype=dtype)


def stored_stacks(stored: Mapping[str, StoredTensor]) -> Iterator[StoredStack]:
    """Every packed stack of a checkpoint.

    Raises:
        CheckpointError: metadata cannot be read, or tensors are missing or not what it says.
    """
    for name, tensor in stored.items():
        if not name.endswith(METADATA):
            continue
        path = name.removesuffix(METADATA)
        try:
            description = metadata.decode(_tensor(span(tensor), torch.uint8))
            version = description.get("format_version")
            if version != metadata.FORMAT_VERSION:
                raise ValueError(
                    f"its format version is {version}, this hf_qmoe reads version {metadata.FORMAT_VERSION}"
                )
            stacks = {f"{path}.{stack}": facts for stack, facts in description["stacks"].items()}
            for key, facts in stacks.items():
                yield _stored_stack(key, {**description, **facts}, stored)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(f"{name} cannot be used: {error}") from error


def _stored_stack(key: str, facts: Mapping[str, Any], stored: Mapping[str, StoredTensor]) -> StoredStack:
    tensors = {field: stored[key + suffix] for field, suffix in SUFFIXES.items() if key + suffix in stored}
    if "packed" not in tensors:
        raise CheckpointError(f"the checkpoint lacks {key}; it is incomplete")
    experts, quant_type = tensors["packed"].shape[0], facts["quant_type"]
    rows, columns, blocksize = (facts[name] for name in ("out_features", "in_features", "blocksize"))
    template = PackedStack.empty(
        experts, rows, columns, quant_type, blocksize or 64, facts["double_quant"], device="meta"
    )
    for field, expected in template.tensors().items():
        tensor = tensors.get(field)
        if tensor is None:
            raise CheckpointError(f"the checkpoint lacks {key}{SUFFIXES[field]}; it is incomplete")
        dtype = _DTYPES[as_stored(expected).dtype]
        if (tensor.dtype, tensor.shape) != (dtype, tuple(expected.shape)):
            said = f"{dtype} {tuple(expected.shape)}"
            raise CheckpointError(f"{tensor.name} is {tensor.dtype} {tensor.shape}, but its metadata says {said}")
    kept = {field: tensors[field] for field in template.tensors()}
    offsets = _tensor(span(tensors["nested_offset"]), torch.float32) if template.double_quant else None
    return StoredStack(key, kept, (experts, rows, columns), quant_type, template.blocksize, offsets)
