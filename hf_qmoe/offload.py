"""Giving weights back that accelerate has loaded for a forward that did not end.

accelerate's offloading replaces ``module.forward`` by a function that loads the weights, calls the original and
unloads them. Non-reentrant checkpointing stops its recomputation early by an exception from inside a forward, so the
unloading is skipped, once per region and step, and the model creeps into memory. Packed experts call `unload` when
their forward is left by an exception. For other modules there are hooks registered with ``always_call=True``, which
run then; a plain one would not. Experts have none, as a call of a module with hooks takes a longer way through torch.
"""

from typing import Any

from torch import nn


def unload_when_interrupted(module: nn.Module) -> None:
    """Makes accelerate's offloading of `module` hold when its forward raises. Doing it again changes nothing."""
    if _unload not in module._forward_hooks.values():
        module.register_forward_hook(_unload, always_call=True)


def stop_unloading(module: nn.Module) -> None:
    """Undoes `unload_when_interrupted`."""
    for key, hook in list(module._forward_hooks.items()):
        if hook is _unload:
            del module._forward_hooks[key]
            module._forward_hooks_always_called.pop(key, None)


def _unload(module: nn.Module, args: Any, output: Any) -> None:
    unload(module)


def unload(module: nn.Module) -> None:
    """Does what accelerate does after the forward of an offloaded module, if that has not been done."""
    hook = getattr(module, "_hf_hook", None)
    if hook is None or not any(_offloads(h) for h in getattr(hook, "hooks", (hook,))):
        return
    still_loaded = not all(parameter.is_meta for parameter in module.parameters(recurse=False))
    if still_loaded:  # forward was left by an exception
        hook.post_forward(module, None)


def _offloads(hook: Any) -> bool:
    return bool(getattr(hook, "offload", False))
