"""Which tensors an exported checkpoint has, what they are made of, and what its config says."""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_qmoe.config import QUANT_METHOD, QMoEConfig
from hf_qmoe.export import bitsandbytes
from hf_qmoe.export.config import quantization_config, with_older_names
from hf_qmoe.export.names import OriginalNames, Piece
from hf_qmoe.export.stacks import METADATA, StoredStack, stored_stacks
from hf_qmoe.export.writer import Entry, Span, copied, span
from hf_qmoe.folders import CheckpointError, StoredTensor, read_shards, tensors_by_name
from hf_qmoe.layout import follows_experts_interface, stack_names
from hf_qmoe.meta_model import config_fields, in_short, meta_model
from hf_qmoe.ops.formats import get_format


_FLOATS = ("BF16", "F16", "F32")


class Plan:
    """What to write for a checkpoint.

    Args:
        source: folder of a packed checkpoint.

    Attributes:
        groups: the tensors of each weight, by its name.
        config: content of ``config.json``.
        expert_weights: how many matrices of single experts there are.
        notes: what a reader of the result may trip over.

    Raises:
        CheckpointError: `source` is no packed checkpoint, is damaged, or cannot be written in this layout.
    """

    def __init__(self, source: Path) -> None:
        fields = config_fields(source)
        self._quantization = _quantization_of(fields, source)
        self._model = meta_model(source)
        self._dtype = _dtype_of(self._model)
        stored = tensors_by_name(read_shards(source))
        self._stacks = {stack.key: stack for stack in stored_stacks(stored)}
        _refuse_8bit(self._stacks.values())
        self._weights = _by_weight(stored, self._stacks.values())
        self._linears = {k: bitsandbytes.StoredLinear(k, t) for k, t in self._weights.items() if _is_packed(k, t)}
        self._names = OriginalNames(self._model, [*self._weights, *self._stacks])
        self._refuse_missing()
        self._pieces = {key: self._names.pieces(key, *stack.shape[:2]) for key, stack in self._stacks.items()}
        self._quant_type = _one_quant_type(self._stacks.values(), self._linears.values())
        self.notes: list[str] = []
        self._nested = self._can_stay_nested()
        self.groups: dict[str, Sequence[Entry]] = {}
        self.expert_weights = 0
        self._float_experts: set[str] = set()
        self._add_packed()
        self._add_others()
        self.config = self._config(fields)
        self._note_limits()

    def _add(self, name: str, entries: Sequence[Entry]) -> None:
        if name in self.groups:
            raise CheckpointError(f"two tensors of the checkpoint would both become {name}")
        self.groups[name] = entries

    def _refuse_missing(self) -> None:
        found = {self._names.parameter(key) for key in (*self._weights, *self._stacks)}
        for path, module in self._model.named_modules():
            if follows_experts_interface(module):
                for name in stack_names(bool(module.has_gate)):
                    if f"{path}.{name}" not in found:
                        raise CheckpointError(f"the checkpoint lacks {path}.{name}; it is incomplete")

    # -- experts ----------------------------------------------------------------------------------------------------

    def _can_stay_nested(self) -> bool:
        """Whether all scales are double-quantized and can stay so where stacks are cut."""
        of_4bit = [stack for stack in self._stacks.values() if stack.is_4bit]
        are_nested = [stack.offsets is not None for stack in of_4bit] + [li.is_nested for li in self._linears.values()]
        if not any(are_nested):
            return False
        if not all(are_nested):
            reason = "not all scales of the checkpoint are, and transformers v4 wants all or none to be"
        elif not all(stack.can_stay_nested(piece) for stack in of_4bit for piece in self._pieces[stack.key]):
            reason = "where gate and up are split, 256 scales that share a second-level scale would be too"
        else:
            return True
        self.notes.append(f"double-quantized scales are written as the fp32 values they stand for: {reason}")
        return False

    def _add_packed(self) -> None:
        storage = self._quantization.bnb_4bit_quant_storage
        for key, stack in self._stacks.items():
            for piece in self._pieces[key]:
                if stack.is_4bit:
                    self._add(piece.name, bitsandbytes.entries(stack, piece, self._nested, self._dtype, storage))
                    self.expert_weights += 1
                else:
                    dtype = "BF16" if get_format(stack.quant_type).passthrough == torch.bfloat16 else "F16"
                    self._add_float(piece, dtype, stack.shape[2], stack.packed(piece))

    def _add_float(self, piece: Piece, dtype: str, columns: int, data: Span) -> None:
        shape = (piece.stop - piece.start, columns)
        self._add(piece.name, [Entry(piece.name, dtype, shape, data.stop - data.start, data)])
        self.expert_weights += 1
        self._float_experts.add(_module(piece.name))

    # -- everything else ----------------------------------------------------------------------------------------------

    def _add_others(self) -> None:
        for key, tensors in self._weights.items():
            if key.removesuffix("_bias") in self._stacks:
                raise CheckpointError(f"{key}: experts with biases have no per-expert layout")
            original, tensor = self._names.original(key), tensors.get(key)
            if original is not None and key in self._linears:
                self._add(original, self._linears[key].entries(original, self._nested))
            elif original is not None:
                self._add(original, [copied(t, original + n.removeprefix(key)) for n, t in tensors.items()])
            elif tensor is not None and tensor.dtype in _FLOATS and len(tensor.shape) == 3:
                self._add_float_stack(tensor)
            elif tensor is not None and tensor.dtype == "U8" and len(tensor.shape) == 3:
                path = key.rpartition(".")[0]
                raise CheckpointError(f"{key} is packed, but the checkpoint lacks {path}{METADATA}; it is incomplete")
            else:
                raise CheckpointError(
                    f"{key} is a part of a larger tensor, or made of several, in the original checkpoints of "
                    f"{type(self._model).__name__}; it cannot be put back without requantizing it. Leave it out when "
                    "quantizing, with `modules_to_not_convert`"
                )

    def _add_float_stack(self, tensor: StoredTensor) -> None:
        """A stack that was left unquantized beside packed ones, ``[E, N, K]``."""
        experts, rows, columns = tensor.shape
        for piece in self._names.pieces(tensor.name, experts, rows):
            first = piece.expert * rows * columns
            data = span(tensor, first + piece.start * columns, first + piece.stop * columns)
            self._add_float(piece, tensor.dtype, columns, data)

    # -- the config ---------------------------------------------------------------------------------------------------

    def _config(self, fields: dict[str, Any]) -> dict[str, Any]:
        quant_type = self._quant_type or self._quantization.bnb_4bit_quant_type
        skipped = self._float_modules()
        fields = with_older_names(fields, self._model.config)
        fields["quantization_config"] = quantization_config(
            self._quantization, quant_type, self._nested, self._dtype, skipped
        )
        return fields

    def _float_modules(self) -> set[str]:
        """Original names of what holds a float matrix and is a linear, or was one in transformers v4 (routers)."""

        def weights(kind: type[nn.Module]) -> set[str | None]:
            modules = self._model.named_modules()
            return {self._names.original(f"{name}.weight") for name, module in modules if isinstance(module, kind)}

        found = {
            name
            for name, entries in self.groups.items()
            if len(entries) == 1 and len(entries[0].shape) == 2 and name.endswith(".weight")
        }
        # Linears that are tied to an embedding have no tensor of their own.
        found |= {name for name in weights(nn.Linear) if name and name not in self.groups}
        return {_module(name) for name in found - weights(nn.Embedding)}

    def _note_limits(self) -> None:
        if any(stack.quant_type == "fp4" for stack in self._stacks.values()):
            self.notes.append("experts are fp4, which vLLM reads as nf4")
        if self._float_experts:
            listed = ", ".join(sorted(self._float_experts))
            self.notes.append(f"these experts are float, which vLLM does not read beside quantized ones: {listed}")


