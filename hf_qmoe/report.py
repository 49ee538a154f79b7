"""`report`: what of a model is stored how, what was left alone, and what to know about each."""

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from decimal import Decimal
from typing import Any

import torch
from bitsandbytes.nn import Linear4bit
from torch import nn
from transformers import PreTrainedModel

from hf_qmoe.experts import ExpertsNbit
from hf_qmoe.layout import float_stack_shapes, follows_experts_interface
from hf_qmoe.memory import quant_state_tensors
from hf_qmoe.packed_module import SUFFIXES
from hf_qmoe.parametrize import packed_parametrizations
from hf_qmoe.selection import experts_modules


_PARAMETRIZED = (
    "own forward; backward keeps packed bytes, except where forward computes with the weight before a product "
    "(arithmetic, cat, masks) or is compiled: that result stays until backward"
)
_FULL_PRECISION = "routed experts in full precision"
_UNITS = {"b": 1} | {
    f"{prefix}{end}": base**power
    for end, base in (("b", 1000), ("ib", 1024))
    for power, prefix in enumerate("kmgt", start=1)
}


def size_text(nbytes: int) -> str:
    """`nbytes` for a reader, in bytes, KiB, MiB, GiB or TiB."""
    value = float(nbytes)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} bytes" if unit == "bytes" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def parse_size(text: str) -> int:
    """Bytes meant by `text`: a number of bytes, or one with a unit, ``24GiB`` (1024) or ``24GB`` (1000).

    Raises:
        ValueError: it is not such a size.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?b)?\s*", text, re.IGNORECASE)
    factor = _UNITS.get((match[2] or "b").lower()) if match else None
    if match is None or factor is None:
        raise ValueError(f"{text!r} is not a size; write bytes, or a unit as in 24GiB, 24GB or 8000MB")
    return int(Decimal(match[1]) * factor)


def text_table(rows: Sequence[Sequence[str]], align: str) -> list[str]:
    """Lines of a table, columns two blanks apart and as wide as they need.

    Args:
        rows: cells, those of the header first.
        align: ``<`` or ``>`` for each column.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    cells = [[f"{cell:{side}{width}}" for cell, side, width in zip(row, align, widths, strict=True)] for row in rows]
    return ["  ".join(row).rstrip() for row in cells]


class Serializable:
    """What can be printed and written as JSON."""

    def to_dict(self) -> dict[str, Any]:
        """JSON types; sizes in bytes."""
        raise NotImplementedError

    def to_json(self, indent: int | None = 2) -> str:
        """`to_dict` as JSON."""
        return json.dumps(self.to_dict(), indent=indent)


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
class Report(Serializable):
    """Parts of a model, in its order; prints as a table with a line per kind of part."""

    parts: list[Part]

    @property
    def parameters(self) -> int:
        """Logical weights of all parts."""
        return sum(part.parameters for part in self.parts)

    @property
    def nbytes(self) -> int:
        """Bytes of all parts, without buffers."""
        return sum(part.nbytes for part in self.parts)

    @property
    def experts_in_full_precision(self) -> float | None:
        """Share of the weights of routed experts that is not packed, 0 to 1; `None` if no experts were found."""
        floats = sum(part.parameters for part in self.parts if part.note == _FULL_PRECISION)
        packed = sum(part.parameters for part in self.parts if part.form in ("ExpertsNbit", "parametrized"))
        return floats / (floats + packed) if floats + packed else None

    def to_dict(self) -> dict[str, Any]:
        """The parts, and ``totals``: weights and bytes, the same by form, and the share of experts left unpacked."""
        forms: dict[str, dict[str, int]] = {}
        for part in self.parts:
            total = forms.setdefault(part.form, {"parameters": 0, "nbytes": 0})
            total["parameters"] += part.parameters
            total["nbytes"] += part.nbytes
        totals = {
            "parameters": self.parameters,
            "nbytes": self.nbytes,
            "forms": forms,
            "experts_in_full_precision": self.experts_in_full_precision,
        }
        return {"totals": totals, "parts": [asdict(part) for part in self.parts]}

    def __str__(self) -> str:
        kinds: dict[tuple[str, str, str], list[Part]] = {}
        for part in self.parts:
            kinds.setdefault((part.form, part.quant_type, part.note), []).append(part)
        rows = [["form", "format", "weights", "bytes", "first of"]]
        for (form, quant_type, _), parts in kinds.items():
            kind = Report(parts)
            rows.append(
                [form, quant_type, f"{kind.parameters:,}", f"{kind.nbytes:,}", f"{len(parts)}: {parts[0].name}"]
            )
        header, *lines = text_table(rows, "<<>><")
        for line, (_, _, note) in zip(lines, kinds, strict=True):
            header += f"\n{line}" + (f"\n  {note}" if note else "")
        return header


def report(model: nn.Module) -> Report:
    """Says of each weight of `model` how it is stored, and of experts in full precision that they are.

    A weight that several modules share (tied embeddings) is a part of the first.

    Args:
        model: loaded with `QMoEConfig`, quantized in memory, or any other.
    """
    parts = []
    experts = experts_modules(model, "auto") if isinstance(model, PreTrainedModel) else {}
    seen: set[int] = set()
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        own = {name: p for name, p in module.named_parameters(recurse=False) if id(p) not in seen}
        seen.update(map(id, own.values()))
        if isinstance(module, ExpertsNbit):
            for name, stack in module.stacks().items():
                parts.append(Part(prefix + name, "ExpertsNbit", stack.quant_type, stack.numel, stack.nbytes))
                for suffix in SUFFIXES.values():
                    own.pop(name + suffix, None)
        for name, parametrization, packed in packed_parametrizations(module):
            stack = parametrization.stack(packed)
            parts.append(
                Part(prefix + name, "parametrized", stack.quant_type, stack.numel, stack.nbytes, _PARAMETRIZED)
            )
        if isinstance(module, Linear4bit):
            own.pop("weight", None)
            nbytes = module.weight.nbytes + sum(t.nbytes for t in quant_state_tensors(module))
            weight: Any = module.weight
            weights = module.in_features * module.out_features
            parts.append(Part(f"{prefix}weight", "Linear4bit", weight.quant_type, weights, nbytes))
        # What is below a parametrization is counted with its module.
        if own and ".parametrizations." not in f".{path}.":
            # Of experts in the parametrized form, what is left here are biases.
            is_experts = path in experts or (follows_experts_interface(module) and not isinstance(module, ExpertsNbit))
            left_out = is_experts and not own.keys().isdisjoint(float_stack_shapes(module))
            parts += _float_parts(path, list(own.values()), _FULL_PRECISION if left_out else "")
    return Report(parts)


def _float_parts(path: str, parameters: list[nn.Parameter], note: str) -> list[Part]:
    by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
    for parameter in parameters:
        by_dtype.setdefault(parameter.dtype, []).append(parameter)
    return [
        Part(path, "float", str(dtype).removeprefix("torch."), sum(p.numel() for p in group), _nbytes(group), note)
        for dtype, group in by_dtype.items()
    ]


def _nbytes(parameters: list[nn.Parameter]) -> int:
    return sum(p.nbytes for p in parameters)
