"""Merging the adapters of a whole model, with a choice of what becomes of the experts' format."""

from functools import partial
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer, onload_layer
from torch import Tensor, nn

from hf_qmoe.lora.merge import Merge
from hf_qmoe.lora.packed import without_base_layer
from hf_qmoe.lora.wrapper import ParamWrapper


def merge_adapter(
    model: PeftModel | nn.Module,
    adapter_names: list[str] | None = None,
    safe_merge: bool = False,
    requantize: bool = False,
) -> dict[str, float]:
    """PEFT's ``merge_adapter``, which can also keep packed experts packed.

    ``model.merge_and_unload()`` after it takes the wrappers away; ``model.unmerge_adapter()`` brings back the experts'
    packed bytes exactly.

    Args:
        model: has adapters on packed experts.
        adapter_names: all active ones if omitted.
        safe_merge: check that sums are finite before a parameter is changed; those of experts, always checked with
            `requantize`, before the first parameter of the model is.
        requantize: pack each sum again in the format it had. 4-bit formats lose most of an update (a relative error
            around 1): look at the result, and prefer the default, which un-quantizes, or `hf-qmoe merge`.

    Returns:
        with `requantize`, for each packed parameter the relative error ``|kept - update| / |update|``, by its
        name in the float model; else nothing.

    Raises:
        ValueError: nothing packed is adapted, adapters are merged already, or sums are not finite.
    """
    wrappers = [module for module in model.modules() if isinstance(module, ParamWrapper)]
    if not wrappers:
        raise ValueError("the model has no adapters on packed experts; use PEFT's own `merge_adapter`")
    merged = sorted({n for w in wrappers for n in w.merged_adapters})
    if merged:
        raise ValueError(f"adapters {', '.join(merged)} are merged already; call `unmerge_adapter()` first")
    tuner: Any = model.base_model if isinstance(model, PeftModel) else model
    base: nn.Module = tuner.model if isinstance(tuner, BaseTuner) else model
    if requantize or safe_merge:
        check_finite(base, adapter_names, requantize)
    if not requantize and isinstance(tuner, BaseTuner):
        tuner.merge_adapter(adapter_names=adapter_names, safe_merge=safe_merge)
        return {}
    errors = {}
    for name, module in list(base.named_modules()):
        if isinstance(module, ParamWrapper):
            with onload_layer(module):
                error = module.merge(safe_merge, adapter_names, requantize)
            if error is not None:
                errors[f"{without_base_layer(name)}.{module.parameter_name}"] = error
        elif isinstance(module, BaseTunerLayer):
            with onload_layer(module):
                module.merge(safe_merge=safe_merge, adapter_names=adapter_names)
    return errors


def check_finite(model: nn.Module, adapter_names: list[str] | None = None, requantize: bool = False) -> None:
    """Looks at every sum that a merge into packed experts would make, before the first of them is made.

    Args:
        model: the model in which the adapters are.
        adapter_names: all active ones if omitted.
        requantize: sums are rounded to their format; else, to the dtype of the float weights.

    Raises:
        ValueError: one is not finite. Nothing was changed.
    """
    for wrapper in model.modules():
        if not isinstance(wrapper, ParamWrapper):
            continue
        chosen = wrapper.active_adapters if adapter_names is None else adapter_names
        names = [n for n in chosen if n in wrapper.lora_A and n not in wrapper.merged_adapters]
        if names:
            with onload_layer(wrapper):
                merge = Merge(wrapper.get_base_layer(), wrapper.parameter_name, getattr(model, "dtype", None))
                merge.check(partial(_update, wrapper, names), requantize)


def _update(wrapper: ParamWrapper, names: list[str], expert: int) -> Tensor:
    return torch.stack([wrapper.expert_delta(name, expert) for name in names]).sum(dim=0)
