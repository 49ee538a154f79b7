"""Looking at safetensors files before reading weights."""

import json
from pathlib import Path
from typing import Any


#: Dtypes of weights that are not quantized, in safetensors' spelling.
_FLOATS = ("F64", "F32", "F16", "BF16")


def check_files(files: list[str] | None, pre_quantized: bool) -> None:
    """Checks what can be known from the headers of a checkpoint's safetensors files.

    A truncated shard otherwise fails somewhere inside the reader, without a name; expert weights in 8 bit would be
    cast to floats without their scales.

    Args:
        files: paths; others than safetensors are not looked at.
        pre_quantized: whether the checkpoint is packed by this package.

    Raises:
        FileNotFoundError: a file does not exist.
        ValueError: a file is not as long as its header says, has no readable header, or (unless `pre_quantized`)
            holds expert weights that are not floats.
    """
    for file in files or []:
        if str(file).endswith(".safetensors"):
            tensors = _read_header(Path(file))
            if not pre_quantized:
                _refuse_quantized_experts(Path(file), tensors)


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


def _refuse_quantized_experts(file: Path, tensors: dict[str, Any]) -> None:
    for name, entry in tensors.items():
        is_weight = "expert" in name and len(entry.get("shape", ())) >= 2
        if is_weight and entry.get("dtype") not in _FLOATS:
            raise ValueError(
                f"{file}: {name} is {entry.get('dtype')}, not a float tensor. The checkpoint is quantized already, "
                "and its config.json says nothing of it; start from the bf16 checkpoint"
            )
