"""Merging the adapters of a whole model, with a choice of what becomes of the experts' format."""

from typing import Any

from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer, onload_layer
from torch import nn

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
        safe_merge: check that sums are finite before a parameter is changed.
        requantize: pack each sum again in the format it had. 4-bit formats lose most of an update (a relative error
            around 1): look at the result, and prefer the default, which un-quantizes, or `hf-qmoe merge`.

    Returns:
        with `requantize`, for each packed parameter the relative error ``|kept - update| / |update|``; else nothing.

    Raises:
        ValueError: nothing packed is adapted, adapters are merged already, or sums are not finite.
    """
    wrappers = {name: m for name, m in model.named_modules() if isinstance(m, ParamWrapper)}
    if not wrappers:
        raise ValueError("the model has no adapters on packed experts; use PEFT's own `merge_adapter`")
    merged = sorted({n for w in wrappers.values() for n in w.merged_adapters})
    if merged:
        raise ValueError(f"adapters {', '.join(merged)} are merged already; call `unmerge_adapter()` first")
    if not requantize:
        tuner: Any = model.base_model if isinstance(model, PeftModel) else model
        tuner.merge_adapter(adapter_names=adapter_names, safe_merge=safe_merge)
        return {}
    errors = {}
    for name, module in list(model.named_modules()):
        if isinstance(module, ParamWrapper):
            with onload_layer(module):
                error = module.merge(safe_merge, adapter_names, requantize=True)
            if error is not None:
                errors[f"{without_base_layer(name)}.{module.parameter_name}"] = error
        elif isinstance(module, BaseTunerLayer):
            with onload_layer(module):
                module.merge(safe_merge=safe_merge, adapter_names=adapter_names)
    return errors
