"""Loading what was saved packed: tensors stay where the file is mapped, and nothing is done to them one by one."""

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from bitsandbytes.nn import Linear4bit
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from hf_qmoe import QMoEConfig, quantize_experts
from hf_qmoe.memory import quant_state_tensors
from hf_qmoe.stored_linears import linear_conversions, shortest_names
from tests.support.checkpoints import (
    assert_same_tensors,
    digest,
    load,
    logits,
    packed_modules,
    tensors_on_disk,
)
from tests.support.models import FAMILIES, save_tiny, tiny_model


on_linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

VARIANTS: dict[str, dict[str, object]] = {
    "nf4": {},
    "fp4": {"experts_quant_type": "fp4", "bnb_4bit_quant_type": "fp4"},
    "int8": {"experts_quant_type": "int8"},
    "fp8": {"experts_quant_type": "fp8"},
    "bf16": {"experts_quant_type": "bf16"},
    "fp16": {"experts_quant_type": "fp16"},
    "double_quant": {"experts_double_quant": True, "bnb_4bit_use_double_quant": True},
    "skipped_stack": {"modules_to_not_convert": ["layers.1.mlp.experts"]},
    "parametrized": {"experts_module": "parametrize"},
    "parametrized_double_quant": {"experts_module": "parametrize", "experts_double_quant": True},
}
SHARDS = pytest.mark.parametrize("save", [{}, {"max_shard_size": "20KB"}], ids=["one_file", "shards"])


def mappings(folder: Path) -> list[tuple[int, int]]:
    """Address ranges of this process at which files of `folder` are mapped, privately: nothing is written back."""
    found = []
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        bounds, flags, *_, path = (*line.split(maxsplit=5), "")[:6]
        if Path(path).is_relative_to(folder.resolve()):
            assert flags.endswith("p"), line
            start, end = (int(bound, 16) for bound in bounds.split("-"))
            found.append((start, end))
    return found


def outside(tensors: dict[str, Tensor], ranges: list[tuple[int, int]]) -> list[str]:
    """Names of those `tensors` that do not lie in one of the address `ranges`."""
    ends = {name: (t.data_ptr(), t.data_ptr() + t.nbytes) for name, t in tensors.items()}
    return [n for n, (first, last) in ends.items() if not any(s <= first and last <= e for s, e in ranges)]


def stored_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters, persistent buffers and the scales of linears: what a file has to hold."""
    persistent = model.state_dict().keys()
    tensors = {name: p.detach() for name, p in model.named_parameters()}
    tensors |= {name: b for name, b in model.named_buffers() if name in persistent}
    scales = (t for t in quant_state_tensors(model) if t.ndim)  # bitsandbytes keeps nested_offset in its JSON
    return tensors | {f"scale_{index}": scale for index, scale in enumerate(scales)}


def saved(checkpoint: Path, folder: Path, fields: dict[str, object], **save: object) -> PreTrainedModel:
    """The model of `checkpoint` packed as it is read, saved to `folder`."""
    model = load(checkpoint, QMoEConfig(**fields))
    model.save_pretrained(folder, **save)
    return model


# -- where the tensors lie --------------------------------------------------------------------------------------------


@on_linux
@SHARDS
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_tensors_lie_in_the_mapped_file(
    family: str, variant: str, save: dict[str, object], tiny_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """All of them, experts, linears and the rest, with the bits that were saved."""
    state = saved(tiny_checkpoints[family], tmp_path, VARIANTS[variant], **save).state_dict()
    model = load(tmp_path)
    moved = outside(stored_tensors(model), mappings(tmp_path))
    # Parametrizing a module writes the few bytes that describe it anew.
    assert [name for name in moved if not name.endswith("experts.quant_metadata")] == []
    assert "parametrized" in variant or not moved
    assert_same_tensors(model.state_dict(), state)


@on_linux
def test_another_dtype_copies_float_tensors_only(tiny_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """Packed bytes and scales stay in the file; what is cast to the dtype asked for cannot."""
    saved(tiny_checkpoints["qwen3_moe"], tmp_path, {})
    model = load(tmp_path, dtype=torch.float32)
    moved = outside(stored_tensors(model), mappings(tmp_path))
    assert sorted(moved) == sorted(name for name, p in model.named_parameters() if p.is_floating_point())


class NewTensors(TorchDispatchMode):
    """Counts operations outside the meta device, and finds the largest tensor that one of them made."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = 0
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in args if isinstance(t, Tensor) and not t.is_meta}
        results = [t for t in (out if isinstance(out, tuple | list) else (out,)) if isinstance(t, Tensor)]
        results = [t for t in results if not t.is_meta]
        self.operations += bool(results)
        fresh = [t.nbytes for t in results if t.untyped_storage().data_ptr() not in given]
        self.largest = max(self.largest, *fresh, 0)
        return out


def work_of_a_load(folder: Path) -> NewTensors:
    """What loading `folder` does, but for reading tensors, which other threads do."""
    with NewTensors() as work:
        load(folder)
    return work


@pytest.mark.parametrize("variant", ["nf4", "int8", "double_quant", "parametrized"])
def test_checks_allocate_nothing_to_speak_of(variant: str, tmp_path: Path) -> None:
    """Scales are looked at where they lie: no tensor is made that is as large as those of one expert."""
    save_tiny(tmp_path / "float", "qwen3_moe", moe_intermediate_size=1536)
    saved(tmp_path / "float", tmp_path / "packed", VARIANTS[variant])
    assert work_of_a_load(tmp_path / "packed").largest < 1536


