"""Safetensors files written tensor by tensor, most of them as ranges of bytes of other files."""

import json
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from io import BufferedReader
from math import prod
from pathlib import Path
from typing import BinaryIO, NamedTuple

from hf_qmoe.folders import INDEX, SINGLE, CheckpointError, StoredTensor, copy_bytes


#: Bytes of an element by safetensors' name of its dtype, of those that are written here otherwise than whole.
ITEMSIZES = {"U8": 1, "BF16": 2, "F16": 2, "F32": 4, "F64": 8}
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


class Span(NamedTuple):
    """Bytes `start` to `stop` of a file."""

    path: Path
    start: int
    stop: int

    def read(self) -> bytes:
        """The bytes.

        Raises:
            CheckpointError: the file has become shorter.
        """
        with self.path.open("rb") as file:
            file.seek(self.start)
            data = file.read(self.stop - self.start)
        if len(data) != self.stop - self.start:
            raise CheckpointError(f"{self.path} ended early; it was changed while being read")
        return data


class Entry(NamedTuple):
    """A tensor to write; `data` may be where it lies, the bytes themselves, or what makes them when they are due."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    data: Span | bytes | Callable[[], bytes]


def span(tensor: StoredTensor, start: int = 0, stop: int | None = None) -> Span:
    """Part of a stored tensor, in elements of its flattened form."""
    size = tensor.stop - tensor.start
    elements = prod(tensor.shape)
    itemsize = size // elements if elements else 0
    end = size if stop is None else stop * itemsize
    return Span(tensor.path, tensor.start + start * itemsize, tensor.start + end)


def copied(tensor: StoredTensor, name: str) -> Entry:
    """All of a stored tensor under another name."""
    return Entry(name, tensor.dtype, tensor.shape, tensor.stop - tensor.start, span(tensor))


def size_in_bytes(size: int | str) -> int:
    """``"5GB"`` and the like, in powers of 1000 as transformers reads it; numbers as they are.

    Raises:
        ValueError: not a positive size.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?) *([KMGT]?)B?", str(size).strip().upper())
    count = int(float(match[1]) * _UNITS[match[2]]) if match else 0
    if count < 1:
        raise ValueError(f"max_shard_size must be a positive number of bytes or a string such as '5GB', got {size!r}")
    return count


def in_shards(groups: Iterable[Sequence[Entry]], max_bytes: int) -> list[list[Entry]]:
    """Entries of each file: `groups` in their order, none torn, no file larger than need be."""
    shards: list[list[Entry]] = [[]]
    size = 0
    for group in groups:
        added = sum(entry.nbytes for entry in group)
        if shards[-1] and size + added > max_bytes:
            shards.append([])
            size = 0
        shards[-1] += group
        size += added
    return shards


def file_names(count: int) -> list[str]:
    """Names of `count` shards, as transformers gives them."""
    return [SINGLE] if count == 1 else [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]


def write_index(folder: Path, names: Sequence[str], shards: Sequence[Sequence[Entry]]) -> None:
    """Writes which tensor is in which of several shards; of a single one nothing."""
    if len(names) == 1:
        return
    total = sum(entry.nbytes for shard in shards for entry in shard)
    weight_map = {entry.name: name for name, shard in zip(names, shards, strict=True) for entry in shard}
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def write_shard(path: Path, entries: Iterable[Entry]) -> int:
    """Writes one file and returns its size.

    Raises:
        CheckpointError: a file that is copied from has changed.
    """
    # Wide elements first, as safetensors orders them: so each tensor begins at a multiple of its element's size.
    ordered = sorted(entries, key=lambda e: (-(e.nbytes // max(1, prod(e.shape))), e.name))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, dtype, shape, nbytes, _ in ordered:
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": (position, position + nbytes)}
        position += nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with ExitStack() as stack, path.open("xb") as writer:
        readers: dict[Path, BufferedReader] = {}
        writer.write(len(text).to_bytes(8, "little") + text)
        for entry in ordered:
            if isinstance(entry.data, Span) and entry.data.path not in readers:
                readers[entry.data.path] = stack.enter_context(entry.data.path.open("rb"))
            before = writer.tell()
            _write(entry, writer, readers)
            if writer.tell() - before != entry.nbytes:
                raise RuntimeError(f"{entry.name} has {writer.tell() - before} bytes, not the {entry.nbytes} planned")
        return writer.tell()


def _write(entry: Entry, writer: BinaryIO, readers: dict[Path, BufferedReader]) -> None:
    data = entry.data
    if isinstance(data, Span):
        reader = readers[data.path]
        reader.seek(data.start)
        copy_bytes(reader, writer, data.stop - data.start)
    else:
        writer.write(data if isinstance(data, bytes) else data())
