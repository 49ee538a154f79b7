"""`enable` and `disable`: plain ``BitsAndBytesConfig(load_in_4bit=True)``, wherever it is passed, packs experts too.

For programs that build that config by themselves (TRL's ``--load_in_4bit``, Axolotl, LLaMA-Factory, pipelines). Models
without experts are loaded by bitsandbytes' own quantizer, as ever.
"""

from typing import Any

from transformers import BitsAndBytesConfig, PreTrainedModel
from transformers.quantizers import auto
from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer

from hf_qmoe.config import QMoEConfig
from hf_qmoe.quantizer import HintingBnb4BitHfQuantizer, QMoEHfQuantizer
from hf_qmoe.selection import experts_modules
from hf_qmoe.sources.merge import is_own, merged_config, source_of


_METHOD = "bitsandbytes_4bit"

#: What `enable` was given; `None` while it is off.
_fields: dict[str, Any] | None = None


def enable(**fields: Any) -> None:
    """Routes ``BitsAndBytesConfig(load_in_4bit=True)`` through this package for models with experts.

    Format and double quantization of the experts are those that the config has for linears. What is saved is a
    `QMoEConfig`. Doing it again is harmless; the fields of the last call count.

    Args:
        fields: fields of `QMoEConfig` that the other config cannot express, for all models loaded from now on:
            ``experts_quant_type``, ``experts_module``, ``modules_to_not_convert``, ...

    Raises:
        TypeError, ValueError: a field that `QMoEConfig` refuses.
        RuntimeError: another package has replaced bitsandbytes' quantizer.
    """
    global _fields
    QMoEConfig(**fields)
    _put(RoutingBnb4BitHfQuantizer)
    _fields = dict(fields)


def disable() -> None:
    """Undoes `enable`. Models that are loaded already stay as they are.

    Raises:
        RuntimeError: another package has replaced bitsandbytes' quantizer since.
    """
    global _fields
    _put(HintingBnb4BitHfQuantizer)
    _fields = None


def _put(quantizer: type[Bnb4BitHfQuantizer]) -> None:
    current = auto.AUTO_QUANTIZER_MAPPING[_METHOD]
    known = (Bnb4BitHfQuantizer, HintingBnb4BitHfQuantizer, RoutingBnb4BitHfQuantizer)
    if current.__name__ not in {cls.__name__ for cls in known}:
        raise RuntimeError(
            f"transformers' quantizer for {_METHOD} was replaced by {current.__module__}.{current.__qualname__}; "
            "pass quantization_config=hf_qmoe.QMoEConfig() instead"
        )
    auto.AUTO_QUANTIZER_MAPPING[_METHOD] = quantizer


def routed_config(config: BitsAndBytesConfig) -> QMoEConfig:
    """The `QMoEConfig` that stands for a 4-bit `BitsAndBytesConfig` while `enable` is on."""
    return QMoEConfig.from_bitsandbytes(config, **(_fields or {}))


def _routable(config: Any) -> BitsAndBytesConfig | None:
    """`config`, or what it says as a dict, if it is of bitsandbytes' 4 bit and `enable` is on."""
    if isinstance(config, dict) and config.get("load_in_4bit"):
        config = BitsAndBytesConfig.from_dict(config)
    is_one = isinstance(config, BitsAndBytesConfig) and not isinstance(config, QMoEConfig)
    return config if _fields is not None and is_one and config.load_in_4bit else None


def merge(stored: Any, wanted: Any) -> tuple[bool, Any]:
    """Decides on a checkpoint that is quantized already where `wanted` was passed for it.

    Args:
        stored: the checkpoint's ``quantization_config``, a dict or an object.
        wanted: the user's, or `None`.

    Returns:
        whether the load is this package's, and then its config, else the one to go on with in place of `wanted`.

    Raises:
        ValueError: as `hf_qmoe.sources.merge.merged_config`.
    """
    routable = _routable(wanted)
    if is_own(stored):
        return False, wanted if routable is None else None
    if isinstance(wanted, QMoEConfig):
        return True, merged_config(stored, wanted)
    values = stored if isinstance(stored, dict) else stored.to_dict()
    is_foreign = values.get("quant_method") in ("fp8", "mxfp8", "mxfp4")
    if routable is not None and is_foreign:
        return True, merged_config(values, routed_config(routable))
    return False, wanted


class RoutingBnb4BitHfQuantizer(Bnb4BitHfQuantizer):
    """bitsandbytes' quantizer, which becomes a `QMoEHfQuantizer` when it is given a model with experts."""

    def preprocess_model(self, model: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        """Takes the place of the method of either class."""
        if experts_modules(model, "auto"):
            stored = self.quantization_config
            config = routed_config(stored)
            if self.pre_quantized:
                config.experts_double_quant = False  # scales of bytes that are kept are stored in float32
                config.source = source_of(stored.to_dict())
            self.__class__ = QMoEHfQuantizer
            QMoEHfQuantizer.__init__(self, config, pre_quantized=self.pre_quantized)
            model.config.quantization_config = config
        return super(Bnb4BitHfQuantizer, self).preprocess_model(model, *args, **kwargs)
