"""What cannot be exported is refused with one message, and nothing is left behind."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import Chunk, WeightConverter

from hf_qmoe import QMoEConfig, metadata
from hf_qmoe.export import checkpoint, names
from hf_qmoe.export.checkpoint import export_checkpoint
from hf_qmoe.folders import CheckpointError
from tests.lora.families import build
from tests.support.checkpoints import digest, load
from tests.support.exporting import save_packed
from tests.support.merging import edit_json, edit_tensors, randomized


EXPERTS = "model.layers.1.mlp.experts"
LINEAR = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A packed checkpoint; tests copy it before they break it."""
    config = QMoEConfig(experts_double_quant=True, bnb_4bit_use_double_quant=True)
    return save_packed(tmp_path_factory.mktemp("good"), "qwen3_moe", config).packed


@pytest.fixture
def broken(good: Path, tmp_path: Path) -> Path:
    """A copy to break."""
    return shutil.copytree(good, tmp_path / "packed")


def assert_refused(source: Path, match: str) -> None:
    """Exporting fails with a message for the user, and leaves nothing."""
    before = digest(source.parent)
    with pytest.raises(CheckpointError, match=match):
        export_checkpoint(source, source.parent / "out")
    assert digest(source.parent) == before
    assert not list(source.parent.glob("*out*"))


@pytest.mark.parametrize(
    ("config", "match"),
    [
        (QMoEConfig("int8"), r"4 stacks .* 8 bit.*gate_up_proj \(int8\).*nf4 or fp4"),
        (QMoEConfig("fp8"), r"\(fp8\)"),
        (QMoEConfig(experts_overrides={"layers.1": "int8"}), r"2 stacks .*layers\.1\.mlp\.experts\.\w+ \(int8\)"),
        (QMoEConfig("fp4"), r"weights in fp4 \(.*experts.*\) and nf4 \(.*self_attn.*one 4-bit format"),
        (QMoEConfig(experts_overrides={"layers.1": "fp4"}), "weights in fp4 .* and nf4"),
        (QMoEConfig(experts_blocksize=4096), r"gate_up_proj: a block of 4096 weights runs from the rows"),
    ],
    ids=["int8", "fp8", "one-int8", "linears-nf4", "two-types", "blocks"],
)
def test_formats(config: QMoEConfig, match: str, tmp_path: Path) -> None:
    _, packed = save_packed(tmp_path, "qwen3_moe", config, moe_intermediate_size=96)
    assert_refused(packed, match)


@pytest.mark.parametrize(
    ("family", "match"),
    [
        ("gpt_oss", r"GptOssForCausalLM \(gpt_oss\) keep the experts fused transposed, with gate and up rows interl"),
        ("llama4", r"Llama4ForCausalLM \(llama4_text\) keep the experts fused"),
        ("gemma4", r"\(gemma4_text\) keep the experts fused"),
    ],
)
def test_families_without_tensors_per_expert(family: str, match: str, tmp_path: Path) -> None:
    randomized(build(family)).to(torch.bfloat16).save_pretrained(tmp_path / "float")
    load(tmp_path / "float", QMoEConfig(), dtype=torch.bfloat16).save_pretrained(tmp_path / "packed")
    assert_refused(tmp_path / "packed", match)


