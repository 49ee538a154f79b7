"""v4 checkpoints of bitsandbytes (case 3): one quantized matrix per expert, whose bytes are kept."""

import re
from pathlib import Path

import pytest
import torch
from bitsandbytes.functional import QuantState, dequantize_4bit
from bitsandbytes.nn import Linear4bit
from torch import Tensor

from hf_qmoe import ExpertsNbit, QMoEConfig
from tests.sources.checkpoints import bitsandbytes_checkpoint
from tests.support.checkpoints import (
    assert_same_tensors,
    edited,
    expert_key,
    load,
    logits,
    packed_modules,
    packed_state,
    tensors_on_disk,
)
from tests.support.models import NUM_EXPERTS, PER_EXPERT_FAMILIES, experts_of, save_tiny


def stored_matrix(tensors: dict[str, Tensor], name: str) -> tuple[Tensor, QuantState]:
    """Bytes and state of one weight, as bitsandbytes reads them."""
    start = f"{name}."
    statistics = {key.removeprefix(start): value for key, value in tensors.items() if key.startswith(start)}
    return tensors[name], QuantState.from_dict(statistics, device=torch.device("cpu"))


def dequantized(tensors: dict[str, Tensor], name: str, dtype: torch.dtype = torch.float32) -> Tensor:
    """One weight as bitsandbytes dequantizes it."""
    packed, state = stored_matrix(tensors, name)
    shape, state.dtype = state.shape, dtype
    state.shape = torch.Size((1, shape.numel()))  # in one row: see `tests.support.oracle.bnb_quantize`
    return dequantize_4bit(packed, state).view(shape)


def reference_of(source: Path, target: Path, quantized: Path, dtype: torch.dtype = torch.float32) -> Path:
    """The float checkpoint `source` with the dequantized weights of `quantized` in `dtype`."""
    tensors = tensors_on_disk(quantized)

    def replace(floats: dict[str, Tensor]) -> None:
        for name in floats:
            if f"{name}.absmax" in tensors:
                floats[name] = dequantized(tensors, name, dtype)

    return edited(source, target, replace)


@pytest.mark.parametrize("family", PER_EXPERT_FAMILIES)
@pytest.mark.parametrize("nested", [False, True], ids=["plain", "nested"])
@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
def test_bytes_of_experts_are_kept(
    tiny_checkpoints: dict[str, Path], tmp_path: Path, family: str, nested: bool, quant_type: str
) -> None:
    path = bitsandbytes_checkpoint(tiny_checkpoints[family], tmp_path / "v4", quant_type, nested)
    model = load(path, QMoEConfig(experts_quant_type=quant_type))
    tensors = tensors_on_disk(path)
    modules = packed_modules(model)
    assert len(modules) == 2
    for layer, module in enumerate(modules.values()):
        for expert in range(NUM_EXPERTS):
            rows = {"gate_up_proj": ("gate", "up"), "down_proj": ("down",)}
            for name, projections in rows.items():
                keys = [expert_key(family, layer, expert, p) for p in projections]
                stored = torch.cat([tensors[key].view(-1) for key in keys])
                assert torch.equal(module.stack(name).packed[expert].view(-1), stored)
                expected = torch.cat([dequantized(tensors, key) for key in keys])
                assert torch.equal(module.stack(name).dequantize_expert(expert, torch.float32), expected)