@pytest.mark.parametrize("variant", ["nf4", "double_quant", "parametrized"])
def test_work_does_not_grow_with_experts(variant: str, tmp_path: Path) -> None:
    """Sixteen experts take as many operations as four."""
    operations = []
    for experts in (4, 16):
        save_tiny(tmp_path / f"float_{experts}", "qwen3_moe", num_experts=experts)
        saved(tmp_path / f"float_{experts}", tmp_path / f"packed_{experts}", VARIANTS[variant])
        operations.append(work_of_a_load(tmp_path / f"packed_{experts}").operations)
    assert operations[0] == operations[1]


# -- the converters of linears ----------------------------------------------------------------------------------------


def test_converters_do_not_grow_with_layers() -> None:
    """One for each kind of linear: transformers asks all of them about each tensor of a checkpoint."""
    counts = []
    for layers in (2, 6):
        model = quantize_experts(tiny_model("qwen3_moe", num_hidden_layers=layers))
        assert sum(isinstance(module, Linear4bit) for module in model.modules()) == 4 * layers
        counts.append(len(linear_conversions(model, None)))
    assert counts == [4, 4]


def test_shortest_names() -> None:
    """The shortest run of last components that no other name ends with; the whole name if there is none."""
    names = ["layers.0.attn.q", "layers.1.attn.q", "layers.0.mixer.out", "layers.1.attn.out", "head"]
    others = ["layers.0.attn.kq", "layers.2.mixer.out", "layers.1.mlp.head", "out"]
    assert shortest_names(names, others) == ["q", "0.mixer.out", "attn.out", "head"]
    assert shortest_names([], others) == []
    assert shortest_names(names, []) == ["q", "out", "head"]


LEFT_OUT = ["layers.1.self_attn.o_proj", "layers.0.self_attn.q_proj", "layers.0.self_attn.k_proj"]


def test_linears_left_out_in_some_layers(tiny_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """A float linear named like packed ones is cast to the dtype asked for, and they are not."""
    state = saved(tiny_checkpoints["qwen3_moe"], tmp_path, {"modules_to_not_convert": LEFT_OUT}).state_dict()
    model = load(tmp_path, dtype=torch.float32)
    for name in LEFT_OUT:
        weight = model.get_submodule(f"model.{name}").weight
        assert torch.equal(weight, state[f"model.{name}.weight"].float())
    packed = [name for name, module in model.named_modules() if isinstance(module, Linear4bit)]
    assert len(packed) == 8 - len(LEFT_OUT)
    for name in packed:
        assert torch.equal(model.get_submodule(name).weight, state[f"{name}.weight"])
        assert torch.equal(model.get_submodule(name).weight.quant_state.absmax, state[f"{name}.weight.absmax"])


def test_experts_left_out_beside_a_dense_layer(tmp_path: Path) -> None:
    """Float experts are stored one by one, each projection under the name of a packed linear of the dense layer."""
    checkpoint = save_tiny(tmp_path / "float", "qwen3_moe", mlp_only_layers=[0])
    model = saved(checkpoint, tmp_path / "packed", {"modules_to_not_convert": ["experts"]})
    assert isinstance(model.model.layers[0].mlp.gate_proj, Linear4bit)
    assert "model.layers.1.mlp.experts.3.gate_proj.weight" in tensors_on_disk(tmp_path / "packed")
    reloaded = load(tmp_path / "packed")
    assert_same_tensors(reloaded.state_dict(), model.state_dict())
    assert torch.equal(logits(reloaded), logits(model))


# -- the file behind the tensors --------------------------------------------------------------------------------------


@SHARDS
@pytest.mark.parametrize("variant", ["nf4", "double_quant", "parametrized"])
def test_writing_to_a_tensor_leaves_the_file(
    variant: str, save: dict[str, object], tiny_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """Of every tensor; another load does not see it either."""
    state = saved(tiny_checkpoints["qwen3_moe"], tmp_path, VARIANTS[variant], **save).state_dict()
    before = digest(tmp_path)
    model, other = load(tmp_path), load(tmp_path)
    with torch.no_grad():
        for tensor in stored_tensors(model).values():
            tensor.view(torch.uint8).bitwise_not_()
    assert digest(tmp_path) == before
    assert_same_tensors(other.state_dict(), state)
    assert_same_tensors(load(tmp_path).state_dict(), state)


@pytest.mark.parametrize(
    ("first", "second"),  # not from one file to shards: transformers keeps the older file and reads that
    [("1GB", "1GB"), ("20KB", "1GB"), ("20KB", "20KB"), ("20KB", "40KB")],
)
def test_saving_over_the_files_that_are_mapped(
    first: str, second: str, tiny_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """The model, another one of the same files and the new files keep every bit."""
    state = saved(tiny_checkpoints["qwen3_moe"], tmp_path, {}, max_shard_size=first).state_dict()
    model, other = load(tmp_path), load(tmp_path)
    expected = logits(model)
    with torch.no_grad():
        model.model.norm.weight.add_(1)  # something to save
        state["model.norm.weight"] = model.model.norm.weight.clone()
    model.save_pretrained(tmp_path, max_shard_size=second)
    assert_same_tensors(model.state_dict(), state)
    assert_same_tensors(load(tmp_path).state_dict(), state)
    assert torch.equal(logits(other), expected)


def test_a_model_outlives_its_files(tiny_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """Deleting the checkpoint takes nothing from the model."""
    expected = logits(saved(tiny_checkpoints["qwen3_moe"], tmp_path / "packed", {}))
    model = load(tmp_path / "packed")
    shutil.rmtree(tmp_path / "packed")
    assert torch.equal(logits(model), expected)
    model.save_pretrained(tmp_path / "again")
    assert torch.equal(logits(load(tmp_path / "again")), expected)
    assert packed_modules(model)
