"""Showing PEFT the names that packed parameters have in the float model.

PEFT decides by names which modules and parameters to adapt. Scales beside packed bytes, and the modules that torch
puts between a module and a parametrized parameter, are none of its business: with them it would match something else
than on the float model, or nothing.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from hf_qmoe.experts import ExpertsNbit
from hf_qmoe.lora.packed import packed_modules


@contextmanager
def float_names(model: nn.Module) -> Iterator[None]:
    """Within it, ``named_modules`` and ``named_parameters`` of `model` give the names of the float model."""
    renamed: dict[str, str | None] = {}
    hidden: set[str] = set()
    for path, module, names in packed_modules(model):
        prefix = f"{path}." if path else ""
        if isinstance(module, ExpertsNbit):
            renamed.update({prefix + n: None for n in module.stored_names if n not in names})
            continue
        for name in names:
            chain = f"{prefix}parametrizations.{name}"
            hidden.add(f"{prefix}parametrizations")
            renamed[f"{chain}.original"] = prefix + name
    kind: Any = type(model)

    def named_parameters(*args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        for name, parameter in kind.named_parameters(model, *args, **kwargs):
            new = renamed.get(name, name)
            if new is not None and (name in renamed or not _is_below(name, hidden)):
                yield new, parameter

    def named_modules(*args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        return (item for item in kind.named_modules(model, *args, **kwargs) if not _is_below(item[0], hidden))

    overridden = {"named_parameters": named_parameters, "named_modules": named_modules}
    before = {name: model.__dict__[name] for name in overridden if name in model.__dict__}
    model.__dict__.update(overridden)
    try:
        yield
    finally:
        for name in overridden:
            del model.__dict__[name]
        model.__dict__.update(before)


def _is_below(name: str, hidden: set[str]) -> bool:
    if ".parametrizations" not in f".{name}":
        return False
    return any(name == path or name.startswith(f"{path}.") for path in hidden)
