"""Checkpoints of methods that cannot be read (case 4): one error, which names the key in ``config.json``."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, Qwen3MoeForCausalLM

from hf_qmoe import QMoEConfig
from tests.sources.checkpoints import bitsandbytes_checkpoint, write
from tests.support.checkpoints import load, tensors_on_disk


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, "'gptq'"),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, "'awq'"),
        (
            {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {}},
            "'compressed-tensors'",
        ),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "load_in_8bit"),
        ({"quant_method": "hqq", "quant_config": {}, "skip_modules": []}, "'hqq'"),
    ],
)
def test_other_methods(tiny_checkpoints: dict[str, Path], tmp_path: Path, config: dict[str, Any], named: str) -> None:
    source = tiny_checkpoints["qwen3_moe"]
    path = write(source, tmp_path / "other", tensors_on_disk(source), config)
    with pytest.raises(ValueError, match=rf"quantization_config\.quant_method in its config\.json is .*{named}"):
        load(path, QMoEConfig())


def test_gguf(tiny_checkpoints: dict[str, Path]) -> None:
    """transformers' own error; `quantize_experts` packs what was loaded from such a file without a config."""
    path = tiny_checkpoints["qwen3_moe"]
    config = AutoConfig.from_pretrained(path)
    with pytest.raises(ValueError, match=r"GGUF file.*quantization_config"):
        Qwen3MoeForCausalLM.from_pretrained(
            path, config=config, gguf_file="model.gguf", quantization_config=QMoEConfig()
        )


def test_pytorch_files(tiny_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    import torch

    path = bitsandbytes_checkpoint(tiny_checkpoints["qwen3_moe"], tmp_path / "v4", shards=1)
    torch.save(tensors_on_disk(path), path / "pytorch_model.bin")
    for file in (*path.glob("*.safetensors"), path / "model.safetensors.index.json"):
        file.unlink()
    with pytest.raises(ValueError, match="safetensors files only"):
        load(path, QMoEConfig())


def test_config_without_method(tiny_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """bitsandbytes' first configs had no ``quant_method``."""
    path = bitsandbytes_checkpoint(tiny_checkpoints["qwen3_moe"], tmp_path / "v4")
    file = path / "config.json"
    config = json.loads(file.read_text())
    del config["quantization_config"]["quant_method"]
    file.write_text(json.dumps(config))
    assert load(path, QMoEConfig()).config.quantization_config.quant_method == "qmoe"


def test_codes_under_a_name_without_scales(tiny_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """A bias in fp8 would be read as if its codes were values."""
    import torch

    source = tiny_checkpoints["gpt_oss"]
    tensors = tensors_on_disk(source)
    name = "model.layers.0.mlp.experts.down_proj_bias"
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    path = write(source, tmp_path / "fp8", tensors, {"quant_method": "fp8", "weight_block_size": [32, 16]})
    with pytest.raises(ValueError, match=f"{name} is stored in 8 bit"):
        load(path, QMoEConfig())
