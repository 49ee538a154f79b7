"""From the tensors of a checkpoint to the parameters of its model, and updates of parameters back to tensors.

transformers v5 renames and fuses the tensors of a checkpoint as it loads them. Those conversions are permutations of
elements, so an update of a parameter goes back to disk by the reverse operations, as saving a model does; where they
keep experts apart, one expert at a time.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Mapping
from math import prod

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Chunk,
    Concatenate,
    ConversionOps,
    Interleave,
    MergeModulelist,
    Split,
    SplitModulelist,
    Transpose,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from hf_qmoe.lora.merge_adapter import MergeError, Update


Shape = tuple[int, ...]
_MAX_ELEMENTS = 2**22  # of one slice of a matrix; a stack is taken expert by expert


@dataclasses.dataclass
class Source:
    """A tensor on disk: the parameters made of it and how.

    ``converter`` is `None` for a tensor that is only renamed; otherwise the tensor is number ``index`` of those that
    match the converter's source pattern number ``pattern``.
    """

    shape: Shape
    parameters: tuple[str, ...]
    converter: WeightConverter | None = None
    pattern: int = 0
    index: int = 0


class CheckpointMap:
    """Which parameters each tensor of a checkpoint belongs to.

    Args:
        model: a model with shapes; without adapter, for its names are the ones that count.
        shapes: shape of each tensor on disk by name.
    """

    def __init__(self, model: PreTrainedModel, shapes: Mapping[str, Shape]) -> None:
        self.model = model
        self.parameters: dict[str, Shape] = {name: tuple(t.shape) for name, t in model.state_dict().items()}
        self.sources = self._resolve(shapes)

    def _resolve(self, shapes: Mapping[str, Shape]) -> dict[str, Source]:
        """As `transformers` does when loading: same order, same renaming, same fallback."""
        transforms = get_model_conversion_mapping(self.model)
        renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
        converters = [t for t in transforms if isinstance(t, WeightConverter)]
        by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
        prefix, state = self.model.base_model_prefix, self.model.state_dict()
        counts: dict[tuple[str, str], int] = defaultdict(int)
        sources: dict[str, Source] = {}
        for key in sorted(shapes, key=dot_natural_key):
            name, pattern = rename_source_key(key, renamings, converters, prefix, state)
            if name not in state and key in state:
                name, pattern = rename_source_key(key, [], [], prefix, state)
            if name not in state:
                continue  # nothing loads it, so nothing can adapt it
            if pattern is None:
                sources[key] = Source(shapes[key], (name,))
                continue
            converter = by_pattern[pattern]
            first, *others = converter.target_patterns
            sources[key] = Source(
                shapes[key],
                (name, *(name.replace(first, other, 1) for other in others)),
                converter,
                converter.source_patterns.index(pattern),
                counts[name, pattern],
            )
            counts[name, pattern] += 1
        return sources

    def adapted(self, updates: Mapping[str, Update]) -> dict[str, Source]:
        """The tensors that `updates` change, after checking that they make up each adapted parameter exactly.

        Raises:
            MergeError: a parameter is on disk in part, twice or not at all, or in a shape that does not fit.
        """
        found = {k: s for k, s in self.sources.items() if not updates.keys().isdisjoint(s.parameters)}
        elements: dict[str, int] = defaultdict(int)
        for key, source in found.items():
            for name in source.parameters:
                elements[name] += prod(source.shape)
            if self._is_per_expert(source) and source.index >= self.parameters[source.parameters[0]][0]:
                raise MergeError(f"{key} is one expert more than the config of the base model says")
        for name in updates:
            group = next((s.parameters for s in found.values() if name in s.parameters), None)
            if group is None:
                raise MergeError(f"{name} is adapted, but no tensor of the base checkpoint belongs to it")
            expected = sum(prod(self.parameters[n]) for n in group if n in self.parameters)
            if elements[name] != expected:
                raise MergeError(
                    f"{name} is adapted, but the base checkpoint holds {elements[name]:,} elements of it where "
                    f"{expected:,} are expected; it is incomplete or belongs to another config"
                )
        seen: set[tuple[tuple[str, ...], int, Shape]] = set()
        for key, source in found.items():
            case = (source.parameters, source.pattern, source.shape)
            if case not in seen:
                self._check_shape(key, source, updates)
                seen.add(case)
        return found

    def _check_shape(self, key: str, source: Source, updates: Mapping[str, Update]) -> None:
        for name in source.parameters:
            update = updates.get(name)
            if update is not None and update.replaces and len(source.parameters) > 1:
                raise MergeError(f"{name} (modules_to_save) shares {key} with other parameters and cannot be replaced")
        on_meta = {name: _Shaped(self.parameters[name]) for name in source.parameters}
        try:
            pieces = [tuple(piece.shape) for piece in self.pieces(source, on_meta)]
        except (ValueError, RuntimeError, IndexError, KeyError, NotImplementedError) as error:
            raise MergeError(f"{key} is stored in a way that cannot be merged into: {error}") from error
        rows = sum(shape[0] for shape in pieces)
        if any((rows, *shape[1:]) != source.shape for shape in pieces):
            raise MergeError(
                f"{key} has shape {source.shape}, which does not fit {source.parameters[0]} of shape "
                f"{self.parameters[source.parameters[0]]}"
            )

    def pieces(self, source: Source, updates: Mapping[str, Update]) -> Iterator[Tensor]:
        """What `updates` make of the tensor `source`, as consecutive slices of it along dimension 0."""
        operations = self._reverse_operations(source)
        update, shape = updates.get(source.parameters[0]), self.parameters[source.parameters[0]]
        if len(source.parameters) == 1 and update is not None:
            if self._is_per_expert(source) and _keep_rows_apart(operations[:-1]):
                yield self._to_disk(source, operations, [update.slice(source.index, source.index + 1)], 0)
                return
            if _keep_rows_apart(operations):
                rows = 1 if len(shape) > 2 else max(1, _MAX_ELEMENTS // max(1, prod(shape[1:])))
                for start in range(0, shape[0], rows):
                    yield self._to_disk(source, operations, [update.slice(start, min(start + rows, shape[0]))], 0)
                return
        parts = []
        for name in source.parameters:
            update, shape = updates.get(name), self.parameters[name]
            parts.append(torch.zeros(shape) if update is None else update.slice(0, shape[0]))
        yield self._to_disk(source, operations, parts, source.index)

    def _is_per_expert(self, source: Source) -> bool:
        """Whether the tensor is a part of one expert of one stack."""
        if source.converter is None or len(source.parameters) > 1:
            return False
        return isinstance(source.converter.operations[0], MergeModulelist)

    def _reverse_operations(self, source: Source) -> list[ConversionOps]:
        """Operations from parameter to disk; a transposition that depends on shapes is decided here."""
        if source.converter is None:
            return []
        same_shape = source.shape == self.parameters[source.parameters[0]]
        operations: list[ConversionOps] = []
        for operation in reversed(source.converter.operations):
            if not (isinstance(operation, Transpose) and operation.check_dims):
                operations.append(operation.reverse_op)
            elif not same_shape:
                operations.append(Transpose(operation.dim1, operation.dim0))
        if operations and isinstance(operations[-1], SplitModulelist) and operations[-1].dim != 0:
            raise NotImplementedError("experts stacked along another dimension than the first")
        return operations

    def _to_disk(self, source: Source, operations: list[ConversionOps], parts: list[Tensor], index: int) -> Tensor:
        if not operations:
            return parts[0]
        assert source.converter is not None
        reverse = source.converter.reverse_transform()  # its targets are named after the patterns of the checkpoint
        tensors = {pattern: [part] for pattern, part in zip(reverse.source_patterns, parts, strict=True)}
        for operation in operations:
            tensors = operation.convert(
                tensors,
                source_patterns=reverse.source_patterns,
                target_patterns=reverse.target_patterns,
                full_layer_name=source.parameters[0],
                model=self.model,
                config=self.model.config,
                missing_keys=None,
            )
        wanted = reverse.target_patterns[source.pattern].replace("*", str(index))
        if wanted not in tensors:
            raise ValueError(f"reversing its conversion gives no '{wanted}'")
        value = tensors[wanted]
        return value[0] if isinstance(value, list) else value


@dataclasses.dataclass
class _Shaped:
    """Stands for an update while shapes are checked."""

    shape: Shape
    replaces: bool = False

    def slice(self, start: int, stop: int) -> Tensor:
        return torch.empty(stop - start, *self.shape[1:], device="meta")


def _keep_rows_apart(operations: list[ConversionOps]) -> bool:
    """Whether `operations` act on each slice along dimension 0 by itself."""
    for operation in operations:
        if isinstance(operation, Transpose):
            first = min(operation.dim0, operation.dim1)
        elif isinstance(operation, Chunk | Concatenate | Interleave | Split):
            first = operation.dim
        else:
            return False
        if first < 1:
            return False
    return True
