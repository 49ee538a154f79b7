"""What an export makes of all that is not a 4-bit stack under today's names."""

import json
import shutil
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig

from hf_qmoe import QMoEConfig
from hf_qmoe.export.checkpoint import export_checkpoint
from tests.lora.families import build
from tests.support.checkpoints import assert_same_tensors, load, tensors_on_disk
from tests.support.exporting import FAMILIES, expert_rows, read_by_bitsandbytes, save_packed, stored_state, weights
from tests.support.merging import edit_json, randomized


def config_of(path: Path) -> dict[str, Any]:
    """Content of ``config.json``."""
    return json.loads((path / "config.json").read_text())


LEFT_OUT = QMoEConfig(modules_to_not_convert=["layers.1.mlp.experts"])
BF16, FP16 = (QMoEConfig(experts_overrides={"layers.1.mlp.experts": quant_type}) for quant_type in ("bf16", "fp16"))


@pytest.mark.parametrize(
    ("family", "config"),
    [
        *(
            pytest.param(family, config, id=f"{family}-{name}")
            for family in FAMILIES
            for name, config in (("left-out", LEFT_OUT), ("bf16", BF16), ("fp16", FP16))
            # the only experts of this model are in layer 1, and are stored as in the float checkpoint if left out
            if (family, name) != ("deepseek_v3", "left-out")
        ),
    ],
)
def test_experts_in_16_bit(family: str, config: QMoEConfig, tmp_path: Path) -> None:
    _, packed = save_packed(tmp_path, family, config)

    report = export_checkpoint(packed, tmp_path / "out")

    originals, exported = tensors_on_disk(tmp_path / "float"), tensors_on_disk(report.out)
    path = f"model.layers.1.{'block_sparse_moe' if family == 'mixtral' else 'mlp'}.experts"
    dtype = torch.float16 if "fp16" in (config.experts_overrides or {}).values() else torch.bfloat16
    experts = [name for name in originals if name.startswith(path)]
    assert_same_tensors(
        {name: exported[name] for name in experts}, {name: originals[name].to(dtype) for name in experts}
    )
    assert not any(stored_state(exported, name) for name in experts)
    assert path in config_of(report.out)["quantization_config"]["llm_int8_skip_modules"]
    assert path in report.notes[0]
    assert weights(report.out).keys() == originals.keys()
    assert report.expert_weights == len([name for name in originals if ".experts." in name])


def test_nothing_but_linears_is_packed(tmp_path: Path) -> None:
    config = QMoEConfig(modules_to_not_convert=["mlp.experts"], bnb_4bit_use_double_quant=True)
    _, packed = save_packed(tmp_path, "mixtral", config)
    report = export_checkpoint(packed, tmp_path / "out")
    assert_same_tensors(tensors_on_disk(report.out), tensors_on_disk(packed))
    assert report.expert_weights == 0
    assert config_of(report.out)["quantization_config"]["bnb_4bit_use_double_quant"]


def test_nothing_but_experts_is_packed(tmp_path: Path) -> None:
    config = QMoEConfig("fp4", quantize_linears=False, experts_double_quant=True)
    _, packed = save_packed(tmp_path, "olmoe", config)
    report = export_checkpoint(packed, tmp_path / "out")
    exported = tensors_on_disk(report.out)
    for name, rows in expert_rows(load(packed, dtype=torch.bfloat16)):
        assert torch.equal(read_by_bitsandbytes(exported, name), rows)
    written = config_of(report.out)["quantization_config"]
    assert (written["bnb_4bit_quant_type"], written["bnb_4bit_use_double_quant"]) == ("fp4", True)
    assert "model.layers.0.self_attn.q_proj" in written["llm_int8_skip_modules"]


