"""Where PEFT is told of packed experts: methods of its own (`HOOKED`), wrapped when `hf_qmoe` is imported.

PEFT can register custom LoRA layers per config only, which an adapter on disk does not remember. Each wrapped method
does what PEFT's does for a model without packed parameters.
"""

import copy
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from peft import LoraConfig, PeftModel
from peft.tuners.lora.model import LoraModel
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
from peft.utils import hotswap
from torch import nn

from hf_qmoe.lora import loading
from hf_qmoe.lora.checks import check_config, matches, targeted_parameters
from hf_qmoe.lora.conversion_fixes import keep_linears, misread_patterns, rescale, unmatched
from hf_qmoe.lora.inject import inject_parameters
from hf_qmoe.lora.merge import forget_packed, unquantized_dtype, unquantized_modules
from hf_qmoe.lora.merge_model import check_finite
from hf_qmoe.lora.names import float_names
from hf_qmoe.lora.packed import has_packed, packed_names, packed_parameter, without_base_layer
from hf_qmoe.lora.rollback import unchanged_on_error
from hf_qmoe.lora.weighted import allow_stacks, combine, skip_stacks
from hf_qmoe.lora.wrapper import ParamWrapper
from hf_qmoe.wrapping import wrap


_PATTERN_WARNING = re.compile(r"The following (rank|alpha)_pattern keys did not match any targeted module")


def install() -> None:
    """Wraps PEFT's methods, once however often it is called."""
    for owner, hooks in HOOKED:
        for name, hook in hooks.items():
            wrap(owner, name, hook)


def _inject_adapter(original: Callable[..., Any]) -> Callable[..., Any]:
    def inject_adapter(self: Any, model: nn.Module, adapter_name: str, *args: Any, **kwargs: Any) -> Any:
        if not has_packed(model):
            return original(self, model, adapter_name, *args, **kwargs)
        config = self.peft_config[adapter_name]
        with unchanged_on_error(model), float_names(model), _right_about_patterns(self, adapter_name):
            if isinstance(config, LoraConfig):
                keep_linears(config, model)
            self._qmoe_before = copy.deepcopy(config)
            return original(self, model, adapter_name, *args, **kwargs)

    return inject_adapter


def _prepare_model(original: Callable[..., Any]) -> Callable[..., Any]:
    # Called after PEFT has worked out the targets and before it changes the first module.
    def prepare_model(self: Any, peft_config: LoraConfig, model: nn.Module) -> Any:
        if has_packed(model):
            before: LoraConfig = getattr(self, "_qmoe_before", peft_config)
            rescale(peft_config, before.alpha_pattern or {})
            check_config(peft_config, model)
            _check_names(peft_config, before, model)
            if any(True for _ in targeted_parameters(model, peft_config.target_parameters or [])):
                setattr(peft_config, loading.ON_PACKED, True)
        return original(self, peft_config, model)

    return prepare_model


def _check_names(config: LoraConfig, before: LoraConfig, model: nn.Module) -> None:
    names = [name for name, _ in model.named_modules()]
    names += [name for name, _ in model.named_parameters(remove_duplicate=False)]  # tied ones under each name
    was_converted = set(before.target_parameters or ()) != set(config.target_parameters or ())
    names = [without_base_layer(name) for name in names]
    problem = misread_patterns(config, names, was_converted)
    if problem:
        raise ValueError(problem)
    missed = [t for t in before.target_parameters or [] if not any(matches(name, [t]) for name in names)]
    if missed:
        warnings.warn(f"target_parameters={missed} match no parameter and are ignored", RuntimeWarning, stacklevel=2)


def _create_new_module(original: Callable[..., Any]) -> Callable[..., Any]:
    def create_new_module(lora_config: LoraConfig, adapter_name: str, target: nn.Module, **kwargs: Any) -> Any:
        base = target.get_base_layer() if isinstance(target, BaseTunerLayer) else target
        name = kwargs.get("parameter_name")
        if name is None or packed_parameter(base, name) is None:
            return original(lora_config, adapter_name, target, **kwargs)
        kwargs.pop("device_map", None)
        return ParamWrapper(target, adapter_name, config=lora_config, **kwargs)

    return create_new_module


