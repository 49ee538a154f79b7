"""How transformers v4 stores a weight that bitsandbytes has quantized: its bytes and what is needed to read them.

Per weight, that says its own format. But v4 takes one 4-bit type for the whole checkpoint from the config, and either
all scales are double-quantized or none.
"""

import json
import re
from collections.abc import Mapping
from functools import cache, lru_cache, partial
from typing import Any

import torch
from bitsandbytes.functional import QuantState
from torch import Tensor

from hf_qmoe.export.names import Piece
from hf_qmoe.export.stacks import StoredStack, decompress
from hf_qmoe.export.writer import ITEMSIZES, Entry, copied, span
from hf_qmoe.folders import CheckpointError, StoredTensor
from hf_qmoe.ops.formats import NESTED_BLOCKSIZE, codebook


_STATE = ".quant_state.bitsandbytes__"
_STATISTICS = r"absmax|quant_map|nested_absmax|nested_quant_map|quant_state\.bitsandbytes__(?:nf4|fp4)"
_DTYPE_NAMES = {torch.uint8: "U8", torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}


def owner(key: str) -> str:
    """The weight that `key` is a statistic of, or `key`."""
    return re.sub(rf"(?<=weight)\.(?:{_STATISTICS})$", "", key)


def entries(
    stack: StoredStack, piece: Piece, nested: bool, dtype: torch.dtype, storage: torch.dtype
) -> tuple[Entry, ...]:
    """The tensors of one expert's matrix.

    Args:
        stack: nf4 or fp4.
        piece: the matrix, named ``...weight``.
        nested: keep the scales double-quantized.
        dtype: that bitsandbytes dequantizes to.
        storage: dtype as which the bytes are stored.

    Raises:
        CheckpointError: packed bytes cannot be cut where the matrix begins or ends.
    """
    packed, scales = stack.packed(piece), stack.scales(piece) if nested else stack.plain_scales(piece)
    size, (first, last) = packed.stop - packed.start, stack.blocks(piece)
    blocks = last - first
    itemsize = ITEMSIZES[_DTYPE_NAMES[storage]]
    out = [Entry(piece.name, _DTYPE_NAMES[storage], (size // itemsize, 1), size, packed)]

    def add(suffix: str, dtype: str, count: int, data: Any) -> None:
        out.append(Entry(f"{piece.name}.{suffix}", dtype, (count,), count * ITEMSIZES[dtype], data))

    add("absmax", "U8" if nested else "F32", blocks, scales)
    add("quant_map", "F32", 16, _codebook(stack.quant_type))
    shape = (piece.stop - piece.start, stack.shape[2])
    offset = float(stack.offsets[piece.expert]) if nested and stack.offsets is not None else None
    if offset is not None:
        add("nested_absmax", "F32", -(blocks // -NESTED_BLOCKSIZE), stack.nested_scales(piece))
        add("nested_quant_map", "F32", 256, _codebook("int8"))
    name, description = _description(shape, stack.quant_type, stack.blocksize, dtype, offset)
    add(name, "U8", len(description), description)
    return tuple(out)


def _bytes(tensor: Tensor) -> bytes:
    return tensor.numpy().tobytes()


@cache
def _codebook(quant_type: str) -> bytes:
    return _bytes(codebook(quant_type, "cpu"))


@lru_cache(maxsize=64)
def _description(
    shape: tuple[int, int], quant_type: str, blocksize: int, dtype: torch.dtype, offset: float | None
) -> tuple[str, bytes]:
    """Name and bytes of what bitsandbytes writes beside the tensors of a `QuantState`."""
    none = torch.empty(0)
    facts: dict[str, Any] = {"shape": shape, "blocksize": blocksize, "quant_type": quant_type, "dtype": dtype}
    if offset is not None:
        facts["offset"] = torch.tensor(offset, dtype=torch.float32)
        facts["state2"] = QuantState(none, code=none, blocksize=NESTED_BLOCKSIZE, dtype=torch.float32)
    name = f"{_STATE[1:]}{quant_type}"
    return name, _bytes(QuantState(none, code=none, **facts).as_dict(packed=True)[name])


# -- linears, which are stored so already ----------------------------------------------------------------------------


class StoredLinear:
    """The weight of one linear as it is stored.

    Args:
        key: of the weight.
        tensors: its bytes and statistics, by name.

    Raises:
        CheckpointError: statistics are missing.
    """

    def __init__(self, key: str, tensors: Mapping[str, StoredTensor]) -> None:
        self.key = key
        self._parts = {name.removeprefix(key): tensor for name, tensor in tensors.items()}
        states = [part for part in self._parts if part.startswith(_STATE)]
        missing = [part for part in ("", ".absmax", ".quant_map") if part not in self._parts]
        if len(states) != 1 or missing:
            lacking = key + missing[0] if missing else f"{key}{_STATE}*"
            raise CheckpointError(f"the checkpoint lacks {lacking}; it is incomplete")
        self._state = states[0]
        self.quant_type = self._state.removeprefix(_STATE)
        self.is_nested = ".nested_absmax" in self._parts

    def entries(self, name: str, nested: bool) -> list[Entry]:
        """Its tensors under the weight's new `name`; unless `nested`, with the fp32 scales that nested ones mean."""
        if nested or not self.is_nested:
            return [copied(tensor, name + part) for part, tensor in self._parts.items()]
        state = json.loads(span(self._parts[self._state]).read())
        kept = {field: value for field, value in state.items() if not field.startswith("nested_")}
        codes, nested_absmax, code = (
            span(self._parts[part]) for part in (".absmax", ".nested_absmax", ".nested_quant_map")
        )
        offset = torch.tensor(state["nested_offset"], dtype=torch.float32)
        count = codes.stop - codes.start
        scales = partial(decompress, codes, nested_absmax, offset, 0, count, code)
        text = json.dumps(kept).encode()
        return [
            copied(self._parts[""], name),
            Entry(f"{name}.absmax", "F32", (count,), 4 * count, scales),
            copied(self._parts[".quant_map"], f"{name}.quant_map"),
            Entry(name + self._state, "U8", (len(text),), len(text), text),
        ]
