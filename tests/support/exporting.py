"""Packed checkpoints to export, and what bitsandbytes makes of the result."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from bitsandbytes.functional import QuantState, dequantize_4bit
from torch import Tensor
from transformers import PreTrainedModel

from hf_qmoe import QMoEConfig
from hf_qmoe.layout import stack_names
from tests.support.checkpoints import load, reference_unpack, tensors_on_disk
from tests.support.merging import save_base
from tests.support.models import experts_of


FAMILIES = ("qwen3_moe", "mixtral", "olmoe", "deepseek_v3")
#: Names of one expert's gate, up and down projections, by family.
_PROJECTIONS = {"mixtral": ("w1", "w3", "w2")}


class Checkpoints(NamedTuple):
    """A float checkpoint, and the same packed."""

    float: Path
    packed: Path


def width(family: str, intermediate: int) -> dict[str, int]:
    """The config field for an intermediate size of experts."""
    return {"moe_intermediate_size" if family == "qwen3_moe" else "intermediate_size": intermediate}


def save_packed(path: Path, family: str, config: QMoEConfig | None = None, **changes: Any) -> Checkpoints:
    """A tiny model in bf16, saved as it is and packed."""
    if family != "deepseek_v3":
        changes = width(family, 128) | changes
    base = save_base(path / "float", family, torch.bfloat16, **changes)
    load(base, config or QMoEConfig(), dtype=torch.bfloat16).save_pretrained(path / "packed")
    return Checkpoints(base, path / "packed")


def weights(path: Path) -> dict[str, Tensor]:
    """Tensors of an exported checkpoint that are no statistics."""
    return {name: tensor for name, tensor in tensors_on_disk(path).items() if ".weight." not in name}


def stored_state(tensors: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    """Statistics stored with the weight `name`, by the names that bitsandbytes gives them."""
    start = f"{name}."
    return {key.removeprefix(start): tensor for key, tensor in tensors.items() if key.startswith(start)}


def read_by_bitsandbytes(tensors: dict[str, Tensor], name: str, dtype: torch.dtype = torch.float32) -> Tensor:
    """What bitsandbytes reads as the weight `name`."""
    state = QuantState.from_dict(dict(stored_state(tensors, name)), torch.device("cpu"))
    rows, columns = state.shape
    packed = tensors[name].view(torch.uint8)
    if columns % state.blocksize:  # its AVX512 kernel takes wrong scales then (0.50.2)
        assert not state.nested
        return reference_unpack(packed.view(rows, -1), state.absmax, state.quant_type).to(dtype)
    state.dtype = dtype
    return dequantize_4bit(packed, state)


def expert_rows(model: PreTrainedModel, dtype: torch.dtype = torch.float32) -> Iterator[tuple[str, Tensor]]:
    """Original name and dequantized weight of each projection of each expert of a loaded packed model."""
    family = model.config.model_type
    gate, up, down = _PROJECTIONS.get(family, ("gate_proj", "up_proj", "down_proj"))
    for path, module in experts_of(model).items():
        original = path.replace(".mlp.", ".block_sparse_moe.") if family == "mixtral" else path
        for name in stack_names(module.has_gate):
            for expert in range(module.num_experts):
                values = module.stack(name).dequantize_expert(expert, dtype)
                names = (down,) if name == "down_proj" else (gate, up)
                for projection, rows in zip(names, values.chunk(len(names)), strict=True):
                    yield f"{original}.{expert}.{projection}.weight", rows
