"""What packed experts are compared with: bitsandbytes' own values in the float model, and PEFT as it is."""

import copy
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import bitsandbytes.functional as bnb_functional
import torch
from bitsandbytes.nn import Linear4bit
from torch import Tensor, nn
from torch.nn.utils import parametrize
from transformers import PreTrainedModel

from hf_qmoe import ExpertsNbit
from hf_qmoe.lora import hooks


BLOCKSIZE = 64


@contextmanager
def stock_peft() -> Iterator[None]:
    """PEFT without the package's hooks."""
    with ExitStack() as stack:
        for cls, wrapped in hooks.HOOKED:
            for name in wrapped:
                method = vars(cls)[name]
                original = getattr(method, "__func__", method)._qmoe_original
                kind = type(method) if isinstance(method, staticmethod | classmethod) else None
                stack.enter_context(patch.object(cls, name, kind(original) if kind else original))
        yield


def dequantized(weights: Tensor, transposed: bool) -> Tensor:
    """A float matrix, or a stack of them, as nf4 keeps it, by bitsandbytes' own functions, one after another.

    Each goes in as one row: where blocks run on from row to row, the AVX512 code of bitsandbytes 0.50.2 unpacks with
    wrong scales.
    """
    kept = []
    for weight in weights.detach().view(-1, *weights.shape[-2:]):
        matrix = (weight.t() if transposed else weight).contiguous()
        assert matrix.numel() % BLOCKSIZE == 0
        packed, state = bnb_functional.quantize_4bit(matrix.view(1, -1), blocksize=BLOCKSIZE, quant_type="nf4")
        matrix = bnb_functional.dequantize_4bit(packed, state).view(matrix.shape)
        kept.append(matrix.t() if transposed else matrix)
    return torch.stack(kept).view(weights.shape)


def follows_interface(module: nn.Module) -> bool:
    """Whether a module has the decorator's flags."""
    return hasattr(module, "has_gate") and hasattr(module, "is_transposed")


def expected_names(model: nn.Module, name: str) -> list[str]:
    """Full names of the weights that must be packed: of decorated experts, and of the class called `name`."""
    names = []
    for path, module in model.named_modules():
        if not follows_interface(module) and type(module).__name__ != name:
            continue
        names += [f"{path}.{n}" for n, p in module.named_parameters() if p.ndim >= 2 and not n.endswith("bias")]
    return list(dict.fromkeys(names))


def holds_class(model: nn.Module, name: str, cls: str) -> bool:
    """Whether the weight called `name` lies in a module of the class called `cls`."""
    parts = name.split(".")
    return any(type(model.get_submodule(".".join(parts[:i]))).__name__ == cls for i in range(len(parts)))


def packed_names(model: nn.Module) -> dict[str, str]:
    """Form of every packed weight, by the full name that it has in the float model."""
    names = {}
    for path, module in model.named_modules():
        if isinstance(module, ExpertsNbit):
            names |= {f"{path}.{name}": "ExpertsNbit" for name in module.stack_names}
        elif isinstance(module, Linear4bit):
            names[f"{path}.weight"] = "Linear4bit"
        elif parametrize.is_parametrized(module):
            names |= {f"{path}.{name}": "parametrized" for name in module.parametrizations}
    return names


def _kept(float_module: nn.Module, packed: PreTrainedModel, name: str) -> Tensor:
    path, _, leaf = name.rpartition(".")
    weight, now = getattr(float_module, leaf), getattr(packed.get_submodule(path), leaf)
    if follows_interface(float_module) or now.dtype == torch.uint8:
        return dequantized(weight, getattr(float_module, "is_transposed", False))
    # Nothing says how other modules mean their axes: blocks may run along either.
    candidates = [dequantized(weight, transposed) for transposed in (False, weight.ndim == 3)]
    fitting = [candidate for candidate in candidates if torch.equal(candidate, now)]
    assert fitting, f"{name} is not what nf4 keeps of the weights"
    return fitting[0]


def reference(model: PreTrainedModel, packed: PreTrainedModel) -> PreTrainedModel:
    """The float model with what nf4 keeps of every weight that is packed in `packed`."""
    twin = copy.deepcopy(model)
    for name in packed_names(packed):
        module = twin.get_submodule(name.rpartition(".")[0])
        getattr(module, name.rpartition(".")[2]).data = _kept(module, packed, name)
    return twin
