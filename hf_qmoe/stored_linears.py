"""bitsandbytes' linears as a packed checkpoint stores them: bytes, scales and codebook beside each other.

transformers' own converter for them matches every key that ends in ``weight``, and so keeps the float ones, embeddings
and norms, from being cast to the dtype that was asked for. One converter for each linear would match nothing else, but
transformers asks each converter about each tensor: the time of a load would grow with the square of the layers.
"""

import copy
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from bitsandbytes.nn.modules import Linear4bit
from transformers import PreTrainedModel
from transformers.core_model_loading import ConversionOps, WeightConverter, WeightTransform
from transformers.integrations.bitsandbytes import Bnb4bitDeserialize
from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer
from transformers.quantizers.quantizers_utils import get_module_from_name


class QMoEDeserializeLinear(ConversionOps):
    """Stored tensors of one bitsandbytes linear to its weight; transformers' own operation under the linear's name."""

    def __init__(self, hf_quantizer: Any) -> None:
        self.hf_quantizer = hf_quantizer  # its presence keeps transformers from casting the stored scales

    def convert(
        self,
        input_dict: dict[str, Any],
        source_patterns: list[str],
        target_patterns: list[str],
        *,
        model: PreTrainedModel,
        full_layer_name: str,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Builds the weight from its bytes and statistics; if some lack, notes which for `lacking` and gives none."""
        (target,) = target_patterns
        keys = dict(zip(source_patterns, STORED_KEYS, strict=True))
        stored = {keys[pattern]: value for pattern, value in input_dict.items()}
        module, _ = get_module_from_name(model, full_layer_name)
        is_packed = isinstance(module, Linear4bit)
        if is_packed and (lacks := _lacks(stored)):
            module.__dict__[_LACKS] = lacks
            return {}
        stock = Bnb4bitDeserialize(self.hf_quantizer)
        weight = stock.convert(stored, model=model, full_layer_name=full_layer_name)["weight"]
        if is_packed:
            # The state was saved with the dtype of that time, in which bitsandbytes' backward would still dequantize.
            weight.quant_state.dtype = module.compute_dtype
        return {target: weight}


#: Keys of the tensors of a linear, below its name.
STORED_KEYS: tuple[str, ...] = tuple(Bnb4BitHfQuantizer.serialized_names["weight"])


_LACKS = "_tensors_that_the_checkpoint_lacks"


def _lacks(stored: Mapping[str, Any]) -> list[str]:
    """Without its scales' scales a nested weight would be read as one that is not nested."""
    absmax = stored.get("weight.absmax")
    absmax = absmax[0] if isinstance(absmax, list) else absmax
    is_nested = absmax is not None and absmax.dtype == torch.uint8
    states = {key for key in STORED_KEYS if ".quant_state." in key}
    needed = [key for key in STORED_KEYS if key not in states and (is_nested or ".nested_" not in key)]
    lacks = [key for key in needed if key not in stored]
    return lacks if states & set(stored) else [*lacks, "weight.quant_state"]


def lacking(linear: Linear4bit) -> list[str]:
    """Which of its tensors the checkpoint lacks, below its name; each is told once."""
    lacks: list[str] = linear.__dict__.pop(_LACKS, [])
    return lacks


class StoredLinearConverter(WeightConverter):
    """Collects the tensors of linears; transformers makes a copy for each tensor of a checkpoint that matches."""

    __slots__ = ()

    def __deepcopy__(self, memo: Any) -> "StoredLinearConverter":
        """A converter with the same patterns and operations, none of which changes, that has collected nothing."""
        new = copy.copy(self)
        new.collected_tensors, new.layer_targets = defaultdict(list), defaultdict(set)
        return new


def linear_conversions(model: PreTrainedModel, hf_quantizer: Any) -> list[WeightTransform]:
    """Converters for the stored linears of a packed checkpoint, one for each distinct name (`shortest_names`)."""
    prefix = f"{model.base_model_prefix}."
    quantized, others = [], []
    for name, module in model.named_modules():
        if isinstance(module, Linear4bit):
            quantized.append(name.removeprefix(prefix))
        elif hasattr(module, "weight"):
            others.append(name.removeprefix(prefix))
    conversions: list[WeightTransform] = []
    for name in shortest_names(quantized, others):
        stored = [rf"(?<!\w){re.escape(f'{name}.{key}')}" for key in STORED_KEYS]
        conversions.append(StoredLinearConverter(stored, f"{name}.weight", [QMoEDeserializeLinear(hf_quantizer)]))
    return conversions


def shortest_names(names: Iterable[str], others: Iterable[str]) -> list[str]:
    """By what the modules `names` are told from `others`: runs of last components with which none of `others` ends.

    Returns:
        distinct runs, each the shortest; the whole name where there is none.
    """
    taken = {ending for name in others for ending in _endings(name)}
    return list(dict.fromkeys(next((e for e in _endings(name) if e not in taken), name) for name in names))


def _endings(name: str) -> list[str]:
    """``c``, ``b.c`` and ``a.b.c`` of ``a.b.c``."""
    components = name.split(".")
    return [".".join(components[-count:]) for count in range(1, len(components) + 1)]
