"""Checkpoint folders: which tensors lie where, read without loading them; written as a whole or not at all."""

import json
import os
import shutil
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple


SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_COPY_BYTES = 2**24
#: Other weights beside the shards; beside changed ones they would be those of another model.
_WEIGHT_SUFFIXES = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".h5", ".msgpack", ".ckpt"}
_CHAT_TEMPLATES = "additional_chat_templates"


class CheckpointError(ValueError):
    """A checkpoint that cannot be read, changed or written as asked, with the reason in words for the user."""


class StoredTensor(NamedTuple):
    """A tensor of a safetensors file at `path`; `start` and `stop` are offsets from the beginning of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int
    path: Path


class Shard(NamedTuple):
    """A safetensors file: its tensors in the order of their data, which begins at `data_start`."""

    path: Path
    data_start: int
    tensors: tuple[StoredTensor, ...]


# -- reading --------------------------------------------------------------------------------------------------------


def check_is_folder(folder: Path, role: str) -> None:
    """Raises `CheckpointError` unless `folder`, which the user knows as `role`, is one."""
    if not folder.is_dir():
        raise CheckpointError(f"the {role} {folder} is not a folder (models of the Hub have to be downloaded first)")


def read_json(file: Path) -> dict[str, Any]:
    """The object that `file` holds.

    Raises:
        CheckpointError: it holds none.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} does not hold a JSON object")
    return content


def read_shards(folder: Path) -> list[Shard]:
    """Headers of the checkpoint's shards, found as transformers finds them.

    Raises:
        CheckpointError: there are none, one is missing, or one is not a whole safetensors file.
    """
    return [read_shard(folder / name) for name in _shard_names(folder)]


def _shard_names(folder: Path) -> list[str]:
    if (folder / SINGLE).is_file():
        return [SINGLE]
    index = folder / INDEX
    if not index.is_file():
        others = sorted(file.name for file in folder.iterdir() if file.suffix in (".bin", ".pt", ".pth"))
        hint = f" (it has {others[0]}; save it as safetensors first)" if others else ""
        raise CheckpointError(f"{folder} has neither {SINGLE} nor {INDEX}{hint}")
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{index} is damaged: {error!r}") from error
    for name in names:
        if Path(name).name != name or not (folder / name).is_file():
            raise CheckpointError(f"{folder} lacks {name}, which {INDEX} names")
    return names


def read_shard(path: Path) -> Shard:
    """Header of a safetensors file.

    Raises:
        FileNotFoundError: there is none at `path`.
        CheckpointError: it is not as long as its header says, or has no readable header.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        start = 8 + length
        if size < start:
            raise CheckpointError(
                f"{path} is truncated: {size} bytes do not even hold its header; get this shard again"
            )
        text = file.read(length)
    try:
        tensors = []
        for name, entry in json.loads(text).items():
            if name != "__metadata__":
                first, last = entry["data_offsets"]
                stored = StoredTensor(name, entry["dtype"], tuple(entry["shape"]), start + first, start + last, path)
                tensors.append(stored)
        tensors.sort(key=lambda tensor: (tensor.start, tensor.stop))
        position = start
        for tensor in tensors:
            if tensor.start != position:
                raise ValueError(f"{tensor.name} does not follow the tensor before it")
            position = tensor.stop
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise CheckpointError(
            f"{path} is damaged: its header is not readable ({error}); get this shard again"
        ) from error
    if position != size:
        problem = "truncated" if size < position else "damaged"
        raise CheckpointError(
            f"{path} is {problem}: it has {size} bytes where its header says {position}; get this shard again"
        )
    return Shard(path, start, tuple(tensors))


def tensors_by_name(shards: Iterable[Shard]) -> dict[str, StoredTensor]:
    """All tensors of a checkpoint.

    Raises:
        CheckpointError: one is there twice.
    """
    stored: dict[str, StoredTensor] = {}
    for shard in shards:
        for tensor in shard.tensors:
            if tensor.name in stored:
                raise CheckpointError(f"{tensor.name} is in two shards, one of them {shard.path.name}")
            stored[tensor.name] = tensor
    return stored


# -- writing --------------------------------------------------------------------------------------------------------


def check_out(out: Path, read: Iterable[Path], overwrite: bool) -> None:
    """Raises `CheckpointError` if no folder can be made of `out`, or not without losing one that is read.

    Args:
        out: the folder to be made.
        read: folders that must stay.
        overwrite: `out` may have content.
    """
    real = out.resolve()
    for folder in (path.resolve() for path in read):
        if real == folder or real in folder.parents:
            raise CheckpointError(f"writing to {out} would replace {folder}, which is read; choose another folder")
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise CheckpointError(f"{out} exists and is not a folder")
    if out.is_dir() and any(out.iterdir()) and not overwrite:
        raise CheckpointError(f"{out} exists and is not empty (--overwrite replaces it)")


@contextmanager
def folder_when_done(out: Path) -> Iterator[Path]:
    """A new folder beside `out`, which becomes `out` if the body ends well and is removed if not."""
    out.parent.mkdir(parents=True, exist_ok=True)
    folder, old = (out.with_name(f".{out.name}.{os.getpid()}.{what}") for what in ("partial", "old"))
    folder.mkdir()
    try:
        yield folder
        if out.exists():
            out.rename(old)
        folder.rename(out)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        if old.exists() and not out.exists():
            old.rename(out)
        raise
    if old.exists():
        shutil.rmtree(old)


def copy_small_files(source: Path, folder: Path, but: Collection[str] = ()) -> None:
    """Config, tokenizer, index and the like; no weights, no subfolders but that of the chat templates.

    Args:
        but: names of files to leave out.
    """
    for file in source.iterdir():
        is_small = file.is_file() and file.suffix not in _WEIGHT_SUFFIXES and not file.name.startswith(".")
        if is_small and file.name not in but:
            shutil.copyfile(file, folder / file.name)
    if (source / _CHAT_TEMPLATES).is_dir():
        shutil.copytree(source / _CHAT_TEMPLATES, folder / _CHAT_TEMPLATES)


def copy_bytes(reader: BufferedReader, writer: BinaryIO, count: int) -> None:
    """Copies the next `count` bytes.

    Raises:
        CheckpointError: there are fewer.
    """
    while count > 0:
        data = reader.read(min(count, _COPY_BYTES))
        if not data:
            raise CheckpointError("a shard ended early; it was changed while being read")
        writer.write(data)
        count -= len(data)
