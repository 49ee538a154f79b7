"""Merges a LoRA adapter into a float checkpoint, tensor by tensor, in the checkpoint's own layout.

No model is loaded: each shard is read once and written once under the same header, and adapted tensors are added to
on the way. Memory holds one expert (or one matrix) in fp32 beside the adapter.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO, NamedTuple

import torch
from torch import Tensor

from hf_qmoe.lora.merge_adapter import MergeError, Update, empty_model, read_updates
from hf_qmoe.lora.merge_mapping import CheckpointMap, Shape, Source


_INDEX = "model.safetensors.index.json"
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_COPY_BYTES = 2**24
#: Other weights beside the shards; after a merge they would be those of another model.
_WEIGHT_SUFFIXES = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".h5", ".msgpack", ".ckpt"}
_CHAT_TEMPLATES = "additional_chat_templates"


class MergeReport(NamedTuple):
    """What a merge wrote: tensors changed and in all, parameters they belong to, size of the shards, and where."""

    merged_tensors: int
    total_tensors: int
    parameters: int
    bytes_written: int
    out: Path


class StoredTensor(NamedTuple):
    """A tensor of a safetensors file; `start` and `stop` are offsets from the beginning of the file."""

    name: str
    dtype: str
    shape: Shape
    start: int
    stop: int


class Shard(NamedTuple):
    """A safetensors file: its tensors in the order of their data, which begins at `data_start`."""

    path: Path
    data_start: int
    tensors: tuple[StoredTensor, ...]


def merge_checkpoint(
    base: str | os.PathLike[str],
    adapter: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    on_shard: Callable[[int, int, str], None] | None = None,
) -> MergeReport:
    """Writes `base` with `adapter` merged into it to `out`.

    Each adapted tensor becomes ``W + scaling * B @ A``, added in fp32 and rounded to its dtype once; all others are
    copied byte for byte, as are config, tokenizer and other small files. `out` appears when all is written.

    Args:
        base: folder of a float checkpoint in safetensors, per-expert or fused, in one file or sharded.
        adapter: folder of a LoRA adapter saved by PEFT.
        out: folder to make.
        overwrite: replace `out` if it has content.
        on_shard: called before each shard with its number (from 1), the number of shards, and its file name.

    Raises:
        MergeError: the adapter cannot be merged into this checkpoint, or `out` is taken.
        OSError: reading or writing failed.
    """
    base, adapter, out = Path(base), Path(adapter), Path(out).absolute()
    for role, folder in (("base checkpoint", base), ("adapter", adapter)):
        if not folder.is_dir():
            raise MergeError(f"the {role} {folder} is not a folder (models of the Hub have to be downloaded first)")
    _check_out(out, base, adapter, overwrite)
    model = empty_model(base)
    shards = [_read_header(base / name) for name in _shard_names(base)]
    stored = _by_name(shards)
    checkpoint = CheckpointMap(model, {name: tensor.shape for name, tensor in stored.items()})
    updates = read_updates(model, adapter)
    adapted = checkpoint.adapted(updates)
    for name in adapted:
        if stored[name].dtype not in _DTYPES:
            raise MergeError(f"{name} is stored as {stored[name].dtype}; only F32, BF16 and F16 can be merged into")
    with torch.no_grad(), _folder_when_done(out) as folder:
        _copy_small_files(base, folder)
        for number, shard in enumerate(shards, 1):
            if on_shard is not None:
                on_shard(number, len(shards), shard.path.name)
            _write_shard(shard, folder / shard.path.name, checkpoint, adapted, updates)
        written = sum((folder / shard.path.name).stat().st_size for shard in shards)
    return MergeReport(len(adapted), len(stored), len(updates), written, out)


def _check_out(out: Path, base: Path, adapter: Path, overwrite: bool) -> None:
    real = out.resolve()
    for folder in (base.resolve(), adapter.resolve()):
        if real == folder or real in folder.parents:
            raise MergeError(f"writing to {out} would replace {folder}, which is read; choose another folder")
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise MergeError(f"{out} exists and is not a folder")
    if out.is_dir() and any(out.iterdir()) and not overwrite:
        raise MergeError(f"{out} exists and is not empty (--overwrite replaces it)")


@contextmanager
def _folder_when_done(out: Path) -> Iterator[Path]:
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


def _shard_names(base: Path) -> list[str]:
    """File names of the checkpoint's shards, found as `transformers` finds them."""
    if (base / "model.safetensors").is_file():
        return ["model.safetensors"]
    index = base / _INDEX
    if not index.is_file():
        others = sorted(file.name for file in base.iterdir() if file.suffix in (".bin", ".pt", ".pth"))
        hint = f" (it has {others[0]}; save it as safetensors first)" if others else ""
        raise MergeError(f"{base} has neither model.safetensors nor {_INDEX}{hint}")
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise MergeError(f"{index} is damaged: {error!r}") from error
    for name in names:
        if Path(name).name != name or not (base / name).is_file():
            raise MergeError(f"{base} lacks {name}, which {_INDEX} names")
    return names


