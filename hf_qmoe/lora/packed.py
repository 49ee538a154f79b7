"""What LoRA needs to know of a packed parameter, whichever form it has."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import nn

from hf_qmoe.experts import ExpertsNbit
from hf_qmoe.packed import PackedStack
from hf_qmoe.parametrize import packed_parametrizations


class PackedParameter(NamedTuple):
    """A packed parameter: ``shape`` and ``dtype`` of the float one it stands for, and its stack ``[E, out, in]``."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    stack: PackedStack


def packed_parameter(module: nn.Module, name: str) -> PackedParameter | None:
    """The packed parameter `name` of `module`; `None` if it is not packed (any more)."""
    if isinstance(module, ExpertsNbit):
        if name not in module.stack_names:
            return None
        return PackedParameter(module.float_shape(name), module.compute_dtype or torch.float32, module.stack(name))
    for own_name, parametrization, packed in packed_parametrizations(module):
        if own_name == name:
            return PackedParameter(parametrization.shape, parametrization.dtype, parametrization.stack(packed))
    return None


def packed_names(module: nn.Module) -> list[str]:
    """Names of the packed parameters of `module` itself, in the order of the float ones."""
    if isinstance(module, ExpertsNbit):
        return list(module.stack_names)
    return [name for name, _, _ in packed_parametrizations(module)]


def packed_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module, list[str]]]:
    """Path, module and packed names of each module of `model` that has packed parameters."""
    for path, module in model.named_modules():
        names = packed_names(module)
        if names:
            yield path, module, names


def has_packed(model: nn.Module) -> bool:
    """Whether any module of `model` has packed parameters."""
    return any(True for _ in packed_modules(model))


def without_base_layer(path: str) -> str:
    """The path that a module has in the float model, without PEFT's wrappers."""
    return ".".join(part for part in path.split(".") if part != "base_layer")
