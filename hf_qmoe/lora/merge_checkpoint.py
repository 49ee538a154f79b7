"""Merges a LoRA adapter into a float checkpoint, tensor by tensor, in the checkpoint's own layout.

No model is loaded: each shard is read once and written once under the same header, and adapted tensors are added to
on the way. Memory holds one expert (or one matrix) in fp32 beside the adapter.
"""

import os
from collections.abc import Callable, Mapping
from io import BufferedReader
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from hf_qmoe.folders import (
    Shard,
    StoredTensor,
    check_is_folder,
    check_out,
    copy_bytes,
    copy_small_files,
    folder_when_done,
    read_shards,
    tensors_by_name,
)
from hf_qmoe.lora.merge_adapter import MergeError, Update, empty_model, read_updates
from hf_qmoe.lora.merge_mapping import CheckpointMap, Source


_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


class MergeReport(NamedTuple):
    """What a merge wrote: tensors changed and in all, parameters they belong to, size of the shards, and where."""

    merged_tensors: int
    total_tensors: int
    parameters: int
    bytes_written: int
    out: Path


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
        check_is_folder(folder, role)
    check_out(out, (base, adapter), overwrite)
    model = empty_model(base)
    shards = read_shards(base)
    stored = tensors_by_name(shards)
    checkpoint = CheckpointMap(model, {name: tensor.shape for name, tensor in stored.items()})
    updates = read_updates(model, adapter)
    adapted = checkpoint.adapted(updates)
    for name in adapted:
        if stored[name].dtype not in _DTYPES:
            raise MergeError(f"{name} is stored as {stored[name].dtype}; only F32, BF16 and F16 can be merged into")
    with torch.no_grad(), folder_when_done(out) as folder:
        copy_small_files(base, folder)
        for number, shard in enumerate(shards, 1):
            if on_shard is not None:
                on_shard(number, len(shards), shard.path.name)
            _write_shard(shard, folder / shard.path.name, checkpoint, adapted, updates)
        written = sum((folder / shard.path.name).stat().st_size for shard in shards)
    return MergeReport(len(adapted), len(stored), len(updates), written, out)


def _write_shard(
    shard: Shard, target: Path, checkpoint: CheckpointMap, adapted: Mapping[str, Source], updates: Mapping[str, Update]
) -> None:
    """Copies a shard with its header as it is, merging into the `adapted` ones of its tensors."""
    with shard.path.open("rb") as reader, target.open("xb") as writer:
        copy_bytes(reader, writer, shard.data_start)
        for tensor in shard.tensors:
            source = adapted.get(tensor.name)
            if source is None:
                copy_bytes(reader, writer, tensor.stop - tensor.start)
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
