"""Saving adapters that stock PEFT can load, and loading them onto packed experts: all of it, or nothing.

PEFT warns of tensors that an adapter lacks, is silent about those it has too many, and when shapes differ leaves a
model with a new, untrained adapter. An adapter of another model would so train or answer with experts half adapted.
"""

import copy
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from peft import LoraConfig, PeftModel
from torch import Tensor, nn
from transformers.utils import cached_file

from hf_qmoe.logging import get_logger
from hf_qmoe.lora.checks import check_axes
from hf_qmoe.lora.packed import has_packed
from hf_qmoe.lora.rollback import unchanged_on_error
from hf_qmoe.lora.wrapper import ParamWrapper


logger = get_logger(__name__)

#: Attribute of configs whose adapters are on packed experts; none of their fields, so it is not saved.
ON_PACKED = "_qmoe_on_packed"


def load_adapter(original: Callable[..., Any]) -> Callable[..., Any]:
    """``PeftModel.load_adapter``, which raises unless every LoRA tensor has found its place.

    A new adapter that does not fit is removed again; of one that was there before, the tensors are put back.
    """

    def load(self: PeftModel, model_id: Any, adapter_name: str, *args: Any, **kwargs: Any) -> Any:
        if not _is_packed(self):
            return original(self, model_id, adapter_name, *args, **kwargs)
        known = adapter_name in self.peft_config
        with unchanged_on_error(self, _overwritten(self, adapter_name)):
            try:
                _check_axes_of(self, model_id, kwargs)
                result = original(self, model_id, adapter_name, *args, **kwargs)
                problem = _incomplete(result, adapter_name)
                if problem:
                    raise _misfit(model_id, problem)
            except Exception as error:
                if not known and adapter_name in self.peft_config:
                    self.delete_adapter(adapter_name)
                if isinstance(error, RuntimeError):
                    raise _misfit(model_id, str(error).partition("\n")[2].strip() or str(error)) from error
                raise
        return result

    return load


def _misfit(model_id: Any, problem: str) -> ValueError:
    return ValueError(
        f"the adapter {str(model_id)!r} does not fit this model, nothing of it was loaded: {problem}. It belongs to "
        "another architecture, or its config says another rank or other targets than its tensors have"
    )


def _check_axes_of(model: PeftModel, model_id: Any, kwargs: dict[str, Any]) -> None:
    """Looks at the file itself: PEFT does not if a config is given, and fills in a version where there is none."""
    place = {name: kwargs[name] for name in ("revision", "subfolder", "token", "cache_dir") if kwargs.get(name)}
    fields = json.loads(Path(cached_file(str(model_id), "adapter_config.json", **place)).read_text(encoding="utf-8"))
    if fields.get("target_parameters"):
        # 0.17 was the first with target_parameters, and did not say its version.
        check_axes(fields["target_parameters"], fields.get("peft_version") or "0.17", model)


def hotswap(original: Callable[..., Any]) -> Callable[..., Any]:
    """``hotswap_adapter_from_state_dict``, which refuses what it would do wrongly to stacks of experts.

    PEFT writes factors of a smaller rank into the first rows of the larger ones, which belong to other experts, and
    looks for patterns by a module's name, which a stack does not have.
    """

    def swap(model: nn.Module, state_dict: dict[str, Tensor], adapter_name: str, config: Any, **kw: Any) -> Any:
        for wrapper in (module for module in model.modules() if isinstance(module, ParamWrapper)):
            same_rank = config.r == wrapper.r.get(adapter_name, config.r)
            if not same_rank or config.rank_pattern or config.alpha_pattern:
                raise ValueError(
                    f"an adapter of packed experts can be swapped for one of the same rank without rank_pattern and "
                    f"alpha_pattern (rank {wrapper.r.get(adapter_name)} for rank {config.r}); load it as another "
                    "adapter with `load_adapter`"
                )
        return original(model, state_dict, adapter_name, config, **kw)

    return swap


def from_pretrained(original: Callable[..., Any]) -> Callable[..., Any]:
    """``PeftModel.from_pretrained``, which leaves the model as it was when the adapter does not fit."""

    def load(cls: type[PeftModel], model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not _is_packed(model):
            return original(cls, model, *args, **kwargs)
        with unchanged_on_error(model, _overwritten(model, "")):
            try:
                return original(cls, model, *args, **kwargs)
            except KeyError as error:  # PEFT looks an offloaded weight up under the name it has on disk
                if any(parameter.is_meta for parameter in model.parameters()):
                    raise ValueError("the model is offloaded; load the adapter before it is") from error
                raise

    return load


def save_config(original: Callable[..., Any]) -> Callable[..., Any]:
    """``LoraConfig.save_pretrained``, which writes ``lora_dropout`` 0 for adapters of packed experts.

    Stock PEFT refuses to load any other, though dropout does nothing once an adapter is trained. To train on with
    dropout, pass a config: ``PeftModel.from_pretrained(model, path, config=..., is_trainable=True)``.
    """

    def save(self: LoraConfig, *args: Any, **kwargs: Any) -> Any:
        if not (getattr(self, ON_PACKED, False) and self.lora_dropout):
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
    return any(isinstance(m, ParamWrapper) for m in model.modules()) or has_packed(model)


def _overwritten(model: nn.Module, adapter_name: str) -> list[Tensor]:
    """What loading an adapter may write to: its own tensors, modules it keeps copies of, and biases of the model."""
    copies = f".modules_to_save.{adapter_name}."
    return [p for n, p in model.named_parameters() if _is_of(n, adapter_name) or copies in n or n.endswith("bias")]


def _is_of(name: str, adapter_name: str) -> bool:
    """Whether a tensor belongs to an adapter, whose name may be part of a path: ``experts``, ``x``."""
    return re.search(rf"\.lora_\w+\.{re.escape(adapter_name)}(\.|$)", name) is not None


def _incomplete(result: Any, adapter_name: str) -> str | None:
    """What PEFT's load result says is missing or left over; `None` if nothing is."""
    problems = []
    lacking = [key for key in result.missing_keys if _is_of(key, adapter_name)]  # PEFT names those of others too
    left_over = [key for key in result.unexpected_keys if "lora_" in key]
    for what, keys in (("lacks", lacking), ("has no place for", left_over)):
        if keys:
            problems.append(f"it {what} {len(keys)} tensors ({', '.join(keys[:3])}{', ...' if len(keys) > 3 else ''})")
    return "; ".join(problems) or None
