"""A model that PEFT has begun to change, and could not finish with, is what it was."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor, nn


@contextmanager
def unchanged_on_error(model: nn.Module, values: Iterable[Tensor] = ()) -> Iterator[None]:
    """If what it surrounds raises, puts back which module is where, what is trainable, and `values`.

    Args:
        model: whose modules are replaced and wrapped; wrappers hold the modules they replace.
        values: parameters that may be overwritten. They are copied.
    """
    structure = [(module, dict(module._modules)) for module in model.modules()]
    flags = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    kept = [(value, value.detach().clone()) for value in values]
    had_config = "peft_config" in model.__dict__
    try:
        yield
    except Exception:
        for module, children in structure:
            module._modules.clear()
            module._modules.update(children)
        for parameter, requires_grad in flags:
            parameter.requires_grad_(requires_grad)
        for value, before in kept:
            value.data.copy_(before)
        if not had_config:
            model.__dict__.pop("peft_config", None)
        raise
