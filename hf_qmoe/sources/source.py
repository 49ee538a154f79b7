"""`Source`: what a method stores for one weight, and what that stands for."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor


#: Tensors stored for one weight, by role (`Source.stored_names`).
Parts = Mapping[str, Tensor]


class Source(ABC):
    """A quantization method that a checkpoint was saved with.

    Args:
        config: the ``quantization_config`` of its ``config.json``.

    Attributes:
        method: its ``quant_method``.
    """

    method: ClassVar[str]

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = dict(config)

    @property
    def skipped(self) -> list[str]:
        """Modules that stay in full precision because the method has left them so, under the checkpoint's names."""
        return []

    @abstractmethod
    def stored_names(self, name: str) -> dict[str, str]:
        """Names under which the parts of the weight `name` may be stored, by role; the weight itself has role ``""``.

        A part that nothing is to be read from is named too, or transformers would report it as unexpected.
        """

    @abstractmethod
    def is_quantized(self, roles: Mapping[str, Any]) -> bool:
        """Whether these parts, by role, are those of a quantized weight; if not, role ``""`` is the float weight."""

    @abstractmethod
    def decode(self, parts: Parts, dtype: torch.dtype) -> Tensor:
        """The weight, dequantized.

        Raises:
            ValueError: parts are missing or do not belong together.
        """

    def num_experts(self, parts: Parts) -> int:
        """Number of experts whose weights lie in `parts` as one stack."""
        return next(iter(parts.values())).shape[0]

    def expert(self, parts: Parts, index: int) -> Parts:
        """The parts of one expert of a stack, which has one entry for each in dimension 0 of all parts."""
        return {role: tensor[index] for role, tensor in parts.items()}

    def __deepcopy__(self, memo: Any) -> "Source":
        return self  # immutable; transformers copies a converter for each parameter


def require(parts: Parts, *roles: str) -> list[Tensor]:
    """The parts of these roles.

    Raises:
        ValueError: one is missing.
    """
    missing = [role for role in roles if role not in parts]
    if missing:
        raise ValueError(
            f"a quantized weight is stored without {', '.join(missing)}; the checkpoint is incomplete, get it again"
        )
    return [parts[role] for role in roles]
