"""An exported checkpoint is the one that bitsandbytes and transformers v4 would have written for the same model."""

import json
from pathlib import Path
from typing import Any

import bitsandbytes.functional as bnb_functional
import pytest
import torch
from bitsandbytes.nn import Linear4bit, Params4bit
from safetensors import safe_open
from safetensors.torch import load_file
from torch.nn import functional

from hf_qmoe import QMoEConfig
from hf_qmoe.export.checkpoint import ExportReport, export_checkpoint
from tests.support.checkpoints import assert_same_tensors, load, tensors_on_disk
from tests.support.exporting import (
    FAMILIES,
    expert_rows,
    read_by_bitsandbytes,
    save_packed,
    stored_state,
    weights,
    width,
)


NESTED = {"nested_absmax", "nested_quant_map"}


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object."""
    return json.loads(file.read_text())


def nbytes(tensors: dict[str, torch.Tensor]) -> int:
    """Size of all of them."""
    return sum(tensor.nbytes for tensor in tensors.values())


def assert_same_experts(packed: Path, exported: Path) -> int:
    """Each expert of `exported` is, as bitsandbytes reads it, what `packed` loads as; returns how many there are."""
    tensors = tensors_on_disk(exported)
    count = 0
    for name, rows in expert_rows(load(packed, dtype=torch.bfloat16)):
        if stored_state(tensors, name):
            assert torch.equal(read_by_bitsandbytes(tensors, name), rows), name
        else:
            assert torch.equal(tensors[name].float(), rows), name
        count += 1
    return count


def assert_linears_kept(packed: Path, exported: Path) -> None:
    """All that is not of experts has the bytes it had."""
    before, after = (
        {name: tensor for name, tensor in tensors_on_disk(path).items() if ".experts." not in name}
        for path in (packed, exported)
    )
    assert_same_tensors(after, before)


@pytest.mark.parametrize("blocksize", [32, 64, 128])
@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
@pytest.mark.parametrize("family", FAMILIES)
def test_is_what_bitsandbytes_makes_of_each_expert(
    family: str, quant_type: str, blocksize: int, tmp_path: Path
) -> None:
    config = QMoEConfig(quant_type, blocksize, bnb_4bit_quant_type=quant_type)
    float_path, packed = save_packed(tmp_path, family, config)

    report = export_checkpoint(packed, tmp_path / "out")

    originals, exported = tensors_on_disk(float_path), tensors_on_disk(report.out)
    assert weights(report.out).keys() == originals.keys()
    experts = [name for name in originals if ".experts." in name]
    for name in experts:
        # the tensors that bitsandbytes' own quantization and serialization give for this one matrix
        packed_bytes, state = bnb_functional.quantize_4bit(
            originals[name].contiguous(), blocksize=blocksize, quant_type=quant_type
        )
        expected = {name: packed_bytes} | {f"{name}.{k}": t for k, t in state.as_dict(packed=True).items()}
        assert_same_tensors({key: exported[key] for key in expected}, expected)
        assert stored_state(exported, name).keys() == state.as_dict(packed=True).keys()
    assert report.expert_weights == len(experts) == assert_same_experts(packed, report.out)
    assert report.total_tensors == len(exported)
    assert_linears_kept(packed, report.out)


@pytest.mark.parametrize(
    ("intermediate", "stays_nested"),
    [
        pytest.param(128, True, id="within-one"),  # 128 + 128 scales share one second-level scale
        pytest.param(512, True, id="on-the-boundary"),
        pytest.param(384, False, id="across"),  # gate has 384 scales
    ],
)
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_double_quantized_scales(family: str, intermediate: int, stays_nested: bool, tmp_path: Path) -> None:
    config = QMoEConfig(experts_double_quant=True, bnb_4bit_use_double_quant=True)
    _, packed = save_packed(tmp_path, family, config, **width(family, intermediate))

    report = export_checkpoint(packed, tmp_path / "out")

    exported = tensors_on_disk(report.out)
    for name in weights(report.out):
        if state := stored_state(exported, name):  # of linears too: transformers v4 reads all or none
            assert (state.keys() >= NESTED) == stays_nested
            assert state["absmax"].dtype == (torch.uint8 if stays_nested else torch.float32)
    assert ("double-quantized" in " ".join(report.notes)) != stays_nested
    assert assert_same_experts(packed, report.out) == report.expert_weights == 24
    assert_same_linears(packed, report)
    assert quantization_config(report)["bnb_4bit_use_double_quant"] == stays_nested


@pytest.mark.parametrize("of_linears", [False, True], ids=["of-experts", "of-linears"])
def test_double_quantization_of_one_kind_is_undone(of_linears: bool, tmp_path: Path) -> None:
    config = QMoEConfig(experts_double_quant=not of_linears, bnb_4bit_use_double_quant=of_linears)
    _, packed = save_packed(tmp_path, "olmoe", config)
    report = export_checkpoint(packed, tmp_path / "out")
    assert not any(name.rpartition(".")[2] in NESTED for name in tensors_on_disk(report.out))
    assert "all or none" in report.notes[0]
    assert_same_experts(packed, report.out)
    assert_same_linears(packed, report)


def assert_same_linears(packed: Path, report: ExportReport) -> None:
    """Linears have the values they had, whatever became of their scales."""
    before, after = tensors_on_disk(packed), tensors_on_disk(report.out)
    linears = [name for name in weights(report.out) if ".experts." not in name and stored_state(after, name)]
    assert len(linears) == 8
    for name in linears:
        assert torch.equal(read_by_bitsandbytes(after, name), read_by_bitsandbytes(before, name))


def quantization_config(report: ExportReport) -> dict[str, Any]:
    """Of the exported ``config.json``."""
    return read_json(report.out / "config.json")["quantization_config"]


@pytest.mark.parametrize(("blocksize", "intermediate"), [(128, 96), (4096, 128), (2048, 96)])
def test_blocks_that_run_on_from_row_to_row(blocksize: int, intermediate: int, tmp_path: Path) -> None:
    _, packed = save_packed(
        tmp_path, "qwen3_moe", QMoEConfig(experts_blocksize=blocksize), moe_intermediate_size=intermediate
    )
    report = export_checkpoint(packed, tmp_path / "out")
    assert not report.notes
    assert assert_same_experts(packed, report.out) == 24


def test_a_single_expert_computes_in_bitsandbytes_own_linear(tmp_path: Path) -> None:
    _, packed = save_packed(tmp_path, "mixtral", QMoEConfig(experts_double_quant=True, bnb_4bit_use_double_quant=True))
    tensors = tensors_on_disk(export_checkpoint(packed, tmp_path / "out").out)
    x = torch.randn(5, 64, dtype=torch.bfloat16)
    for name, rows in expert_rows(load(packed, dtype=torch.bfloat16), torch.bfloat16):
        if not name.endswith("w1.weight"):
            continue
        linear = Linear4bit(64, 128, bias=False, compute_dtype=torch.bfloat16)
        linear.weight = Params4bit.from_prequantized(
            tensors[name], stored_state(tensors, name), device="cpu", module=linear
        )
        linear.train()  # or bitsandbytes rounds its scales for AVX512
        assert torch.equal(linear(x), functional.linear(x, rows))


@pytest.mark.parametrize("family", FAMILIES)
def test_shards(family: str, tmp_path: Path) -> None:
    _, packed = save_packed(tmp_path, family)
    load(packed, dtype=torch.bfloat16).save_pretrained(tmp_path / "sharded", max_shard_size="30KB")
    shown: list[tuple[int, int, str]] = []

    one = export_checkpoint(packed, tmp_path / "one")
    many = export_checkpoint(
        tmp_path / "sharded", tmp_path / "many", max_shard_size="20KB", on_shard=lambda *shard: shown.append(shard)
    )

    assert_same_tensors(tensors_on_disk(many.out), tensors_on_disk(one.out))
    assert [file.name for file in one.out.glob("*.safetensors*")] == ["model.safetensors"]
    files = sorted(many.out.glob("*.safetensors"))
    assert shown == [(i, len(files), file.name) for i, file in enumerate(files, 1)]
    assert many.bytes_written == sum(file.stat().st_size for file in files)
    index = read_json(many.out / "model.safetensors.index.json")
    held = {}
    for file in files:
        with safe_open(file, "pt") as shard:
            assert shard.metadata() == {"format": "pt"}
            held |= dict.fromkeys(shard.keys(), file.name)
        tensors = load_file(file)
        assert nbytes(tensors) <= 20000 or len({name.split(".weight.")[0] for name in tensors}) == 1
    assert index["weight_map"] == held
    assert index["metadata"]["total_size"] == nbytes(tensors_on_disk(many.out))
    # statistics are beside their weight
    assert all(held[name] == held[name.split(".weight.")[0] + ".weight"] for name in held if ".weight." in name)
