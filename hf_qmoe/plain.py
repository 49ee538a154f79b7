"""Whether a kernel may read tensors without torch's dispatcher, which a layer for one token would wait for."""

from collections.abc import Iterable
from functools import reduce
from operator import or_

import torch
from torch import Tensor


def _keys(*names: str) -> int:
    """Dispatch keys as torch packs them."""
    sets = (torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, name)) for name in names)
    return reduce(or_, sets).raw_repr()


# What the dispatcher looks at where there is nothing special, without and with `torch.inference_mode`.
_PLAIN_THREAD = (_keys("BackendSelect", "ADInplaceOrView"), _keys("BackendSelect"))
_PLAIN_TENSOR = (_keys("CPU", "ADInplaceOrView", "AutogradCPU", "AutocastCPU"), _keys("CPU", "AutocastCPU"))


def is_plain(tensors: Iterable[Tensor | None]) -> bool:
    """Whether no transform or tracer looks at operators, besides what `nobody_watches` asks, and `are_numbers`."""
    return torch._C._dispatch_tls_local_include_set().raw_repr() in _PLAIN_THREAD and are_numbers(tensors)


def nobody_watches() -> bool:
    """Whether no compiler, mode or profiler looks at the operators that are called."""
    return not (
        torch.compiler.is_dynamo_compiling()  # other compilers come with a mode
        or torch._C._len_torch_dispatch_stack()
        or torch._C._autograd._profiler_enabled()
    )


def are_numbers(tensors: Iterable[Tensor | None]) -> bool:
    """Whether each is what the CPU's memory holds: no subclass, no batch of vmap, no lazy negation, no fake."""
    for tensor in tensors:
        if tensor is not None and torch._C._dispatch_keys(tensor).raw_repr() not in _PLAIN_TENSOR:
            return False
    return True
