"""What the tensors of a packed checkpoint are called in the checkpoint that the model was published in.

transformers' own conversion of the original checkpoint is asked, never a table of ours: tensors are renamed by the
reverse of its renamings, and a stack of experts goes through the reverse of its converter with the numbers of its rows
in the place of weights. What comes out says which rows of which expert each original tensor holds.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)

from hf_qmoe.folders import CheckpointError
from hf_qmoe.layout import follows_experts_interface, is_transposed


class Piece(NamedTuple):
    """An original tensor ``[stop - start, K]``: rows `start` to `stop` of one expert of a stack."""

    name: str
    expert: int
    start: int
    stop: int


class OriginalNames:
    """From stored names to original ones.

    Args:
        model: the float model on the meta device.
        keys: names of the stored tensors: every one whose name is asked for later, those of stacks included.
    """

    def __init__(self, model: PreTrainedModel, keys: Iterable[str]) -> None:
        self.model = model
        self._state = model.state_dict()
        conversions = get_model_conversion_mapping(model, add_legacy=False)
        self._renamings = [c for c in conversions if isinstance(c, WeightRenaming)]
        self._converters = [c for c in conversions if isinstance(c, WeightConverter)]
        self._resolved = {key: self._resolve(key) for key in sorted(keys, key=dot_natural_key)}
        # A prefix is put back if it was there, which is known by now: as transformers saves what it has loaded.
        model._weight_conversions = [c for c in conversions if not isinstance(c, PrefixChange) or c.was_used()]
        reverse = [c.reverse_transform() for c in model._weight_conversions[::-1]]
        self._reverse_renamings = [c for c in reverse if isinstance(c, WeightRenaming)]
        self._reverse_converters = [c for c in reverse if isinstance(c, WeightConverter)]

    def _resolve(self, key: str) -> tuple[str, bool]:
        """The parameter that `key` is (a part of), ``""`` if none, and whether a conversion takes it as it is stored.

        As transformers does when loading.
        """
        prefix = self.model.base_model_prefix
        name, pattern = rename_source_key(key, self._renamings, self._converters, prefix, self._state)
        if name not in self._state and key in self._state:
            name, pattern = key, None
        return (name, pattern is not None) if name in self._state else ("", False)

    def parameter(self, key: str) -> str:
        """The parameter of the model that a stored tensor is, or ``""``."""
        return self._resolved[key][0]

    def original(self, key: str) -> str | None:
        """The original name of a stored tensor, or of a parameter; `None` if it was not one tensor there."""
        name, is_original = self._resolved.get(key, (key, False))
        if not name or is_original:
            return key
        renamed, pattern = rename_source_key(name, self._reverse_renamings, self._reverse_converters, reverse=True)
        return renamed if pattern is None else None

    def pieces(self, key: str, num_experts: int, rows: int) -> list[Piece]:
        """The original tensors that make up the stack stored as `key`.

        Args:
            key: name of a stack ``[E, N, ...]``, packed or float.
            num_experts: E.
            rows: N.

        Raises:
            CheckpointError: the stack is not the model's, or its experts are no tensors of their own originally.
        """
        name = self.parameter(key)
        if not name:
            raise CheckpointError(f"{key} belongs to no parameter of the model that config.json describes")
        experts = self.model.get_submodule(name.rpartition(".")[0])
        is_concatenated = getattr(experts, "is_concatenated", True) or not getattr(experts, "has_gate", True)
        if is_transposed(experts) or not is_concatenated:
            raise CheckpointError(self._refusal(key, experts))
        numbers = torch.arange(num_experts * rows).view(num_experts, rows, 1)
        try:
            parts = revert_weight_conversion(self.model, {name: numbers})
        except (ValueError, KeyError, RuntimeError, IndexError, AttributeError, NotImplementedError) as error:
            raise CheckpointError(f"{self._refusal(key, experts)}: {error}") from error
        pieces = []
        for original, part in parts.items():
            if part.ndim != 2 or part.shape[1] != 1 or not len(part) or not original.endswith(".weight"):
                raise CheckpointError(self._refusal(key, experts))
            expert, start = divmod(int(part[0]), rows)
            stop = start + len(part)
            if stop > rows or not torch.equal(part, numbers[expert, start:stop]):
                raise CheckpointError(self._refusal(key, experts))
            pieces.append(Piece(original, expert, start, stop))
        covered = sum(piece.stop - piece.start for piece in pieces)
        if covered != num_experts * rows or len({(p.expert, p.start) for p in pieces}) != len(pieces):
            raise CheckpointError(self._refusal(key, experts))
        return pieces

    def _refusal(self, key: str, experts: torch.nn.Module) -> str:
        facts = []
        if is_transposed(experts):
            facts.append("transposed")
        if follows_experts_interface(experts) and not getattr(experts, "is_concatenated", True):
            facts.append("with gate and up rows interleaved")
        kind = " ".join(["fused", ", ".join(facts)]).strip()
        family = f"{type(self.model).__name__} ({self.model.config.model_type})"
        return (
            f"{key}: the original checkpoints of {family} keep the experts {kind}, not as one matrix per expert and "
            "projection, so the per-expert layout has no names for them"
        )
