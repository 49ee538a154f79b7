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
    """Within it, ``named_modules`` and ``named_parameters`` of `model` give the names of the float model.

    What is hidden is told by identity: PEFT changes paths while it works.
    """
    hidden: set[int] = set()
    renamed: dict[int, str | None] = {}
    for _, module, names in packed_modules(model):
        if isinstance(module, ExpertsNbit):
            tensors = {name: getattr(module, name) for name in module.stored_names}
            renamed.update({id(tensor): None for name, tensor in tensors.items() if name not in names})
            continue
        chains: Any = module.parametrizations
        if len(chains) == len(names):
            hidden.add(id(chains))
        for name in names:
            hidden.add(id(chains[name]))
            renamed.update({id(parameter): None for parameter in chains[name].parameters()})
            renamed[id(chains[name].original)] = name
    kind: Any = type(model)

    def named_parameters(*args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        # torch walks the modules by ``named_modules`` of the instance, which hides those that hold packed parameters
        ours = model.__dict__.pop("named_modules", None)
        try:
            parameters = list(kind.named_parameters(model, *args, **kwargs))
        finally:
            if ours is not None:
                model.__dict__["named_modules"] = ours
        for path, parameter in parameters:
            name = renamed.get(id(parameter), "")
            if name is not None:
                yield path.removesuffix(f"parametrizations.{name}.original") + name if name else path, parameter

    def named_modules(*args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        skipped = None  # what is below a module follows it
        for path, module in kind.named_modules(model, *args, **kwargs):
            if skipped is not None and path.startswith(skipped):
                continue
            if id(module) in hidden:
                skipped = f"{path}."
                continue
            yield path, module

    overridden = {"named_parameters": named_parameters, "named_modules": named_modules}
    before = {name: model.__dict__[name] for name in overridden if name in model.__dict__}
    model.__dict__.update(overridden)
    try:
        yield
    finally:
        for name in overridden:
            del model.__dict__[name]
        model.__dict__.update(before)