def _by_weight(
    stored: Mapping[str, StoredTensor], stacks: Iterable[StoredStack]
) -> dict[str, dict[str, StoredTensor]]:
    """What is not part of a packed stack: tensors by name, under the weight that they belong to."""
    of_stacks = {tensor.name for stack in stacks for tensor in stack.tensors.values()}
    weights: dict[str, dict[str, StoredTensor]] = {}
    for name, tensor in stored.items():
        if name not in of_stacks and not name.endswith(METADATA):
            weights.setdefault(bitsandbytes.owner(name), {})[name] = tensor
    return weights


def _is_packed(key: str, tensors: Mapping[str, StoredTensor]) -> bool:
    return len(tensors) > 1 or (key.endswith(".weight") and key in tensors and tensors[key].dtype == "U8")


def _module(name: str) -> str:
    """The module of a weight; of one expert's, that of all experts beside it."""
    module = name.removesuffix(".weight")
    match = re.fullmatch(r"(.*experts)\.\d+\.[^.]+", module)
    return match[1] if match else module


def _quantization_of(fields: Mapping[str, Any], source: Path) -> QMoEConfig:
    stored = fields.get("quantization_config")
    if not isinstance(stored, dict) or stored.get("quant_method") != QUANT_METHOD:
        found = f"its quant_method is {stored.get('quant_method')!r}" if isinstance(stored, dict) else "it is float"
        raise CheckpointError(
            f"{source} was not saved from a model loaded with a QMoEConfig ({found}), so it holds no packed experts"
        )
    try:
        return QMoEConfig(**stored)
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"the quantization_config of {source} cannot be used: {in_short(error)}") from error


def _dtype_of(model: PreTrainedModel) -> torch.dtype:
    """The dtype that the config names, of the model or of its text part."""
    for config in (model.config, model.config.get_text_config()):
        dtype = getattr(config, "dtype", None)
        if isinstance(dtype, torch.dtype):
            return dtype
    return torch.float32


def _refuse_8bit(stacks: Iterable[StoredStack]) -> None:
    """Raises where bitsandbytes has no 4-bit weight to put packed experts in."""
    formats = [(stack.key, stack.quant_type) for stack in stacks if get_format(stack.quant_type).bits == 8]
    if formats:
        names = ", ".join(f"{key} ({quant_type})" for key, quant_type in formats[:4])
        raise CheckpointError(
            f"{len(formats)} stacks of experts are stored in 8 bit, which bitsandbytes' 4-bit layout cannot hold: "
            f"{names}{', ...' if len(formats) > 4 else ''}. Quantize the float model to nf4 or fp4 instead"
        )


def _one_quant_type(stacks: Iterable[StoredStack], linears: Iterable[bitsandbytes.StoredLinear]) -> str | None:
    """The 4-bit format of all weights; `None` if there are none.

    Raises:
        CheckpointError: there are both.
    """
    examples = {stack.quant_type: stack.key for stack in stacks if stack.is_4bit}
    examples |= {linear.quant_type: linear.key for linear in linears if linear.quant_type not in examples}
    if len(examples) > 1:
        found = " and ".join(f"{quant_type} ({key})" for quant_type, key in sorted(examples.items()))
        raise CheckpointError(
            f"the checkpoint has weights in {found}, but transformers v4 reads one 4-bit format for a whole model. "
            "Quantize the float model with experts_quant_type and bnb_4bit_quant_type alike"
        )
    return next(iter(examples), None)
