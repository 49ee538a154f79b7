"""Experts that a model ties to one another (DiffusionGemma's encoder and decoder), packed.

A model names the parameters it ties. Where such a parameter is packed, its scales are tied in the same way; the small
description of its format is not a parameter, and each module has its own.
"""

import re
from collections.abc import Iterator

from torch import nn
from transformers import PreTrainedModel

from hf_qmoe import metadata
from hf_qmoe.packed_module import SUFFIXES, PackedModule


def tie_scales(model: PreTrainedModel) -> None:
    """Adds the scales of tied packed parameters to what transformers ties, and ties them."""
    tied = list(_tied_stacks(model))
    if not tied:
        return
    model.all_tied_weights_keys |= {
        target + suffix: source + suffix
        for target, source, module, name in tied
        for suffix in SUFFIXES.values()
        if suffix and getattr(module, name + suffix, None) is not None
    }
    descriptions = dict.fromkeys(f"{target.rpartition('.')[0]}.quant_metadata" for target, *_ in tied)
    ignored = model._keys_to_ignore_on_load_missing or []
    model._keys_to_ignore_on_load_missing = [*ignored, *map(re.escape, descriptions)]
    model.tie_weights(recompute_mapping=False)


def describe_tied(model: PreTrainedModel) -> None:
    """Gives modules whose tensors are another module's, tied after loading, their own description."""
    for _, _, module, _ in _tied_stacks(model):
        if not getattr(module.quant_metadata, "_is_hf_initialized", False):
            device = next(module.parameters()).device
            module.quant_metadata = metadata.encode(module.description).to(device)
            module.quant_metadata._is_hf_initialized = True  # type: ignore[attr-defined]


def _tied_stacks(model: PreTrainedModel) -> Iterator[tuple[str, str, PackedModule, str]]:
    """Target, source, and module and name of the target, of each pair of packed parameters that are tied."""
    modules: dict[str, nn.Module] = dict(model.named_modules())
    for target, source in model.all_tied_weights_keys.items():
        path, _, name = target.rpartition(".")
        module = modules.get(path)
        if isinstance(module, PackedModule) and name in module.stack_names:
            yield target, source, module, name
