"""Counting what a packed model holds: logical parameters and bytes.

transformers counts ``numel()`` of each parameter, which for packed bytes is neither; bitsandbytes' linears keep their
scales outside of parameters and buffers altogether.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from bitsandbytes.nn import Linear4bit
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_qmoe.experts import ExpertsNbit
from hf_qmoe.packed_module import SUFFIXES
from hf_qmoe.parametrize import packed_parametrizations
from hf_qmoe.wrapping import wrap


def num_parameters(model: nn.Module, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
    """Logical parameters: a packed stack counts ``E * N * K``, its scales and metadata nothing.

    The arguments are those of ``PreTrainedModel.num_parameters``.
    """
    skipped: set[int] = set()
    sizes: dict[int, int] = {}
    for module in model.modules():
        if isinstance(module, ExpertsNbit):
            for name, stack in module.stacks().items():
                sizes[id(getattr(module, name))] = stack.numel
                skipped.update(id(getattr(module, name + SUFFIXES[f])) for f in stack.tensors() if f != "packed")
        for _, parametrization, packed in packed_parametrizations(module):
            sizes[id(packed)] = parametrization.stack(packed).numel
            skipped.update(map(id, parametrization.parameters()))
        if isinstance(module, Linear4bit):
            sizes[id(module.weight)] = module.in_features * module.out_features
        elif isinstance(module, nn.Embedding) and exclude_embeddings:
            skipped.add(id(module.weight))
    total = 0
    for parameter in model.parameters():
        if id(parameter) in skipped or (only_trainable and not parameter.requires_grad):
            continue
        total += sizes.get(id(parameter), parameter.numel())
    return total


def quant_state_tensors(model: nn.Module) -> Iterator[Tensor]:
    """Scales and codebooks of bitsandbytes' linears, which are neither parameters nor buffers."""
    for module in model.modules():
        if not isinstance(module, Linear4bit):
            continue
        state = getattr(module.weight, "quant_state", None) or module.quant_state
        for level in (state, getattr(state, "state2", None)):
            candidates = (getattr(level, name, None) for name in ("absmax", "code", "offset"))
            yield from (value for value in candidates if isinstance(value, Tensor))


def storage_bytes(model: nn.Module, return_buffers: bool = True) -> int:
    """Bytes of all tensors that `model` holds, each counted once: parameters, scales and (optionally) buffers.

    The argument is that of ``PreTrainedModel.get_memory_footprint``.
    """
    tensors: list[Tensor] = [*model.parameters(), *quant_state_tensors(model)]
    if return_buffers:
        tensors += model.buffers()
    return sum(tensor.nbytes for tensor in {id(t): t for t in tensors}.values())


#: Attribute of models whose methods count packed weights.
_COUNTED = "_qmoe_counted"

_METHODS: dict[str, Callable[..., int]] = {"num_parameters": num_parameters, "get_memory_footprint": storage_bytes}


def install_counters() -> None:
    """Lets ``num_parameters()`` and ``get_memory_footprint()`` of `PreTrainedModel` know packed models.

    The methods of the class are wrapped: an attribute of each model would have to refer to it, and keep it alive or
    fail where nothing else does.
    """
    for name, counter in _METHODS.items():
        wrap(PreTrainedModel, name, partial(_counting, counter))


def _counting(counter: Callable[..., int], original: Callable[..., int]) -> Callable[..., int]:
    def count(self: PreTrainedModel, *args: Any, **kwargs: Any) -> int:
        return (counter if _COUNTED in self.__dict__ else original)(self, *args, **kwargs)

    return count


def attach_counters(model: PreTrainedModel) -> None:
    """Makes ``num_parameters()`` and ``get_memory_footprint()`` of `model` and its parts true of packed weights."""
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            module.__dict__[_COUNTED] = True


def detach_counters(model: PreTrainedModel) -> None:
    """Undoes `attach_counters`."""
    for module in model.modules():
        module.__dict__.pop(_COUNTED, None)
