"""Collecting what a quantized checkpoint stores for each weight, as transformers hands it out."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers.core_model_loading import ConversionOps, WeightConverter

from hf_qmoe.sources.source import Parts, Source
from hf_qmoe.sources.tensors import CheckpointTensors


@dataclass
class Checkpoint:
    """A quantized checkpoint: its method and its tensors."""

    source: Source
    tensors: CheckpointTensors

    def __deepcopy__(self, memo: Any) -> "Checkpoint":
        return self


@dataclass
class Stored:
    """What a checkpoint stores for one weight: name of each part, by role, and the loader's way to read it."""

    names: dict[str, str] = field(default_factory=dict)
    loads: dict[str, Callable[[], Tensor]] = field(default_factory=dict)


class _Collect(ConversionOps):
    """Stands where transformers wants an operation: the converters here override `convert`."""

    supports_many_to_many = True

    def convert(self, input_dict: dict[str, Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Passes on what it is given."""
        return input_dict


class FromQuantized(WeightConverter):
    """Collects the parts of the weights that its sources stand for; `weights` has them in the experts' order."""

    def __init__(self, sources: list[str], targets: list[str], checkpoint: Checkpoint) -> None:
        self.roles: dict[str, tuple[str, str]] = {}
        for source in sources:
            end = "$" if source.endswith("$") else ""
            for role, name in checkpoint.source.stored_names(source.removesuffix(end)).items():
                self.roles[name + end] = (source, role)
        super().__init__(list(self.roles), targets, operations=[_Collect()])
        # A converter may rewrite its patterns; what it hands to `add_tensor` is the rewritten ones.
        self.roles = dict(zip(self.source_patterns, self.roles.values(), strict=True))
        self.checkpoint = checkpoint
        self.stored: dict[str, dict[tuple[int, ...], Stored]] = {}

    def add_tensor(self, target_key: str, source_key: str, source_pattern: str, future: Any) -> None:
        """Takes note of one part; the numbers in its name say which expert's it is."""
        source, role = self.roles[source_pattern]
        numbers = tuple(int(part) for part in source_key.split(".") if part.isdigit())
        stored = self.stored.setdefault(source, {}).setdefault(numbers, Stored())
        stored.names[role], stored.loads[role] = source_key, future
        self.layer_targets[target_key].add(source_key)

    def weights(self) -> dict[str, list[Stored]]:
        """What is stored for each source, in the order of the experts."""
        return {source: [found[n] for n in sorted(found)] for source, found in self.stored.items()}

    def parts(self, stored: Stored) -> Parts:
        """The parts of a quantized weight, read as they are, where the loader wants them."""
        tensors = self.checkpoint.tensors
        # Only the loader knows the device: the smallest part is read its way (and cast, so its values are not used).
        smallest = min(stored.names, key=lambda role: tensors.numel(stored.names[role]))
        device = stored.loads[smallest]().device
        return {role: tensors.read(name, device) for role, name in stored.names.items()}

    def is_quantized(self, stored: Stored) -> bool:
        """Whether these are the parts of a quantized weight."""
        return self.checkpoint.source.is_quantized(stored.names)

    def value(self, stored: Stored, target: str, dtype: torch.dtype) -> Tensor:
        """The float weight: dequantized, or as it is stored."""
        if self.is_quantized(stored):
            return self.decoded(self.parts(stored), stored.names.get("", target), dtype)
        if "" not in stored.loads:
            raise ValueError(f"{target}: the checkpoint has {sorted(stored.names.values())}, but not the weight")
        if self.checkpoint.tensors.is_eight_bit(stored.names[""]):
            raise ValueError(
                f"{stored.names['']} is stored in 8 bit, and no scales of {self.checkpoint.source.method} were found "
                "for it: the checkpoint is incomplete, or calls them by names that are not known here"
            )
        return stored.loads[""]()

    def decoded(self, parts: Parts, name: str, dtype: torch.dtype) -> Tensor:
        """The weight `name` of these parts, dequantized."""
        try:
            return self.checkpoint.source.decode(parts, dtype)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None


def check_shape(name: str, found: tuple[int, ...], expected: tuple[int, ...]) -> None:
    """Raises `ValueError` unless the shapes are equal."""
    if found != expected:
        raise ValueError(
            f"{name}: the checkpoint has shape {found}, expected {expected}; it belongs to another config"
        )
