"""Looking at safetensors files before reading weights."""

import json
import os
from pathlib import Path


def check_complete(files: list[str] | None) -> None:
    """Compares the length of each safetensors file with what its header promises.

    A truncated shard otherwise fails somewhere inside the reader, without a name.

    Raises:
        FileNotFoundError: a file does not exist.
        ValueError: a file is shorter than its header says, or has no readable header.
    """
    for file in files or []:
        if str(file).endswith(".safetensors"):
            _check_file(Path(file))


def _check_file(file: Path) -> None:
    size = os.path.getsize(file)
    with file.open("rb") as stream:
        header_bytes = int.from_bytes(stream.read(8), "little")
        if size < 8 or header_bytes > size - 8:
            raise ValueError(f"{file} is truncated: {size} bytes do not even hold its header; get this shard again")
        try:
            header = json.loads(stream.read(header_bytes))
        except ValueError:
            raise ValueError(
                f"{file} is damaged: its safetensors header is not readable; get this shard again"
            ) from None
    end = max((entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"), default=0)
    if size < 8 + header_bytes + end:
        raise ValueError(
            f"{file} is truncated: its header promises {8 + header_bytes + end} bytes, the file has {size}; "
            "get this shard again"
        )
