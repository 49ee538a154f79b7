"""Wrapping the parameters that ``target_parameters`` match, where PEFT's own search would miss some.

PEFT finds a parametrized parameter by its whole name only, in alphabetical order, and not a second time; and so it
does every other parameter of that module.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import groupby
from typing import Any, NamedTuple

from accelerate import init_empty_weights
from peft import LoraConfig
from torch import nn

from hf_qmoe.experts import ExpertsNbit
from hf_qmoe.lora.checks import matches
from hf_qmoe.lora.packed import packed_names, without_base_layer
from hf_qmoe.lora.wrapper import ParamWrapper
from hf_qmoe.parametrize import declared_order


class _Match(NamedTuple):
    """A targeted parameter: path of its module in the float model, its name, whether PEFT would miss it."""

    path: str
    name: str
    is_ours: bool

    @property
    def key(self) -> str:
        return f"{self.path}.{self.name}"


def inject_parameters(original: Callable[..., Any]) -> Callable[..., Any]:
    """``LoraModel._inject_parameters``, which also finds what is beside or under a parametrization of ours."""

    def inject(
        self: Any, peft_config: LoraConfig, model: nn.Module, adapter_name: str, low_cpu_mem_usage: bool
    ) -> list[str]:
        found = list(_matches(model, list(peft_config.target_parameters or [])))
        if not any(match.is_ours for match in found):
            return original(self, peft_config, model, adapter_name, low_cpu_mem_usage)  # type: ignore[no-any-return]
        names: list[str] = []
        for is_ours, group in groupby(found, key=lambda match: match.is_ours):  # in PEFT's order, as it draws numbers
            if is_ours:
                for match in group:
                    _wrap(self, peft_config, model, adapter_name, low_cpu_mem_usage, match)
                    names.append(match.key)
                    if match.key not in self.targeted_parameter_names:  # PEFT 0.20 does not take them from the result
                        self.targeted_parameter_names.append(match.key)
            else:
                others = copy.copy(peft_config)
                others.target_parameters = [match.key for match in group]
                names += original(self, others, model, adapter_name, low_cpu_mem_usage) or []
        return names

    return inject


def _matches(model: nn.Module, targets: list[str]) -> Iterator[_Match]:
    for path, module in model.named_modules():
        own = [name for name, _ in module.named_parameters(recurse=False)]
        packed = [] if isinstance(module, ExpertsNbit) else packed_names(module)
        for name in (n for n in declared_order(module) if n in packed or n in own):
            match = _Match(without_base_layer(path), name, bool(packed))
            if matches(match.key, targets):
                yield match


def _wrap(
    tuner: Any, config: LoraConfig, model: nn.Module, adapter_name: str, low_cpu_mem_usage: bool, match: _Match
) -> None:
    if not match.path:  # as PEFT says it: the wrapper would hold itself
        raise ValueError(
            f"Targeting an nn.Parameter on the top-level module is not supported (parameter '{match.name}'). "
        )
    parent_path, _, child_name = match.path.rpartition(".")
    parent, target = model.get_submodule(parent_path), model.get_submodule(match.path)
    tuner._check_target_module_compatiblity(config, model, child_name)
    with init_empty_weights() if low_cpu_mem_usage else nullcontext():
        tuner._create_and_replace(
            config,
            adapter_name,
            _existing_wrapper(target, match.name) or target,
            child_name,
            parent,
            current_key=match.key,
            parameter_name=match.name,
        )


def _existing_wrapper(module: nn.Module, name: str) -> nn.Module | None:
    while isinstance(module, ParamWrapper):
        if module.parameter_name == name:
            return module
        module = module.base_layer
    return None
