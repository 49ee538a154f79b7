"""Telling transformers and PEFT about the method. Importing `hf_qmoe` does this once; doing it again is harmless."""

from collections.abc import Callable
from typing import Any

from transformers.quantizers import auto

from hf_qmoe import enabling
from hf_qmoe.config import QUANT_METHOD, QMoEConfig
from hf_qmoe.lora import hooks
from hf_qmoe.memory import install_counters
from hf_qmoe.quantizer import HintingBnb4BitHfQuantizer, QMoEHfQuantizer
from hf_qmoe.wrapping import wrap


def register() -> None:
    """Puts `QMoEConfig` and its quantizer into transformers' registries, and wraps methods of transformers and PEFT.

    Raises:
        ImportError: another package has registered a method of the same name.
    """
    _put(auto.AUTO_QUANTIZATION_CONFIG_MAPPING, QUANT_METHOD, QMoEConfig)
    _put(auto.AUTO_QUANTIZER_MAPPING, QUANT_METHOD, QMoEHfQuantizer)
    current = auto.AUTO_QUANTIZER_MAPPING["bitsandbytes_4bit"]
    if current.__name__ in ("Bnb4BitHfQuantizer", HintingBnb4BitHfQuantizer.__name__):
        auto.AUTO_QUANTIZER_MAPPING["bitsandbytes_4bit"] = HintingBnb4BitHfQuantizer
    wrap(auto.AutoHfQuantizer, "merge_quantization_configs", _read_foreign_checkpoints)
    install_counters()
    hooks.install()


def _read_foreign_checkpoints(original: Callable[..., Any]) -> Callable[..., Any]:
    """Lets a `QMoEConfig` be passed for a checkpoint that another method has quantized."""

    def merge_quantization_configs(cls: type, stored: Any, wanted: Any) -> Any:
        ours, config = enabling.merge(stored, wanted)
        return config if ours else original(cls, stored, config)

    return merge_quantization_configs


def _put(registry: dict[str, Any], name: str, cls: type) -> None:
    # Assigned rather than registered: after a reload of this package, the new classes must take the place of the old.
    present = registry.get(name)
    if present is not None and (present.__module__, present.__qualname__) != (cls.__module__, cls.__qualname__):
        raise ImportError(
            f"the quantization method {name!r} is taken by {present.__module__}.{present.__qualname__}; "
            "uninstall that package or hf_qmoe"
        )
    registry[name] = cls
