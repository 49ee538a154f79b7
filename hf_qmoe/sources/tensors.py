"""Tensors of safetensors files, read by name as they are stored.

transformers casts what it reads to the dtype of the parameter it is for: wrong for packed bytes and for scales,
which are read here instead.
"""

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor


#: Dtypes of codes, as safetensors spells them.
EIGHT_BIT = ("F8_", "I8", "U8")


class CheckpointTensors:
    """A lazy mapping from names to tensors.

    Args:
        files: paths of safetensors files.

    Raises:
        ValueError: a file of another kind.
    """

    def __init__(self, files: Iterable[str]) -> None:
        self._handles: dict[str, Any] = {}
        self._files: dict[str, str] = {}
        for file in files:
            if Path(file).suffix != ".safetensors":
                raise ValueError(
                    f"{file}: quantized weights are read from safetensors files only; convert the checkpoint first"
                )
            handle: Any = safe_open(file, framework="pt")
            self._handles[file] = handle
            self._files |= dict.fromkeys(handle.keys(), file)

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def read(self, name: str, device: torch.device | str = "cpu") -> Tensor:
        """The tensor `name` as it is stored."""
        tensor: Tensor = self._handles[self._files[name]].get_tensor(name)
        return tensor.to(device)

    def numel(self, name: str) -> int:
        """Elements of the tensor `name`, as it is stored."""
        return math.prod(self._slice(name).get_shape())

    def is_eight_bit(self, name: str) -> bool:
        """Whether the tensor `name` is stored in 8 bit: codes, not values."""
        return str(self._slice(name).get_dtype()).startswith(EIGHT_BIT)

    def eight_bit_matrices(self) -> list[str]:
        """Names of the tensors in 8 bit that have at least two dimensions."""
        return [name for name in self._files if self.is_eight_bit(name) and len(self._slice(name).get_shape()) >= 2]

    def _slice(self, name: str) -> Any:
        return self._handles[self._files[name]].get_slice(name)

    def __deepcopy__(self, memo: Any) -> "CheckpointTensors":
        return self  # transformers copies a converter for each parameter; files are shared
