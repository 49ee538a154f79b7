"""All conversions of a load from a quantized checkpoint, and the modules that it leaves alone."""

import copy
import re
from collections.abc import Iterable
from contextlib import suppress

from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    apply_renamings,
    rename_source_key,
)

from hf_qmoe.conversion import identity_converters, packing_conversions
from hf_qmoe.layout import follows_experts_interface, stack_names
from hf_qmoe.naming import check_pattern, first_match
from hf_qmoe.packed_module import PackedModule
from hf_qmoe.requantize.collect import Checkpoint, FromQuantized
from hf_qmoe.requantize.converters import ConvertedFromQuantized
from hf_qmoe.requantize.weights import WeightFromQuantized
from hf_qmoe.sources.fp8 import Fp8
from hf_qmoe.sources.source import Source
from hf_qmoe.sources.tensors import CheckpointTensors


class _ScaleRenaming(WeightRenaming):
    """Another name of ``weight_scale_inv``: of tensors that lie beside a ``weight``, and no others of that name."""

    def __init__(self, source_patterns: str, target_patterns: str, tensors: CheckpointTensors) -> None:
        super().__init__(source_patterns, target_patterns)
        self.tensors = tensors

    def rename_source_key(self, source_key: str) -> tuple[str, str | None]:
        """The name that the conversions know."""
        if f"{source_key.rpartition('.')[0]}.weight" not in self.tensors:
            return source_key, None
        renamed: tuple[str, str | None] = super().rename_source_key(source_key)
        return renamed


def requantizing_conversions(
    conversions: list[WeightTransform], model: PreTrainedModel, checkpoint: Checkpoint
) -> list[WeightTransform]:
    """The conversions of a load from a quantized checkpoint: of `model`'s own, those of experts are replaced."""
    result = _scale_renamings(checkpoint)
    for conversion in [*packing_conversions(conversions, model), *identity_converters(_float_stack_names(model))]:
        is_converter = isinstance(conversion, WeightConverter)
        result.append(ConvertedFromQuantized(conversion, checkpoint) if is_converter else conversion)
    result.append(WeightFromQuantized(checkpoint))
    _refuse_unread(result, model, checkpoint)
    return result


def _refuse_unread(conversions: list[WeightTransform], model: PreTrainedModel, checkpoint: Checkpoint) -> None:
    """Raises `ValueError` if a matrix in 8 bit would be cast to a float parameter as if its codes were values."""
    conversions = copy.deepcopy(conversions)  # they take note of the names they have seen
    renaming = [c for c in conversions if isinstance(c, WeightRenaming)]
    converters = [c for c in conversions if isinstance(c, WeightConverter)]
    parameters = model.state_dict()
    for name in checkpoint.tensors.eight_bit_matrices():
        target, pattern = rename_source_key(name, renaming, converters, model.base_model_prefix, parameters)
        if pattern is None and target in parameters and parameters[target].is_floating_point():
            raise ValueError(
                f"{name} is stored in 8 bit, and {checkpoint.source.method} has no scales for a weight of this name; "
                "start from the bf16 checkpoint"
            )


def _float_stack_names(model: nn.Module) -> list[str]:
    """Full names of the stacks of experts that are left in full precision."""
    return [
        f"{path}.{name}" if path else name
        for path, module in model.named_modules()
        if follows_experts_interface(module) and not isinstance(module, PackedModule)
        for name in stack_names(bool(module.has_gate))
    ]


def skipped_modules(model: PreTrainedModel, source: Source) -> list[str]:
    """Patterns of the modules of `model` that the source has left alone, whose names may be those of older layouts."""
    renaming = [c for c in get_model_conversion_mapping(model) if isinstance(c, WeightRenaming)]
    known = dict(model.named_modules())
    patterns: list[str] = []
    for name in source.skipped:
        # Renamings are written for weights, as in `block_sparse_moe.gate.weight`.
        renamed = apply_renamings(f"{name}.", renaming).removesuffix(".")
        for candidate in (name, renamed):
            expert = re.match(r"(.+)\.\d+(\.\D*)?$", candidate)
            module = known.get(expert[1]) if expert else None
            if expert and module is not None and not isinstance(module, nn.ModuleList | nn.ModuleDict):
                candidate = expert[1]  # one expert of what is a stack here
            pattern = candidate if _is_pattern(candidate) else re.escape(candidate)
            if any(first_match(n, [pattern]) for n in known):
                patterns.append(pattern)
    return list(dict.fromkeys(patterns))


def _is_pattern(name: str) -> bool:
    with suppress(ValueError):
        check_pattern(name)
        return True
    return False


def _scale_renamings(checkpoint: Checkpoint) -> list[WeightTransform]:
    """What stands for ``weight_scale_inv`` in some fp8 checkpoints (DeepSeek-V4, Mistral), as transformers has it."""
    if not isinstance(checkpoint.source, Fp8):
        return []
    return [
        _ScaleRenaming(rf"\.{name}$", ".weight_scale_inv", checkpoint.tensors) for name in ("scale", "qscale_weight")
    ]


def without_requantizing(conversions: Iterable[WeightTransform]) -> list[WeightTransform]:
    """The model's own conversions among those of `requantizing_conversions`, for saving."""
    return [c for c in conversions if not isinstance(c, FromQuantized | _ScaleRenaming)]
