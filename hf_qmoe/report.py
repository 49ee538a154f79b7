"""`report`: what of a model is stored how, what was left alone, and what to know about each."""

from dataclasses import dataclass
from typing import Any

import torch
from bitsandbytes.nn import Linear4bit
from torch import nn

from hf_qmoe.experts import ExpertsNbit
from hf_qmoe.layout import float_stack_shapes, follows_experts_interface
from hf_qmoe.memory import quant_state_tensors
from hf_qmoe.packed_module import SUFFIXES
from hf_qmoe.parametrize import packed_parametrizations


_PARAMETRIZED = (
    "own forward; backward keeps packed bytes, except where forward computes with the weight before a product "
    "(arithmetic, cat, masks) or is compiled: that result stays until backward"
)


@dataclass(frozen=True)
class Part:
    """One stored weight, or the float weights of one module.

    Attributes:
        name: full name of the parameter or module.
        form: ``ExpertsNbit``, ``parametrized``, ``Linear4bit`` or ``float``.
        quant_type: storage format, or the dtype of float weights.
        parameters: logical weights.
        nbytes: bytes, scales included.
        note: what a user should know, or empty.
    """

    name: str
    form: str
    quant_type: str
    parameters: int
    nbytes: int
    note: str = ""


@dataclass(frozen=True)
class Report:
    """Parts of a model, in its order; prints as a table with a line per kind of part."""

    parts: list[Part]

    def __str__(self) -> str:
        kinds: dict[tuple[str, str, str], list[Part]] = {}
        for part in self.parts:
            kinds.setdefault((part.form, part.quant_type, part.note), []).append(part)
        lines = [f"{'form':<14}{'format':<16}{'weights':>16}{'bytes':>16}  first of"]
        for (form, quant_type, note), parts in kinds.items():
            weights, nbytes = sum(p.parameters for p in parts), sum(p.nbytes for p in parts)
            lines.append(f"{form:<14}{quant_type:<16}{weights:>16,}{nbytes:>16,}  {len(parts)}: {parts[0].name}")
            if note:
                lines.append(f"  {note}")
        return "\n".join(lines)


def report(model: nn.Module) -> Report:
    """Says of each weight of `model` how it is stored, and of experts in full precision that they are.

    Args:
        model: loaded with `QMoEConfig`, quantized in memory, or any other.
    """
    parts = []
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        own = {id(p): p for p in module.parameters(recurse=False)}
        if isinstance(module, ExpertsNbit):
            for name, stack in module.stacks().items():
                parts.append(Part(prefix + name, "ExpertsNbit", stack.quant_type, stack.numel, stack.nbytes))
                for suffix in SUFFIXES.values():
                    own.pop(id(getattr(module, name + suffix, None)), None)
        for name, parametrization, packed in packed_parametrizations(module):
            stack = parametrization.stack(packed)
            parts.append(
                Part(prefix + name, "parametrized", stack.quant_type, stack.numel, stack.nbytes, _PARAMETRIZED)
            )
        if isinstance(module, Linear4bit):
            own.pop(id(module.weight), None)
            nbytes = module.weight.nbytes + sum(t.nbytes for t in quant_state_tensors(module))
            weight: Any = module.weight
            weights = module.in_features * module.out_features
            parts.append(Part(f"{prefix}weight", "Linear4bit", weight.quant_type, weights, nbytes))
        # What is below a parametrization is counted with its module.
        if own and ".parametrizations." not in f".{path}.":
            parts += _float_parts(path, module, list(own.values()))
    return Report(parts)


def _float_parts(path: str, module: nn.Module, parameters: list[nn.Parameter]) -> list[Part]:
    left_out = follows_experts_interface(module) and not isinstance(module, ExpertsNbit) and float_stack_shapes(module)
    note = "routed experts in full precision" if left_out else ""
    by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
    for parameter in parameters:
        by_dtype.setdefault(parameter.dtype, []).append(parameter)
    return [
        Part(path, "float", str(dtype).removeprefix("torch."), sum(p.numel() for p in group), _nbytes(group), note)
        for dtype, group in by_dtype.items()
    ]


def _nbytes(parameters: list[nn.Parameter]) -> int:
    return sum(p.nbytes for p in parameters)