@pytest.mark.parametrize("nested", [False, True], ids=["plain", "nested"])
def test_whole_model_equals_its_dequantized_weights(
    tiny_checkpoints: dict[str, Path], tmp_path: Path, nested: bool
) -> None:
    source = tiny_checkpoints["qwen3_moe"]

    def chosen(name: str) -> bool:  # as bitsandbytes did: every linear but the head, routers too; layer 1 left out
        return ("_proj" in name and "layers.1.mlp" not in name) or name.endswith("layers.0.mlp.gate.weight")

    skip = ["lm_head", "model.layers.1.mlp.experts"]
    path = bitsandbytes_checkpoint(source, tmp_path / "v4", nested=nested, chosen=chosen, skip=skip)
    reference = load(reference_of(source, tmp_path / "reference", path), dtype=torch.float32)
    model, info = load(path, QMoEConfig(), dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    experts = experts_of(model)
    assert [isinstance(module, ExpertsNbit) for module in experts.values()] == [True, False]
    router = model.get_submodule("model.layers.0.mlp.gate").weight
    assert torch.equal(router, reference.get_submodule("model.layers.0.mlp.gate").weight)
    assert isinstance(model.get_submodule("model.layers.0.self_attn.q_proj"), Linear4bit)
    torch.testing.assert_close(logits(model), logits(reference), rtol=0, atol=2e-5)


def test_is_saved_and_reloaded_as_ours(tiny_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    path = bitsandbytes_checkpoint(
        tiny_checkpoints["mixtral"], tmp_path / "v4", nested=True, chosen=lambda name: "_proj" in name or "w" in name
    )
    model = load(path, QMoEConfig())
    model.save_pretrained(tmp_path / "ours")
    saved = QMoEConfig.from_dict(load(tmp_path / "ours").config.quantization_config.to_dict())
    assert saved.to_dict()["quant_method"] == "qmoe"
    assert saved.bnb_4bit_use_double_quant
    again = load(tmp_path / "ours")
    assert_same_tensors(packed_state(again), packed_state(model))
    assert torch.equal(logits(again), logits(model))


def test_dequantized_it_is_an_ordinary_float_model(tiny_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    source = tiny_checkpoints["olmoe"]
    path = bitsandbytes_checkpoint(source, tmp_path / "v4")
    model = load(path, QMoEConfig(quantize_linears=False), dtype=torch.bfloat16)
    model.dequantize().save_pretrained(tmp_path / "float")
    assert_same_tensors(
        tensors_on_disk(tmp_path / "float"),
        tensors_on_disk(reference_of(source, tmp_path / "reference", path, torch.bfloat16)),
    )


def test_float_experts_are_quantized(tiny_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """As transformers v5 saves a model loaded with bitsandbytes: linears in 4 bit, experts in bf16."""
    source = tiny_checkpoints["qwen3_moe"]
    path = bitsandbytes_checkpoint(source, tmp_path / "v5", chosen=lambda name: "self_attn" in name)
    model = load(path, QMoEConfig(experts_quant_type="int8"))
    expected = load(source, QMoEConfig(experts_quant_type="int8"))
    assert_same_tensors(
        {n: t for n, t in packed_state(model).items() if "experts" in n},
        {n: t for n, t in packed_state(expected).items() if "experts" in n},
    )


def test_experts_left_out_are_dequantized(tiny_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    source = tiny_checkpoints["qwen3_moe"]
    path = bitsandbytes_checkpoint(source, tmp_path / "v4")
    model = load(path, QMoEConfig(modules_to_not_convert=["layers.1.mlp.experts"], quantize_linears=False))
    reference = load(reference_of(source, tmp_path / "reference", path, torch.bfloat16))
    name = "model.layers.1.mlp.experts"
    assert torch.equal(model.get_submodule(name).gate_up_proj, reference.get_submodule(name).gate_up_proj)


def test_another_format_is_refused(tiny_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    path = bitsandbytes_checkpoint(tiny_checkpoints["qwen3_moe"], tmp_path / "v4", "fp4")
    with pytest.raises(ValueError, match="set experts_quant_type='fp4'"):
        load(path, QMoEConfig())
    with pytest.raises(ValueError, match="set experts_blocksize=64"):
        load(path, QMoEConfig(experts_quant_type="fp4", experts_blocksize=32))
    with pytest.raises(ValueError, match="set experts_double_quant=False"):
        load(path, QMoEConfig(experts_quant_type="fp4", experts_double_quant=True))


@pytest.mark.parametrize("lost", ["experts.2.up_proj.weight", "experts.1.down_proj.weight"])
def test_missing_experts_are_named(tiny_checkpoints: dict[str, Path], tmp_path: Path, lost: str) -> None:
    path = bitsandbytes_checkpoint(tiny_checkpoints["qwen3_moe"], tmp_path / "v4", shards=1)
    file = next(path.glob("*.safetensors"))
    file.rename(path / "model.safetensors")
    (path / "model.safetensors.index.json").unlink()

    def lose(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if lost in name]:
            del tensors[name]

    expert = re.findall(r"\d", lost)[0]
    with pytest.raises(ValueError, match=rf"is missing experts \[{expert}\]"):
        load(edited(path, tmp_path / "edited", lose), QMoEConfig())


@pytest.mark.parametrize("lost", ["absmax", "quant_state.bitsandbytes__nf4", "quant_map"])
def test_missing_statistics_are_named(tiny_checkpoints: dict[str, Path], tmp_path: Path, lost: str) -> None:
    path = bitsandbytes_checkpoint(tiny_checkpoints["qwen3_moe"], tmp_path / "v4", shards=1)
    file = next(path.glob("*.safetensors"))
    file.rename(path / "model.safetensors")
    (path / "model.safetensors.index.json").unlink()
    name = "model.layers.0.mlp.experts.2.up_proj.weight"
    broken = edited(path, tmp_path / "edited", lambda tensors: tensors.pop(f"{name}.{lost}"))
    with pytest.raises(ValueError, match=f"without .*{lost}"):
        load(broken, QMoEConfig())


def test_narrow_experts_run_over_rows(tmp_path: Path) -> None:
    """K = 96 is no multiple of 64: blocks run on from row to row."""
    source = save_tiny(tmp_path / "float", "qwen3_moe", moe_intermediate_size=96)
    path = bitsandbytes_checkpoint(source, tmp_path / "v4")
    reference = load(reference_of(source, tmp_path / "reference", path), dtype=torch.float32)
    model = load(path, QMoEConfig(quantize_linears=False), dtype=torch.float32)
    torch.testing.assert_close(logits(model), logits(reference), rtol=0, atol=2e-5)


def test_skipped_modules_in_the_names_of_the_checkpoint(
    tiny_checkpoints: dict[str, Path], tmp_path: Path, warnings_logged: list[str]
) -> None:
    """Mixtral's blocks were called ``block_sparse_moe``."""
    skip = ["model.layers.1.block_sparse_moe", "model.layers.0.block_sparse_moe.gate", "multi_modal_projector"]
    path = bitsandbytes_checkpoint(
        tiny_checkpoints["mixtral"],
        tmp_path / "v4",
        chosen=lambda name: "layers.0" in name and "experts" in name,
        skip=skip,
    )
    model = load(path, QMoEConfig())
    experts = experts_of(model)
    assert [isinstance(module, ExpertsNbit) for module in experts.values()] == [True, False]
    assert model.config.quantization_config.modules_to_not_convert == ["model.layers.1.mlp", "model.layers.0.mlp.gate"]
    assert not warnings_logged


def test_block_sizes_that_linears_cannot_have(tiny_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """bitsandbytes computes wrongly with blocks that run on from row to row; experts have no such limit."""
    source = tiny_checkpoints["qwen3_moe"]
    path = bitsandbytes_checkpoint(source, tmp_path / "v4", chosen=lambda name: "_proj" in name, blocksize=128)
    config = QMoEConfig(experts_blocksize=128)
    with pytest.raises(ValueError, match=r"self_attn\.k_proj\.weight has blocks of 128.*modules_to_not_convert"):
        load(path, config)
    config.modules_to_not_convert = ["self_attn"]
    reference = load(reference_of(source, tmp_path / "reference", path), dtype=torch.float32)
    model = load(path, config, dtype=torch.float32)
    assert len(packed_modules(model)) == 2
    torch.testing.assert_close(logits(model), logits(reference), rtol=0, atol=2e-5)


@pytest.mark.parametrize("device_map", ["auto", {"": "cpu"}], ids=str)
def test_device_map(tiny_checkpoints: dict[str, Path], tmp_path: Path, device_map: object) -> None:
    path = bitsandbytes_checkpoint(tiny_checkpoints["olmoe"], tmp_path / "v4", nested=True)
    expected = packed_state(load(path, QMoEConfig()))
    assert_same_tensors(packed_state(load(path, QMoEConfig(), device_map=device_map)), expected)


def test_experts_skipped_one_by_one(tiny_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """As unsloth's dynamic checkpoints list them; an entry that is no regular expression is a name."""
    skip = [f"model.layers.1.mlp.experts.{e}.{p}_proj" for e in range(NUM_EXPERTS) for p in ("gate", "up", "down")]
    path = bitsandbytes_checkpoint(
        tiny_checkpoints["qwen3_moe"],
        tmp_path / "v4",
        chosen=lambda name: "layers.0.mlp.experts" in name,
        skip=[*skip, "foo["],
    )
    model = load(path, QMoEConfig())
    assert [isinstance(module, ExpertsNbit) for module in experts_of(model).values()] == [True, False]
    assert model.config.quantization_config.modules_to_not_convert == ["model.layers.1.mlp.experts"]


def test_a_state_dict_in_place_of_files(tiny_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    from transformers import AutoConfig, Qwen3MoeForCausalLM

    path = bitsandbytes_checkpoint(tiny_checkpoints["qwen3_moe"], tmp_path / "v4")
    with pytest.raises(ValueError, match="`state_dict=` cannot hold them"):
        Qwen3MoeForCausalLM.from_pretrained(
            None,
            config=AutoConfig.from_pretrained(path),
            state_dict=tensors_on_disk(path),
            quantization_config=QMoEConfig(),
        )
