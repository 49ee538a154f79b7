"""What each expert's projections are called in the checkpoints a model was published in."""

import re
from typing import NamedTuple

from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import PrefixChange, WeightConverter, WeightRenaming, WeightTransform


class Names(NamedTuple):
    """Names of one stack's parts, as ``<path>.<expert>.<projection>``.

    Attributes:
        path: of the experts, ``model.layers.0.block_sparse_moe.experts``.
        projections: gate and up, or the only one.
    """

    path: str
    projections: tuple[str, ...]


def original_names(model: nn.Module, path: str, parameter_name: str) -> Names:
    """Names of the parts of a fused parameter, as transformers' conversion of the original checkpoint has them.

    Without a conversion that takes experts one by one: the path in `model`, and ``gate_proj``, ``up_proj``,
    ``down_proj``. What lies before the layer (``model.``) always is as in `model`, since an adapter's other modules
    are named so.

    Args:
        model: the model without adapters' wrappers in `path`.
        path: of the experts module.
        parameter_name: ``gate_up_proj``, ``up_proj`` or ``down_proj``.
    """
    default = ("gate_proj", "up_proj") if parameter_name == "gate_up_proj" else (parameter_name,)
    if not isinstance(model, PreTrainedModel):
        return Names(path, default)
    conversions = get_model_conversion_mapping(model, add_legacy=False)
    name = f"{path}.{parameter_name}"
    for conversion in conversions:
        projections = _projections(conversion, name)
        if len(projections) == len(default):
            return Names(_original_path(conversions, path, projections[0]), projections)
    return Names(path, default)


def _projections(conversion: WeightTransform, name: str) -> tuple[str, ...]:
    """What a conversion to the fused parameter `name` calls its parts; empty if it is another's."""
    if not isinstance(conversion, WeightConverter) or len(conversion.target_patterns) != 1:
        return ()
    scope = conversion.scope_prefix
    if scope and not f".{name}".startswith((f".{scope}.", f".{conversion.base_model_prefix}.{scope}.")):
        return ()
    if re.search(conversion.target_patterns[0].replace("*", ".*") + "$", name) is None:
        return ()
    found = [re.search(r"experts[^*]*\*\.(\w+)(\.weight)?$", source) for source in conversion.source_patterns]
    return tuple(match[1] for match in found if match is not None)


def _original_path(conversions: list[WeightTransform], path: str, projection: str) -> str:
    """`path` after undoing the conversion's renamings of what follows the layer's number."""
    name = f"{path}.0.{projection}.weight"
    for conversion in reversed(conversions):
        if isinstance(conversion, WeightRenaming) and not isinstance(conversion, PrefixChange):
            name, _ = conversion.reverse_transform().rename_source_key(name)
    original = name.removesuffix(f".0.{projection}.weight")
    layer, tail = _split_at_layer(path)
    original_layer, original_tail = _split_at_layer(original)
    is_same_layer = layer.rpartition(".")[2] == original_layer.rpartition(".")[2]
    return layer + original_tail if is_same_layer and original_tail else layer + tail


def _split_at_layer(path: str) -> tuple[str, str]:
    """A path behind its last number: ``model.layers.0`` and ``.mlp.experts``."""
    match = re.match(r"(.*\.\d+)?(.*)$", path)
    assert match is not None
    return match[1] or "", match[2]