def _read_header(path: Path) -> Shard:
    """Names, dtypes, shapes and places of a shard's tensors.

    Raises:
        MergeError: the file is not a whole safetensors file.
    """
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > size:
                raise ValueError("its header is cut off")
            header = json.loads(file.read(length))
        start = 8 + length
        tensors = [
            StoredTensor(name, entry["dtype"], tuple(entry["shape"]), *(start + at for at in entry["data_offsets"]))
            for name, entry in header.items()
            if name != "__metadata__"
        ]
        tensors.sort(key=lambda tensor: (tensor.start, tensor.stop))
        position = start
        for tensor in tensors:
            if tensor.start != position:
                raise ValueError(f"{tensor.name} does not follow the tensor before it")
            position = tensor.stop
        if position != size:
            raise ValueError(f"it has {size} bytes where its header says {position}")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise MergeError(f"{path} is damaged or not a safetensors file: {error}") from error
    return Shard(path, start, tuple(tensors))


def _by_name(shards: list[Shard]) -> dict[str, StoredTensor]:
    stored: dict[str, StoredTensor] = {}
    for shard in shards:
        for tensor in shard.tensors:
            if tensor.name in stored:
                raise MergeError(f"{tensor.name} is in two shards, one of them {shard.path.name}")
            stored[tensor.name] = tensor
    return stored


def _copy_small_files(base: Path, folder: Path) -> None:
    """Config, tokenizer, index and the like; no weights, no subfolders but that of the chat templates."""
    for file in base.iterdir():
        if file.is_file() and file.suffix not in _WEIGHT_SUFFIXES and not file.name.startswith("."):
            shutil.copyfile(file, folder / file.name)
    if (base / _CHAT_TEMPLATES).is_dir():
        shutil.copytree(base / _CHAT_TEMPLATES, folder / _CHAT_TEMPLATES)


def _write_shard(
    shard: Shard, target: Path, checkpoint: CheckpointMap, adapted: Mapping[str, Source], updates: Mapping[str, Update]
) -> None:
    """Copies a shard with its header as it is, merging into the `adapted` ones of its tensors."""
    with shard.path.open("rb") as reader, target.open("xb") as writer:
        _copy(reader, writer, shard.data_start)
        for tensor in shard.tensors:
            source = adapted.get(tensor.name)
            if source is None:
                _copy(reader, writer, tensor.stop - tensor.start)
                continue
            replaces = any(updates[name].replaces for name in source.parameters if name in updates)
            for piece in checkpoint.pieces(source, updates):
                merged = _merged(reader, tensor, piece, replaces)
                writer.write(merged.reshape(-1).view(torch.uint8).numpy().data)


def _merged(reader: BufferedReader, tensor: StoredTensor, piece: Tensor, replaces: bool) -> Tensor:
    """The next ``piece.numel()`` elements of `tensor` in `reader` with `piece` added, rounded once; contiguous."""
    dtype = _DTYPES[tensor.dtype]
    data = bytearray(piece.numel() * dtype.itemsize)
    if reader.readinto(data) != len(data):
        raise MergeError(f"{tensor.name} is cut off in its shard")
    weight = torch.frombuffer(data, dtype=dtype).view(piece.shape)
    result = (piece if replaces else weight.float().add_(piece)).to(dtype).contiguous()
    if not torch.isfinite(result).all():
        raise MergeError(
            f"{tensor.name} is not finite after the merge: in base or adapter a value is not, or {dtype} overflows"
        )
    return result


def _copy(reader: BufferedReader, writer: BinaryIO, count: int) -> None:
    while count > 0:
        data = reader.read(min(count, _COPY_BYTES))
        if not data:
            raise MergeError("a shard ended early; it was changed while being read")
        writer.write(data)
        count -= len(data)
