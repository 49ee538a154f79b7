"""Looking at safetensors files before reading weights."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


#: Dtypes of quantized weights, in the spelling of safetensors and of torch.
_EIGHT_BIT = ("F8_", "I8", "U8", "float8", "int8", "uint8")


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
            header = _read_header(file)
            if not pre_quantized:
                _refuse_quantized(file, {n: (e.get("dtype", ""), len(e.get("shape", ()))) for n, e in header.items()})
        elif file.suffix == ".bin" and not pre_quantized:
            state = {name: value for name, value in _meta_state_dict(file).items() if isinstance(value, Tensor)}
            _refuse_quantized(file, {n: (str(t.dtype).removeprefix("torch."), t.ndim) for n, t in state.items()})


def _read_header(file: Path) -> dict[str, Any]:
    size = file.stat().st_size
    with file.open("rb") as stream:
        header_bytes = int.from_bytes(stream.read(8), "little")
        if size < 8 or header_bytes > size - 8:
            raise ValueError(f"{file} is truncated: {size} bytes do not even hold its header; get this shard again")
        text = stream.read(header_bytes)
    try:
        tensors = {name: entry for name, entry in json.loads(text).items() if name != "__metadata__"}
        ends = [entry["data_offsets"][1] for entry in tensors.values()]
        if not all(isinstance(end, int) for end in ends):
            raise TypeError("offsets are integers")
    except (ValueError, TypeError, KeyError, IndexError, AttributeError):
        raise ValueError(f"{file} is damaged: its header is not readable; get this shard again") from None
    expected = 8 + header_bytes + max(ends, default=0)
    if size != expected:
        problem = "truncated" if size < expected else "damaged"
        raise ValueError(
            f"{file} is {problem}: its header describes {expected} bytes, the file has {size}; get this shard again"
        )
    return tensors


def _refuse_quantized(file: Path, tensors: dict[str, tuple[str, int]]) -> None:
    """Raises if a matrix, by name given as (dtype, dimensions), is stored in 8 bit."""
    for name, (dtype, dimensions) in tensors.items():
        if dimensions >= 2 and dtype.startswith(_EIGHT_BIT):
            raise ValueError(
                f"{file}: {name} is {dtype}, not a float tensor. The checkpoint is quantized already, and its "
                "config.json says nothing of it; start from the bf16 checkpoint"
            )


def _meta_state_dict(file: Path) -> dict[str, Any]:
    """Tensors of a PyTorch file without their data."""
    loaded: dict[str, Any] = torch.load(file, map_location="meta", weights_only=True)
    return loaded