def test_tied_embeddings(tmp_path: Path) -> None:
    _, packed = save_packed(tmp_path, "qwen3_moe", tie_word_embeddings=True)
    report = export_checkpoint(packed, tmp_path / "out")
    assert "lm_head.weight" not in tensors_on_disk(report.out)
    skipped = config_of(report.out)["quantization_config"]["llm_int8_skip_modules"]
    assert skipped == ["lm_head", "model.layers.0.mlp.gate", "model.layers.1.mlp.gate"]


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_parametrized_experts(family: str, tmp_path: Path) -> None:
    _, packed = save_packed(tmp_path, family)
    _, other = save_packed(tmp_path / "other", family, QMoEConfig(experts_module="parametrize"))
    expected, report = (export_checkpoint(p, p.parent / "out") for p in (packed, other))
    assert_same_tensors(tensors_on_disk(report.out), tensors_on_disk(expected.out))


@pytest.mark.parametrize("family", FAMILIES)
def test_other_storage_of_the_same_bytes(family: str, tmp_path: Path) -> None:
    _, packed = save_packed(tmp_path, family, QMoEConfig(bnb_4bit_quant_storage="bfloat16"))
    report = export_checkpoint(packed, tmp_path / "out")
    exported = tensors_on_disk(report.out)
    for name, rows in expert_rows(load(packed, dtype=torch.bfloat16)):
        assert exported[name].dtype == torch.bfloat16
        assert torch.equal(read_by_bitsandbytes(exported, name), rows)
    assert config_of(report.out)["quantization_config"]["bnb_4bit_quant_storage"] == "bfloat16"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_source_with_the_models_own_names(family: str, tmp_path: Path) -> None:
    _, packed = save_packed(tmp_path, family)
    load(packed, dtype=torch.bfloat16).save_pretrained(tmp_path / "renamed", save_original_format=False)
    if family == "mixtral":
        assert "model.layers.0.mlp.gate.weight" in tensors_on_disk(tmp_path / "renamed")
    expected, report = (export_checkpoint(tmp_path / n, tmp_path / f"{n}-out") for n in ("packed", "renamed"))
    assert_same_tensors(tensors_on_disk(report.out), tensors_on_disk(expected.out))


def test_a_prefix_stays_as_it_was(tmp_path: Path) -> None:
    randomized(build("qwen3_5_moe")).to(torch.bfloat16).save_pretrained(tmp_path / "plain")
    for prefix in ("", "language_model."):
        folder = shutil.copytree(tmp_path / "plain", tmp_path / f"{prefix}float")
        tensors = {
            name.replace("model.", f"model.{prefix}", 1) if name.startswith("model.") else name: tensor
            for name, tensor in tensors_on_disk(folder).items()
        }
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        packed = tmp_path / f"{prefix}packed"
        load(folder, QMoEConfig(), dtype=torch.bfloat16).save_pretrained(packed)
        report = export_checkpoint(packed, tmp_path / f"{prefix}out")
        assert weights(report.out).keys() == tensors.keys()


@pytest.mark.parametrize(
    "family",
    ["qwen2_moe", "qwen3_next", "deepseek_v3", "deepseek_v32", "nemotron_h", "afmoe", "dense"],
)
def test_names_of_other_families(family: str, tmp_path: Path) -> None:
    model = randomized(build(family)).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "float")
    load(tmp_path / "float", QMoEConfig(), dtype=torch.bfloat16).save_pretrained(tmp_path / "packed")
    report = export_checkpoint(tmp_path / "packed", tmp_path / "out")
    originals, exported = tensors_on_disk(tmp_path / "float"), tensors_on_disk(report.out)
    assert weights(report.out).keys() == originals.keys()
    skipped = config_of(report.out)["quantization_config"]["llm_int8_skip_modules"]
    for name in originals:
        if stored_state(exported, name):
            assert not any(f"{module}." in name for module in skipped)
            shape = read_by_bitsandbytes(exported, name).shape
            assert shape == originals[name].shape
        else:
            assert torch.equal(exported[name], originals[name])
            is_matrix = originals[name].ndim == 2 and name.endswith(".weight") and "embed" not in name
            assert is_matrix == (name.removesuffix(".weight") in skipped)


