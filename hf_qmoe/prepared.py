"""What is known of a module from its last call in inference, and whether it still holds.

Kernels are given addresses. Tensors at the same addresses, of the same shapes, need not be checked and described
again. For one token, where other work has had the caches, that would take a third of what the kernel takes: Python's
objects and code come from memory. So what is asked here is asked in few calls.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor

from hf_qmoe.ops.fused import PreparedExperts
from hf_qmoe.ops.native_product import DescribedExperts


try:
    # Asks the classes, dtypes, shapes, strides and dispatch keys of many tensors at once.
    from torch._C._dynamo.guards import TensorGuards
except ImportError:  # not a public name; without it nothing is found again, and every call takes the long way
    TensorGuards = None  # type: ignore[misc, assignment]


Storages = list[torch.UntypedStorage]
#: What a module was like, see `hf_qmoe.inference`.
State = tuple[Any, ...]


class Found:
    """Tensors of a module, and inputs that came with them, as they were found once.

    It keeps no tensor alive.

    Args:
        named: of the module, by name.
        inputs: of its forward.

    Attributes:
        addresses: of the module's tensors.
    """

    __slots__ = ("_guards", "_names", "addresses")

    def __init__(self, named: Mapping[str, Tensor], inputs: Sequence[Tensor] = ()) -> None:
        tensors = *inputs, *named.values()
        self._names = tuple(named)
        self.addresses = [tensor.data_ptr() for tensor in named.values()]
        sizes: list[Any] = [list(tensor.shape) for tensor in tensors]
        strides: list[Any] = [list(tensor.stride()) for tensor in tensors]
        self._guards: Any = None
        if TensorGuards is not None:
            self._guards = TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)

    def again(self, module: Any, *inputs: Tensor) -> Storages | None:
        """The memory of the module's tensors, to be kept while it is read: another thread may take it from the module.

        `None` if they are not there any more; if they or the inputs differ in class, dtype, shape, strides or in
        whether they require a gradient; if operators would treat them differently (`torch.autocast`, transforms of
        functions).
        """
        parameters, others = module._parameters, module.__dict__  # FSDP1 puts plain tensors there
        tensors: list[Any] = []
        for name in self._names:
            tensor = others.get(name)
            tensors.append(parameters.get(name) if tensor is None else tensor)
        if self._guards is None or not self._guards.check(*inputs, *tensors):
            return None
        memory = []
        for tensor, address in zip(tensors, self.addresses, strict=True):
            memory.append(tensor.untyped_storage())
            if tensor.data_ptr() != address:  # of freed storage it is zero, or the offset into it
                return None
        return memory


class Call(NamedTuple):
    """A call that may be repeated.

    Attributes:
        found: what it read.
        state: of the module.
        layer: described for such inputs.
    """

    found: Found
    state: State
    layer: DescribedExperts


class Known:
    """What is known of a module.

    Args:
        module: is not kept alive, nor are its tensors.
        kind: of its gate and of its weights.
        found: its packed weights.
        weights: these, described.

    Attributes:
        call: the last one, if it may be repeated.
    """

    __slots__ = ("_module", "call", "found", "kind", "weights")

    def __init__(self, module: object, kind: tuple[str, str], found: Found, weights: PreparedExperts) -> None:
        number, forget = id(module), _KNOWN.pop  # held here: names of this module are gone when Python exits
        self._module = ref(module, lambda _: forget(number, None))
        self.kind, self.found, self.weights = kind, found, weights
        self.call: Call | None = None
        _KNOWN[number] = self


# By the module's `id`: it need not have a hash.
_KNOWN: dict[int, Known] = {}


def known_of(module: object) -> Known | None:
    """What is known of `module`, if anything."""
    return _KNOWN.get(id(module))  # until the module is gone, and no other has its `id`