def test_linears_that_are_one_tensor_originally(good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fused(*args: Any, **kwargs: Any) -> list[Any]:
        targets = [f"self_attn.{name}_proj.weight" for name in "qk"]
        own = WeightConverter(["self_attn.qk_proj.weight"], targets, operations=[Chunk(dim=0)])
        return [*get_model_conversion_mapping(*args, **kwargs), own]

    monkeypatch.setattr(names, "get_model_conversion_mapping", fused)
    assert_refused(shutil.copytree(good, tmp_path / "packed"), r"self_attn\.[qk]_proj\.weight is a part of a larger")


def drop(*keys: str) -> Callable[[dict[str, Tensor]], object]:
    """An edit that removes tensors."""
    return lambda tensors: [tensors.pop(key) for key in keys]


def newer(tensors: dict[str, Tensor]) -> None:
    """Metadata of a format to come."""
    description = metadata.decode(tensors[f"{EXPERTS}.quant_metadata"])
    tensors[f"{EXPERTS}.quant_metadata"] = metadata.encode({**description, "format_version": 2})


def cut(tensors: dict[str, Tensor]) -> None:
    """One expert too few in one of the tensors."""
    tensors[f"{EXPERTS}.down_proj_absmax"] = tensors[f"{EXPERTS}.down_proj_absmax"][1:].clone()


STACKS = [
    f"{EXPERTS}.{name}{suffix}"
    for name in ("gate_up_proj", "down_proj")
    for suffix in ("", "_absmax", "_nested_absmax", "_nested_offset")
]


@pytest.mark.parametrize(
    ("edit", "match"),
    [
        (drop(f"{EXPERTS}.gate_up_proj"), rf"lacks {EXPERTS}\.gate_up_proj; it is incomplete"),
        (drop(f"{EXPERTS}.gate_up_proj_nested_offset"), "lacks .*gate_up_proj_nested_offset"),
        (drop(*STACKS, f"{EXPERTS}.quant_metadata"), rf"lacks {EXPERTS}\.gate_up_proj"),
        (drop(f"{EXPERTS}.quant_metadata"), rf"is packed, but the checkpoint lacks {EXPERTS}\.quant_metadata"),
        (newer, "quant_metadata cannot be used: its format version is 2"),
        (cut, r"down_proj_absmax is U8 \(3, .*metadata says U8 \(4, "),
        (lambda t: t.update({f"{EXPERTS}.quant_metadata": torch.zeros(4, dtype=torch.uint8)}), "cannot be used"),
        (drop(f"{LINEAR}.absmax"), f"lacks {LINEAR}.absmax"),
        (drop(f"{LINEAR}.quant_state.bitsandbytes__nf4"), rf"lacks {LINEAR}\.quant_state"),
        (drop(LINEAR), f"lacks {LINEAR}"),
    ],
    ids=["stack", "scales", "module", "metadata", "version", "shape", "garbage", "absmax", "state", "linear"],
)
def test_damaged_checkpoints(broken: Path, edit: Callable[[dict[str, Tensor]], object], match: str) -> None:
    edit_tensors(broken / "model.safetensors", edit)
    assert_refused(broken, match)


def test_a_cut_off_shard(broken: Path) -> None:
    file = broken / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    assert_refused(broken, "truncated")


def test_sources_that_are_not_packed(broken: Path, good: Path, tmp_path: Path) -> None:
    assert_refused(shutil.copytree(good.parent / "float", tmp_path / "float"), "it is float")
    config = broken / "config.json"
    edit_json(config, quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True})
    assert_refused(broken, "its quant_method is 'bitsandbytes'")
    edit_json(config, quantization_config={"quant_method": "qmoe", "of_tomorrow": 1})
    assert_refused(broken, "quantization_config of .* cannot be used: .*of_tomorrow")
    edit_json(config, quantization_config={"quant_method": "qmoe"}, model_type="of_tomorrow")
    assert_refused(broken, "the config of .* cannot be used")
    config.unlink()
    assert_refused(broken, "has no config.json")
    assert_refused(tmp_path / "nowhere", "is not a folder")


def test_arguments(good: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="layout is 'gguf', expected 'bnb-per-expert'"):
        export_checkpoint(good, tmp_path / "out", "gguf")
    for size in ("five", "0", -1, "-1GB", ""):
        with pytest.raises(ValueError, match="max_shard_size must be"):
            export_checkpoint(good, tmp_path / "out", max_shard_size=size)
    assert not list(tmp_path.iterdir())


def test_out(broken: Path) -> None:
    out = broken.parent / "out"
    before = digest(broken)
    for folder in (broken, broken.parent):
        with pytest.raises(CheckpointError, match="would replace"):
            export_checkpoint(broken, folder, overwrite=True)
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="not empty"):
        export_checkpoint(broken, out)
    assert [file.name for file in out.iterdir()] == ["notes.txt"]
    export_checkpoint(broken, out, overwrite=True)
    assert not (out / "notes.txt").exists()
    assert (out / "model.safetensors").is_file()
    assert digest(broken) == before


def test_a_failure_leaves_what_was_there(broken: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = broken.parent / "out"
    export_checkpoint(broken, out)
    before = digest(out)

    def fail(*args: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "write_shard", fail)
    with pytest.raises(OSError, match="No space left"):
        export_checkpoint(broken, out, overwrite=True)
    assert digest(out) == before
    assert sorted(path.name for path in broken.parent.iterdir()) == ["out", "packed"]
