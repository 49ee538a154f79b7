"""Saving adapters that stock PEFT can load, and loading them onto packed experts: all of it, or nothing.

PEFT warns of tensors that an adapter lacks, is silent about those it has too many, and when shapes differ leaves a
model with a new, untrained adapter. An adapter of another model would so train or answer with experts half adapted.
"""

import copy
import re
from collections.abc import Callable
from typing import Any

from peft import LoraConfig, PeftModel
from torch import Tensor, nn

from hf_qmoe.logging import get_logger
from hf_qmoe.lora.packed import packed_modules
from hf_qmoe.lora.wrapper import ParamWrapper


logger = get_logger(__name__)

_OTHER_MODEL = (
    " It belongs to another architecture, or its config says another rank or other targets than its tensors have"
)
_PER_EXPERT = re.compile(r"\.experts\.\d+\.\w+\.lora_")


class _Misread(ValueError):
    """What a file says would be taken for something else."""


def load_adapter(original: Callable[..., Any]) -> Callable[..., Any]:
    """``PeftModel.load_adapter``, which raises unless every LoRA tensor has found its place.

    A new adapter that does not fit is removed again; of one that was there before, the tensors are put back.
    """

    def load(self: PeftModel, model_id: Any, adapter_name: str, *args: Any, **kwargs: Any) -> Any:
        before = _tensors(self, adapter_name)
        kept = {name: tensor.detach().clone() for name, tensor in before.items() if not tensor.is_meta}
        known = adapter_name in self.peft_config
        try:
            result = original(self, model_id, adapter_name, *args, **kwargs)
            problem = _incomplete(result) if _is_packed(self) else None
            cause = _OTHER_MODEL
        except _Misread as error:
            problem, cause = str(error), ""
        except RuntimeError as error:
            if not _is_packed(self):
                raise
            problem, cause = str(error).partition("\n")[2].strip() or str(error), _OTHER_MODEL
        if problem is None:
            return result
        if known:
            for name, tensor in _tensors(self, adapter_name).items():
                if name in kept:
                    tensor.data.copy_(kept[name])
        elif adapter_name in self.peft_config:
            self.delete_adapter(adapter_name)
        raise ValueError(
            f"the adapter {str(model_id)!r} does not fit this model, nothing of it was loaded: {problem}.{cause}"
        )

    return load


def set_state_dict(original: Callable[..., Any]) -> Callable[..., Any]:
    """``set_peft_model_state_dict``, which refuses an adapter that PEFT would read with another scaling.

    PEFT fuses the gate's and the up projection's factors of an expert into some of twice the rank, and doubles alpha
    with it: right for ``alpha / r``, off by the square root of 2 for rslora's ``alpha / sqrt(r)``.
    """

    def set_(
        model: nn.Module, peft_model_state_dict: dict[str, Tensor], adapter_name: str = "default", **kw: Any
    ) -> Any:
        config = getattr(model, "peft_config", {}).get(adapter_name)
        per_expert = any(_PER_EXPERT.search(key) for key in peft_model_state_dict)
        if _is_packed(model) and per_expert and getattr(config, "use_rslora", False):
            raise _Misread(
                "it has factors for each expert and use_rslora, and PEFT would scale those of gate and up wrongly. "
                "Set use_rslora to false in its adapter_config.json and lora_alpha to lora_alpha * sqrt(r), which "
                "means the same"
            )
        return original(model, peft_model_state_dict, adapter_name=adapter_name, **kw)

    return set_


def from_pretrained(original: Callable[..., Any]) -> Callable[..., Any]:
    """``PeftModel.from_pretrained``, which leaves the model as it was when the adapter does not fit."""

    def load(cls: type[PeftModel], model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        before = {name for name, module in model.named_modules() if hasattr(module, "base_layer")}
        flags = [(p, p.requires_grad) for p in model.parameters()]
        try:
            return original(cls, model, *args, **kwargs)
        except ValueError:
            if not before and _is_packed(model):
                _unwrap(model)
                for parameter, requires_grad in flags:
                    parameter.requires_grad_(requires_grad)
            raise

    return load


def save_config(original: Callable[..., Any]) -> Callable[..., Any]:
    """``LoraConfig.save_pretrained``, which writes ``lora_dropout`` 0 for adapters of parameters.

    Stock PEFT refuses to load any other, though dropout does nothing once an adapter is trained. To train on with
    dropout, pass a config: ``PeftModel.from_pretrained(model, path, config=..., is_trainable=True)``.
    """

    def save(self: LoraConfig, *args: Any, **kwargs: Any) -> Any:
        if not (getattr(self, "target_parameters", None) and self.lora_dropout):
            return original(self, *args, **kwargs)
        config = copy.copy(self)
        config.lora_dropout = 0.0
        logger.info(
            f"lora_dropout={self.lora_dropout} is saved as 0 in adapter_config.json, since stock PEFT loads no "
            "adapter of parameters with dropout; to train on with dropout, pass a config when loading"
        )
        return original(config, *args, **kwargs)

    return save


def _is_packed(model: nn.Module) -> bool:
    """Also where nothing packed was wrapped: then an adapter with factors for experts has no place for them."""
    return any(isinstance(m, ParamWrapper) for m in model.modules()) or any(True for _ in packed_modules(model))


def _tensors(model: nn.Module, adapter_name: str) -> dict[str, Tensor]:
    return {n: p for n, p in model.named_parameters() if "lora_" in n and f".{adapter_name}." in n}


def _incomplete(result: Any) -> str | None:
    """What PEFT's load result says is missing or left over; `None` if nothing is."""
    problems = []
    for what, keys in (("lacks", result.missing_keys), ("has no place for", result.unexpected_keys)):
        keys = [key for key in keys if "lora_" in key]
        if keys:
            problems.append(f"it {what} {len(keys)} tensors ({', '.join(keys[:3])}{', ...' if len(keys) > 3 else ''})")
    return "; ".join(problems) or None


def _unwrap(model: nn.Module) -> None:
    """Takes all of PEFT's layers out of `model`, which had none."""
    for name, module in list(model.named_modules()):
        if hasattr(module, "get_base_layer"):
            parent, _, child = name.rpartition(".")
            if hasattr(model.get_submodule(parent), child):
                setattr(model.get_submodule(parent), child, module.get_base_layer())
    model.__dict__.pop("peft_config", None)