YARN = {"rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0, "original_max_position_embeddings": 8192}


@pytest.mark.parametrize("rope", [{"rope_type": "default", "rope_theta": 1e6}, YARN], ids=["default", "yarn"])
def test_the_config_is_one_for_transformers_v4(rope: dict[str, Any], tmp_path: Path) -> None:
    config = QMoEConfig(bnb_4bit_compute_dtype="float16")
    _, packed = save_packed(tmp_path, "qwen3_moe", config, rope_parameters=dict(rope), norm_topk_prob=True)
    report = export_checkpoint(packed, tmp_path / "out")
    written = config_of(report.out)
    assert written["quantization_config"] == {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "load_in_8bit": False,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": False,
        "bnb_4bit_compute_dtype": "float16",
        "bnb_4bit_quant_storage": "uint8",
        "llm_int8_skip_modules": ["lm_head", "model.layers.0.mlp.gate", "model.layers.1.mlp.gate"],
        "llm_int8_threshold": 6.0,
        "llm_int8_has_fp16_weight": False,
        "llm_int8_enable_fp32_cpu_offload": False,
    }
    assert (written["num_experts"], written["torch_dtype"]) == (4, "bfloat16")
    assert written["rope_theta"] == rope["rope_theta"]
    scaling = {name: value for name, value in rope.items() if name != "rope_theta"}
    assert written["rope_scaling"] == (None if rope["rope_type"] == "default" else scaling)
    # and transformers v5 reads what it wrote
    before, after = (AutoConfig.from_pretrained(path).to_dict() for path in (packed, report.out))
    older = {"num_experts", "rope_theta", "rope_scaling", "torch_dtype"}
    for fields in (before, after):
        del fields["quantization_config"], fields["_name_or_path"]
    assert {name: value for name, value in after.items() if name not in older} == before


def test_small_files_are_copied(tmp_path: Path) -> None:
    _, packed = save_packed(tmp_path, "olmoe")
    load(packed, dtype=torch.bfloat16).save_pretrained(tmp_path / "source", max_shard_size="50KB")
    source = tmp_path / "source"
    (source / "tokenizer.json").write_text("{}")
    (source / "pytorch_model.bin").write_bytes(b"other weights")
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tools.jinja").write_text("a template")
    report = export_checkpoint(source, tmp_path / "out")
    assert {str(file.relative_to(report.out)) for file in report.out.rglob("*") if file.is_file()} == {
        "additional_chat_templates/tools.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
    }


class LargestReal(TorchDispatchMode):
    """Records the size of the largest tensor that an operation makes, without those on the meta device."""

    nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and not tensor.is_meta:
                self.nbytes = max(self.nbytes, tensor.nbytes)
        return out


def test_memory_is_that_of_names_not_of_weights(tmp_path: Path) -> None:
    config = QMoEConfig(experts_double_quant=True)  # whose scales are computed
    _, packed = save_packed(tmp_path, "qwen3_moe", config, hidden_size=256, moe_intermediate_size=2048)
    stack = 4 * 4096 * 256 // 2  # bytes of gate and up in one of two layers
    export_checkpoint(packed, tmp_path / "first")  # imports and caches
    with LargestReal() as largest:
        tracemalloc.start()
        export_checkpoint(packed, tmp_path / "out")
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < stack // 2
    assert largest.nbytes <= stack // 8


def test_a_config_without_a_dtype(tmp_path: Path) -> None:
    _, packed = save_packed(tmp_path, "qwen3_moe")
    edit_json(packed / "config.json", dtype=None)
    report = export_checkpoint(packed, tmp_path / "out")
    assert config_of(report.out)["quantization_config"]["bnb_4bit_compute_dtype"] == "float32"
