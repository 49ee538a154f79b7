"""Looking at safetensors files before reading weights."""

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_qmoe.folders import INDEX, SINGLE, StoredTensor, read_shard
from hf_qmoe.sources.tensors import EIGHT_BIT


#: Dtypes of quantized weights, in the spelling of safetensors and of torch.
_EIGHT_BIT = (*EIGHT_BIT, "float8", "int8", "uint8")


def check_files(files: list[str] | None, pre_quantized: bool) -> None:
    """Checks what can be known of a checkpoint's files without reading weights.

    A truncated shard otherwise fails somewhere inside the reader, without a name; weights in 8 bit would be cast to
    floats without their scales.

    Args:
        files: paths; of files other than safetensors only the dtypes are checked.
        pre_quantized: whether the checkpoint is packed by this package.

    Raises:
        FileNotFoundError: a file does not exist.
        ValueError: a file is not as long as its header says, has no readable header, or (unless `pre_quantized`)
            holds matrices in 8 bit.
    """
    for file in map(Path, files or []):
        if file.suffix == ".safetensors":
            shard = read_shard(file)
            if not pre_quantized:
                _refuse_quantized(file, {t.name: (t.dtype, len(t.shape)) for t in shard.tensors})
        elif file.suffix == ".bin" and not pre_quantized:
            state = {name: value for name, value in _meta_state_dict(file).items() if isinstance(value, Tensor)}
            _refuse_quantized(file, {n: (str(t.dtype).removeprefix("torch."), t.ndim) for n, t in state.items()})


@dataclass(frozen=True)
class StoredTensors:
    """What the safetensors headers of a folder say.

    Attributes:
        files: names of the shards that are there.
        missing: names of shards that the index lists and the folder lacks.
        tensors: by name; those of missing shards are not among them.
    """

    files: list[str]
    missing: list[str]
    tensors: dict[str, StoredTensor]

    @property
    def nbytes(self) -> dict[str, int]:
        """Bytes of each tensor, by name."""
        return {name: tensor.stop - tensor.start for name, tensor in self.tensors.items()}

    @property
    def dtypes(self) -> dict[str, int]:
        """Bytes by dtype, in safetensors' spelling."""
        counts: Counter[str] = Counter()
        for name, nbytes in self.nbytes.items():
            counts[self.tensors[name].dtype] += nbytes
        return dict(counts)

    def to_dict(self) -> dict[str, Any]:
        """Counts, as JSON types."""
        nbytes = sum(self.nbytes.values())
        counts = {"tensors": len(self.tensors), "nbytes": nbytes, "dtypes": self.dtypes}
        return {"files": self.files, "missing": self.missing, **counts}

    @property
    def eight_bit_matrix(self) -> str | None:
        """Name of a matrix in 8 bit, which no float checkpoint holds, or `None`."""
        return _eight_bit_matrix({name: (t.dtype, len(t.shape)) for name, t in self.tensors.items()})


def read_headers(folder: Path) -> StoredTensors | None:
    """Headers of the safetensors files from which `folder` would be loaded; `None` if there are none.

    Raises:
        ValueError: a file or the index is damaged, or a shard lacks a tensor that the index places in it.
    """
    index = folder / INDEX
    if (folder / SINGLE).exists():
        return StoredTensors([SINGLE], [], {t.name: t for t in read_shard(folder / SINGLE).tensors})
    if not index.exists():
        return None
    try:
        shard_of: dict[str, str] = json.loads(index.read_text())["weight_map"]
        shards = sorted(set(shard_of.values()))
        missing = [shard for shard in shards if not (folder / shard).exists()]
    except (ValueError, TypeError, KeyError, AttributeError):
        raise ValueError(f"{index} is damaged: it is not a readable index; get it again") from None
    tensors: dict[str, StoredTensor] = {}
    for shard in shards:
        if shard not in missing:
            tensors |= {t.name: t for t in read_shard(folder / shard).tensors}
    absent = [name for name, shard in shard_of.items() if shard not in missing and name not in tensors]
    if absent:
        raise ValueError(
            f"{folder / shard_of[absent[0]]} is damaged: it lacks {absent[0]}, which the index places in it"
        )
    return StoredTensors([shard for shard in shards if shard not in missing], missing, tensors)


def _eight_bit_matrix(tensors: dict[str, tuple[str, int]]) -> str | None:
    """The first matrix stored in 8 bit, of tensors given as (dtype, dimensions) by name."""
    matrices = (name for name, (dtype, ndim) in tensors.items() if ndim >= 2 and dtype.startswith(_EIGHT_BIT))
    return next(matrices, None)


def _refuse_quantized(file: Path, tensors: dict[str, tuple[str, int]]) -> None:
    """Raises if a matrix, by name given as (dtype, dimensions), is stored in 8 bit."""
    name = _eight_bit_matrix(tensors)
    if name is not None:
        raise ValueError(
            f"{file}: {name} is {tensors[name][0]}, not a float tensor. The checkpoint is quantized already, and its "
            "config.json names no method that transformers knows; start from the bf16 checkpoint"
        )


def _meta_state_dict(file: Path) -> dict[str, Any]:
    """Tensors of a PyTorch file without their data."""
    loaded: dict[str, Any] = torch.load(file, map_location="meta", weights_only=True)
    return loaded
