"""Which method a checkpoint was quantized with, and the config it is loaded with then."""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from transformers.utils.quantization_config import QuantizationConfigMixin

from hf_qmoe.config import QUANT_METHOD, QMoEConfig
from hf_qmoe.sources.bitsandbytes_4bit import BitsAndBytes4bit
from hf_qmoe.sources.fp8 import Fp8
from hf_qmoe.sources.mxfp4 import Mxfp4
from hf_qmoe.sources.source import Source


_SOURCES: dict[str, type[Source]] = {"bitsandbytes": BitsAndBytes4bit, "fp8": Fp8, "mxfp8": Fp8, "mxfp4": Mxfp4}


def source_of(config: Mapping[str, Any]) -> Source:
    """The method that the ``quantization_config`` of a ``config.json`` names.

    Raises:
        ValueError: weights of this method cannot be read here.
    """
    method = config.get("quant_method") or "bitsandbytes"
    method = str(getattr(method, "value", method))
    if method not in _SOURCES or config.get("load_in_8bit"):
        name = "bitsandbytes with load_in_8bit" if config.get("load_in_8bit") else repr(method)
        raise ValueError(
            f"the checkpoint is quantized already: quantization_config.quant_method in its config.json is {name}, "
            f"which cannot be read here; 4-bit bitsandbytes, fp8, mxfp4 and mxfp8 can be. Start from the bf16 "
            "checkpoint"
        )
    return _SOURCES[method](config)


def merged_config(stored: Mapping[str, Any] | QuantizationConfigMixin, wanted: QMoEConfig) -> QMoEConfig:
    """The config to load a checkpoint with that another method has quantized.

    Args:
        stored: the checkpoint's ``quantization_config``.
        wanted: the user's.

    Returns:
        a copy of `wanted` that remembers the checkpoint's. bitsandbytes' bytes are kept: what its config says of the
        linears holds.

    Raises:
        ValueError: weights of this method cannot be read here, or bytes that are kept would contradict `wanted`.
    """
    values = dict(stored) if isinstance(stored, Mapping) else stored.to_dict()
    source = source_of(values)
    merged = copy.deepcopy(wanted)
    merged.source = source
    if isinstance(source, BitsAndBytes4bit):
        if merged.experts_double_quant:
            raise ValueError(
                "the experts' bytes in a bitsandbytes checkpoint are kept, with their scales in float32: set "
                "experts_double_quant=False"
            )
        for name in ("bnb_4bit_quant_type", "bnb_4bit_use_double_quant", "bnb_4bit_quant_storage"):
            if name in values:
                setattr(merged, name, values[name])
        if isinstance(merged.bnb_4bit_quant_storage, str):
            merged.bnb_4bit_quant_storage = getattr(torch, merged.bnb_4bit_quant_storage)
    return merged


def is_own(stored: Mapping[str, Any] | QuantizationConfigMixin) -> bool:
    """Whether a checkpoint was packed by this package."""
    values = stored if isinstance(stored, Mapping) else stored.to_dict()
    return bool(values.get("quant_method") == QUANT_METHOD)