def _check_merge_allowed(original: Callable[..., Any]) -> Callable[..., Any]:
    # Called before the first module is merged.
    def check_merge_allowed(self: Any) -> Any:
        result = original(self)
        packed: dict[int, tuple[int, int]] = {}
        dtype: torch.dtype | None = getattr(self.model, "dtype", None)
        for module in self.model.modules():
            if isinstance(module, ParamWrapper) and not module.merged:
                module.float_dtype = dtype
                packed.update(_cost(module.get_base_layer(), dtype))
        if packed:
            now, then = (sum(nbytes) for nbytes in zip(*packed.values(), strict=True))
            warnings.warn(
                f"Merging LoRA into packed experts un-quantizes them, since 4 bits cannot hold an update: they take "
                f"{then / 2**20:,.1f} MiB instead of {now / 2**20:,.1f} MiB then. To keep them packed at a loss of "
                "accuracy, use hf_qmoe.merge_adapter(model, requantize=True); to merge into the float checkpoint, "
                "`hf-qmoe merge`.",
                stacklevel=3,
            )
        return result

    return check_merge_allowed


def _cost(module: nn.Module, dtype: torch.dtype | None) -> dict[int, tuple[int, int]]:
    """Bytes now and after un-quantizing for a model of `dtype`, by parameter, of a whole experts module."""
    costs = {}
    for name in packed_names(module):
        parameter = packed_parameter(module, name)
        if parameter is not None:
            stack, itemsize = parameter.stack, unquantized_dtype(module, name, dtype).itemsize
            costs[hash((id(module), name))] = (stack.nbytes, stack.numel * itemsize)
    return costs


def _merge_adapter(original: Callable[..., Any]) -> Callable[..., Any]:
    # PEFT looks at one layer at a time, and leaves those before a broken one merged.
    def merge_adapter(self: Any, adapter_names: list[str] | None = None, safe_merge: bool = False) -> Any:
        if safe_merge:
            check_finite(self.model, adapter_names)
        return original(self, adapter_names=adapter_names, safe_merge=safe_merge)

    return merge_adapter


def _unload(original: Callable[..., Any]) -> Callable[..., Any]:
    def unload_and_optionally_merge(
        self: Any,
        merge: bool = True,
        progressbar: bool = False,
        safe_merge: bool = False,
        adapter_names: list[str] | None = None,
    ) -> Any:
        if merge and safe_merge:
            check_finite(self.model, adapter_names)
        model = original(self, merge, progressbar, safe_merge, adapter_names)
        paths = unquantized_modules(model)
        for path in paths:
            forget_packed(model.get_submodule(path))
        leave_out = getattr(getattr(model, "hf_quantizer", None), "leave_out", None)
        if paths and leave_out is not None:
            leave_out(model, paths)
        return model

    return unload_and_optionally_merge


@contextmanager
def _right_about_patterns(tuner: Any, adapter_name: str) -> Iterator[None]:
    """Corrects PEFT's warning that a rank or alpha pattern is ignored: it does not look at parameters, which match."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            yield
        finally:
            recorded = list(caught)
    config = tuner.peft_config[adapter_name]
    names = [without_base_layer(n) for n in (*tuner.targeted_module_names, *tuner.targeted_parameter_names)]
    for warning in recorded:
        message = str(warning.message)
        found = _PATTERN_WARNING.match(message)
        if found:
            kind = f"{found[1]}_pattern"
            unused = unmatched(getattr(config, kind), names)
            if not unused:
                continue
            message = f"The following {kind} keys match no adapted module or parameter and are ignored: {unused}."
        warnings.warn_explicit(message, warning.category, warning.filename, warning.lineno)


_HOOKS: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "_prepare_model": _prepare_model,
    "_inject_parameters": inject_parameters,
    "_create_new_module": _create_new_module,
    "_check_merge_allowed": _check_merge_allowed,
    "merge_adapter": _merge_adapter,
    "_unload_and_optionally_merge": _unload,
    "_check_add_weighted_adapter": allow_stacks,
    "add_weighted_adapter": combine,
    "_svd_generalized_task_arithmetic_weighted_adapter": skip_stacks,
}
#: What is wrapped, by class or module. Names show in every tuner, the rest is LoRA's.
HOOKED: tuple[tuple[Any, dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]]], ...] = (
    (BaseTuner, {"inject_adapter": _inject_adapter}),
    (LoraModel, _HOOKS),
    (PeftModel, {"load_adapter": loading.load_adapter, "from_pretrained": loading.from_pretrained}),
    (LoraConfig, {"save_pretrained": loading.save_config}),
    (hotswap, {"hotswap_adapter_from_state_dict": loading.hotswap}),
)
