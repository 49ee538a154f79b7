"""Block-scaled fp8 checkpoints: dequantized and packed one expert at a time."""

import re
from pathlib import Path

import pytest
import torch
from bitsandbytes.nn import Linear4bit
from torch import Tensor

from hf_qmoe import QMoEConfig
from tests.sources.checkpoints import fp8_checkpoint
from tests.support.checkpoints import assert_same_tensors, edited, load, logits, packed_state
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
