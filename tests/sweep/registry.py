"""Every experts class of the installed transformers, found in transformers itself: no list of classes is kept here."""

import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import transformers.models
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.integrations.moe import use_experts_implementation


_DECORATED = re.compile(r"^@use_experts_implementation.*\n(?:@.*\n)*class (\w+)", re.MULTILINE)
_CALLED_EXPERTS = re.compile(r"^class (\w*Expert\w*)\(", re.MULTILINE)
_DECORATOR_INIT = f"{use_experts_implementation.__qualname__}.<locals>.wrapper.<locals>.__init__"


class Found(NamedTuple):
    """A class, and the module of transformers that defines it, as ``qwen3_moe.modeling_qwen3_moe``."""

    name: str
    module: str

    @property
    def package(self) -> str:
        """Folder of transformers.models."""
        return self.module.partition(".")[0]


def _modeling_files() -> Iterator[tuple[str, Path]]:
    for package in pkgutil.iter_modules(transformers.models.__path__):
        folder = Path(transformers.models.__path__[0], package.name)
        for path in sorted(folder.glob("modeling_*.py")):
            yield f"{package.name}.{path.stem}", path


def _matches(pattern: re.Pattern[str]) -> dict[str, Found]:
    found: dict[str, Found] = {}
    for module, path in _modeling_files():
        for name in pattern.findall(path.read_text("utf-8")):
            assert name not in found, f"{name} is defined twice"
            found[name] = Found(name, module)
    return found


@cache
def decorated() -> dict[str, Found]:
    """Every class under ``@use_experts_implementation``, by name, read from source text: cheap enough to collect."""
    return _matches(_DECORATED)


@cache
def undecorated() -> dict[str, Found]:
    """Every other class that is called experts, by name."""
    return {name: found for name, found in _matches(_CALLED_EXPERTS).items() if name not in decorated()}


def every() -> dict[str, Found]:
    """All of them, the decorated first."""
    return decorated() | undecorated()


def is_decorated(cls: type) -> bool:
    """Whether instances get the decorator's flags: it replaces ``__init__``, here or in a parent."""
    inits = (vars(parent).get("__init__") for parent in cls.__mro__)
    return any(getattr(getattr(init, "__code__", None), "co_qualname", "") == _DECORATOR_INIT for init in inits)


def imported(module: str) -> ModuleType:
    """A module of transformers.models."""
    return importlib.import_module(f"transformers.models.{module}")


def own_classes(module: str, base: type) -> list[type]:
    """Subclasses of `base` that a module defines itself, in its order."""
    everything = vars(imported(module)).values()
    own = [c for c in everything if inspect.isclass(c) and issubclass(c, base)]
    return [c for c in dict.fromkeys(own) if c.__module__ == f"transformers.models.{module}"]


def import_everything() -> tuple[dict[str, list[type]], dict[str, str]]:
    """The `nn.Module` classes of every modeling module, and the error of those that cannot be imported."""
    classes: dict[str, list[type]] = {}
    failed: dict[str, str] = {}
    for module, _ in _modeling_files():
        try:
            classes[module] = own_classes(module, nn.Module)
        except ImportError as error:
            failed[module] = str(error)
    return classes, failed


def model_classes(module: str) -> list[type[PreTrainedModel]]:
    """Models of a module that have a config class of their own, those with a head first, causal ones foremost."""
    order = ("ForCausalLM", "ForConditionalGeneration", "For", "")
    models = [
        cls
        for cls in own_classes(module, PreTrainedModel)
        if inspect.isclass(getattr(cls, "config_class", None))
        and issubclass(cls.config_class, PreTrainedConfig)
        and not cls.__name__.endswith("PreTrainedModel")
    ]
    return sorted(models, key=lambda cls: next(i for i, part in enumerate(order) if part in cls.__name__))
