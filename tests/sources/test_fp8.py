"""Block-scaled fp8 checkpoints: dequantized and packed one expert at a time."""

import json
import re
from pathlib import Path

import pytest
import torch
from bitsandbytes.nn import Linear4bit
from torch import Tensor

from hf_qmoe import QMoEConfig
from tests.sources.checkpoints import fp8_checkpoint, fp8_matrix, write
from tests.support.checkpoints import assert_same_tensors, edited, load, logits, packed_state, tensors_on_disk
from tests.support.models import PER_EXPERT_FAMILIES, experts_of, token_ids


def dequantized_checkpoint(source: Path, target: Path, weights: dict[str, Tensor], dtype: torch.dtype) -> Path:
    """`source` with `weights` in `dtype`."""
    return edited(source, target, lambda tensors: tensors.update({n: w.to(dtype) for n, w in weights.items()}))


@pytest.mark.parametrize("family", PER_EXPERT_FAMILIES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("experts_quant_type", ["nf4", "int8", "bf16"])
def test_equals_quantizing_the_dequantized_checkpoint(
    tiny_checkpoints: dict[str, Path], tmp_path: Path, family: str, dtype: torch.dtype, experts_quant_type: str
) -> None:
    source = tiny_checkpoints[family]
    path, weights = fp8_checkpoint(source, tmp_path / "fp8", lambda name: ".experts." in name or "attn" in name)
    floats = dequantized_checkpoint(source, tmp_path / "float", weights, dtype)
    config = QMoEConfig(experts_quant_type=experts_quant_type)
    model, info = load(path, config, dtype=dtype, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    expected = load(floats, config, dtype=dtype)
    assert sum(isinstance(m, Linear4bit) for m in model.modules()) == 8
    assert_same_tensors(packed_state(model), packed_state(expected))
    assert torch.equal(logits(model), logits(expected))


@pytest.mark.parametrize(
    "block", [(128, 128), (64, 64), (40, 40), (96, 64), (1, 32), (50, 7), (1, 64), (128, 1)], ids=str
)
def test_blocks_of_any_size(tiny_checkpoints: dict[str, Path], tmp_path: Path, block: tuple[int, int]) -> None:
    """The last block may be cut short, as in DeepSeek-V3's ``kv_a_proj_with_mqa`` ``[576, 7168]``."""
    source = tiny_checkpoints["qwen3_moe"]
    path, weights = fp8_checkpoint(source, tmp_path / "fp8", block=block)
    floats = dequantized_checkpoint(source, tmp_path / "float", weights, torch.float32)
    config = QMoEConfig(experts_quant_type="int8")
    model, expected = load(path, config, dtype=torch.float32), load(floats, config, dtype=torch.float32)
    assert_same_tensors(packed_state(model), packed_state(expected))
    assert torch.equal(logits(model), logits(expected))


def test_scales_that_no_block_explains(tiny_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    path, _ = fp8_checkpoint(tiny_checkpoints["qwen3_moe"], tmp_path / "fp8", block=(60, 64))
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"]["weight_block_size"] = [128, 128]
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"weight: \d scales for \d+ weights are not what blocks of 128"):
        load(path, QMoEConfig())


@pytest.mark.parametrize("scale", ["scalar", "one", "uint8"])
def test_other_scales(tiny_checkpoints: dict[str, Path], tmp_path: Path, scale: str) -> None:
    """One scale for a whole matrix; powers of two as bytes, as mxfp8 has them."""
    source = tiny_checkpoints["mixtral"]
    tensors, weights = tensors_on_disk(source), {}
    for name in [name for name in tensors if ".experts." in name]:
        codes = (tensors[name].float() * 64).to(torch.float8_e4m3fn)
        rows, columns = codes.shape
        if scale in ("scalar", "one"):
            scales = torch.tensor(1 / 64).reshape(() if scale == "scalar" else (1,))
            weights[name] = codes.float() / 64
        else:
            scales = torch.randint(119, 123, (rows, columns // 32), dtype=torch.uint8)
            weights[name] = codes.float() * (scales.float() - 127).exp2().repeat_interleave(32, 1)
        tensors[name], tensors[f"{name}_scale_inv"] = codes, scales
    method = {"quant_method": "mxfp8", "weight_block_size": [1, 32]} if scale == "uint8" else {"quant_method": "fp8"}
    path = write(source, tmp_path / "fp8", tensors, method)
    floats = dequantized_checkpoint(source, tmp_path / "float", weights, torch.float32)
    model = load(path, QMoEConfig(experts_quant_type="int8"), dtype=torch.float32)
    expected = load(floats, QMoEConfig(experts_quant_type="int8"), dtype=torch.float32)
    assert_same_tensors(packed_state(model), packed_state(expected))


def test_what_is_left_out_is_dequantized(tiny_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    source = tiny_checkpoints["qwen3_moe"]
    path, weights = fp8_checkpoint(source, tmp_path / "fp8", lambda name: "_proj" in name)
    floats = load(dequantized_checkpoint(source, tmp_path / "float", weights, torch.bfloat16))
    model = load(path, QMoEConfig(modules_to_not_convert=["layers.1.mlp.experts"], quantize_linears=False))
    for name in ("mlp.experts.gate_up_proj", "mlp.experts.down_proj", "mlp.gate.weight", "self_attn.q_proj.weight"):
        name = f"model.layers.1.{name}"
        assert torch.equal(model.get_parameter(name), floats.get_parameter(name))


@pytest.mark.parametrize("scale_name", ["scale", "qscale_weight"])
def test_other_names_of_the_scales(tiny_checkpoints: dict[str, Path], tmp_path: Path, scale_name: str) -> None:
    source = tiny_checkpoints["qwen3_moe"]
    first, _ = fp8_checkpoint(source, tmp_path / "first")
    second, _ = fp8_checkpoint(source, tmp_path / "second", scale_name=scale_name)
    assert_same_tensors(packed_state(load(second, QMoEConfig())), packed_state(load(first, QMoEConfig())))


def test_is_saved_and_reloaded_as_ours(tiny_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    path, _ = fp8_checkpoint(tiny_checkpoints["olmoe"], tmp_path / "fp8")
    model = load(path, QMoEConfig())
    model.save_pretrained(tmp_path / "ours")
    again = load(tmp_path / "ours")
    assert again.config.quantization_config.quant_method == "qmoe"
    assert_same_tensors(packed_state(again), packed_state(model))
    assert torch.equal(logits(again), logits(model))
    model.dequantize()
    assert not hasattr(model.config, "quantization_config")
    assert all(module.gate_up_proj.is_floating_point() for module in experts_of(model).values())
    assert model(token_ids()).logits.isfinite().all()


def test_a_lost_scale_is_named(tiny_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    path, _ = fp8_checkpoint(tiny_checkpoints["qwen3_moe"], tmp_path / "fp8")
    name = "model.layers.0.mlp.experts.1.down_proj.weight"
    for file in path.glob("*.safetensors"):
        tensors = load_file(file)
        tensors.pop(f"{name}_scale_inv", None)
        save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=re.escape(name)):
        load(path, QMoEConfig())


@pytest.mark.parametrize("device_map", ["auto", "sequential", {"": "cpu"}], ids=str)
def test_device_map(tiny_checkpoints: dict[str, Path], tmp_path: Path, device_map: object) -> None:
    path, _ = fp8_checkpoint(tiny_checkpoints["qwen3_moe"], tmp_path / "fp8")
    expected = packed_state(load(path, QMoEConfig()))
    assert_same_tensors(packed_state(load(path, QMoEConfig(), device_map=device_map)), expected)


def test_disk_offload(tiny_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    path, _ = fp8_checkpoint(tiny_checkpoints["qwen3_moe"], tmp_path / "fp8")
    config = QMoEConfig(quantize_linears=False)
    device_map = {"model.embed_tokens": "cpu", "model.layers.0": "disk", "model.layers.1": "cpu", "model.norm": "cpu"}
    device_map |= {"model.rotary_emb": "cpu", "lm_head": "cpu"}
    offloaded = load(path, config, device_map=device_map, offload_folder=tmp_path / "offload")
    assert torch.equal(logits(offloaded), logits(load(path, config)))


@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_moe"])
@pytest.mark.parametrize("shape", [(), (4,), (4, 1, 1), (4, 2, 2)], ids=str)
def test_fused_stacks(tiny_checkpoints: dict[str, Path], tmp_path: Path, family: str, shape: tuple[int, ...]) -> None:
    """One scale for all experts, for each, or for each of their blocks."""
    source = tmp_path / "fused"
    load(tiny_checkpoints[family]).save_pretrained(source, save_original_format=False)
    tensors, weights = tensors_on_disk(source), {}
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        codes = (tensors[name].float() * 64).to(torch.float8_e4m3fn)
        scales = torch.rand(shape) / 64 + 1 / 64
        blocks = scales.view(-1, 1, 1) if scales.ndim < 3 else scales
        for dim in (1, 2):
            blocks = blocks.repeat_interleave(codes.shape[dim] // blocks.shape[dim], dim)
        weights[name] = codes.float() * blocks
        tensors[name], tensors[f"{name}_scale_inv"] = codes, scales
    path = write(source, tmp_path / "fp8", tensors, {"quant_method": "fp8"})
    floats = dequantized_checkpoint(source, tmp_path / "float", weights, torch.float32)
    config = QMoEConfig(experts_quant_type="int8")
    model, expected = load(path, config, dtype=torch.float32), load(floats, config, dtype=torch.float32)
    assert_same_tensors(packed_state(model), packed_state(expected))


def test_method_named_for_the_language_model_alone(tmp_path: Path) -> None:
    from transformers import Qwen3VLMoeForConditionalGeneration

    from tests.lora.families import build

    build("qwen3_vl_moe").to(torch.bfloat16).save_pretrained(tmp_path / "float")
    path, _ = fp8_checkpoint(tmp_path / "float", tmp_path / "fp8", chosen=lambda name: "self_attn" in name)
    config = json.loads((path / "config.json").read_text())
    config["text_config"]["quantization_config"] = config.pop("quantization_config")
    (path / "config.json").write_text(json.dumps(config))
    model = Qwen3VLMoeForConditionalGeneration.from_pretrained(path, quantization_config=QMoEConfig())
    model.save_pretrained(tmp_path / "ours")
    model.dequantize().save_pretrained(tmp_path / "back")
    for name in ("ours", "back"):
        saved = json.loads((tmp_path / name / "config.json").read_text())
        assert "quantization_config" not in saved["text_config"], name
        assert ("quantization_config" in saved) == (name == "ours")


def test_parameters_called_scale_beside_scales_of_that_name(tmp_path: Path) -> None:
    """DeepSeek-V4: ``attn_hc.scale`` is a parameter, ``wkv.scale`` belongs to a weight."""
    from tests.sweep.registry import decorated
    from tests.sweep.tiny import build, find_models

    ((cls, config),) = find_models(decorated()["DeepseekV4Experts"]).items()
    build(cls, config).to(torch.bfloat16).save_pretrained(tmp_path / "float")
    loaded = []
    for name in ("weight_scale_inv", "scale"):
        path, weights = fp8_checkpoint(tmp_path / "float", tmp_path / name, scale_name=name)
        assert len(weights) > 10
        loaded.append(cls.from_pretrained(path, quantization_config=QMoEConfig()))
    assert any(name.endswith(".scale") for name, _ in loaded[0].named_parameters())
    assert_same_tensors(loaded[1].state_dict(), loaded[0].state_dict())


def test_matrices_of_all_experts(tmp_path: Path) -> None:
    """DBRX's ``[E * N, K]``."""
    from tests.sweep.registry import every
    from tests.sweep.tiny import build, find_models

    ((cls, config),) = find_models(every()["DbrxExpertGLU"]).items()
    build(cls, config).to(torch.bfloat16).save_pretrained(tmp_path / "float")
    tensors, weights = tensors_on_disk(tmp_path / "float"), {}
    for name in [name for name in tensors if name.endswith((".w1", ".v1", ".w2"))]:
        tensors[name], tensors[f"{name}_scale_inv"], weights[name] = fp8_matrix(tensors[name])
    path = write(tmp_path / "float", tmp_path / "fp8", tensors, {"quant_method": "fp8", "weight_block_size": [32, 16]})
    floats = dequantized_checkpoint(tmp_path / "float", tmp_path / "restored", weights, torch.bfloat16)
    model, expected = (cls.from_pretrained(p, quantization_config=QMoEConfig()) for p in (path, floats))
    assert_same_tensors(model.state_dict(), expected.state_dict())
