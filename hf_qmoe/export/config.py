"""``config.json`` of an exported checkpoint: bitsandbytes' config, and older names beside newer ones."""

from collections.abc import Iterable
from typing import Any

import torch
from transformers import BitsAndBytesConfig, PreTrainedConfig

from hf_qmoe.config import QMoEConfig


def quantization_config(
    config: QMoEConfig, quant_type: str, double_quant: bool, dtype: torch.dtype, skipped: Iterable[str]
) -> dict[str, Any]:
    """The ``quantization_config``.

    Args:
        config: of the packed checkpoint.
        quant_type: nf4 or fp4.
        double_quant: whether scales are double-quantized.
        dtype: of the model, to compute in unless `config` names another.
        skipped: names of modules with float weights.
    """
    stock = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=quant_type,
        bnb_4bit_use_double_quant=double_quant,
        bnb_4bit_compute_dtype=config.bnb_4bit_compute_dtype or dtype,
        bnb_4bit_quant_storage=config.bnb_4bit_quant_storage,
        llm_int8_skip_modules=sorted(skipped),
    ).to_dict()
    # The fields with an underscore repeat others.
    return {name: value for name, value in stock.items() if not name.startswith("_")}


def with_older_names(fields: dict[str, Any], config: PreTrainedConfig) -> dict[str, Any]:
    """Adds what transformers v4 calls otherwise. It would take defaults in place of what it does not find.

    Args:
        fields: of a ``config.json``, or of a part of one.
        config: what they say, for the names that its class has for the same field.
    """
    added: dict[str, Any] = {}
    for other, name in getattr(config, "attribute_map", {}).items():
        if name in fields:
            added[other] = fields[name]
    if "dtype" in fields:
        added["torch_dtype"] = fields["dtype"]
    rope = fields.get("rope_parameters")
    if isinstance(rope, dict) and "rope_theta" in rope:
        scaling = {name: value for name, value in rope.items() if name != "rope_theta"}
        added["rope_theta"] = rope["rope_theta"]
        if "partial_rotary_factor" in scaling:
            added["partial_rotary_factor"] = scaling.pop("partial_rotary_factor")
        added["rope_scaling"] = scaling if scaling.get("rope_type", "default") != "default" else None
    parts = {
        name: with_older_names(value, getattr(config, name))
        for name, value in fields.items()
        if isinstance(value, dict) and isinstance(getattr(config, name, None), PreTrainedConfig)
    }
    return {**added, **fields, **parts}
