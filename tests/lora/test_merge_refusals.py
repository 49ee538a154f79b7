"""What cannot be merged is refused with one message, and nothing is left behind."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import VeraConfig
from torch import Tensor

from hf_qmoe.lora.merge_adapter import MergeError
from hf_qmoe.lora.merge_checkpoint import merge_checkpoint
from tests.support.checkpoints import digest
from tests.support.merging import edit_json, edit_tensors, lora_config, save_adapter, save_base


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A base and an adapter that can be merged; tests copy them before they break them."""
    folder = tmp_path_factory.mktemp("good")
    base = save_base(folder / "base", "qwen3_moe", torch.bfloat16)
    return base, save_adapter(folder / "adapter", base, lora_config("qwen3_moe"))


@pytest.fixture
def broken(good: tuple[Path, Path], tmp_path: Path) -> tuple[Path, Path]:
    return tuple(shutil.copytree(folder, tmp_path / folder.name) for folder in good)  # type: ignore[return-value]


def assert_refused(base: Path, adapter: Path, match: str) -> None:
    out = base.parent / "out"
    with pytest.raises(MergeError, match=match):
        merge_checkpoint(base, adapter, out)
    assert not [path for path in base.parent.iterdir() if "out" in path.name]


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"use_dora": True}, "use_dora=True"),
        ({"lora_bias": True}, "lora_bias=True"),
        ({"bias": "all"}, "bias='all'"),
        ({"trainable_token_indices": [1, 2]}, "trainable_token_indices"),
        ({"a_variant_of_tomorrow": True}, "a_variant_of_tomorrow=True"),
        ({"init_lora_weights": "pissa"}, "changes the base weights"),
        ({"peft_type": "IA3"}, "not a LoRA adapter"),
        ({"peft_version": "0.18.1"}, "saved by PEFT 0.18.1"),
        ({"peft_version": None}, "the wrong way round"),
        ({"target_modules": ["query"], "target_parameters": None}, "does not fit.*query"),
        ({"target_modules": ["q_proj"]}, "weights for modules the base model lacks: .*v_proj"),
        ({"target_modules": ["q_proj", "k_proj", "v_proj"]}, "lacks weights that its config promises: .*k_proj"),
        ({"r": 8}, "does not fit.*size mismatch"),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, dict) else "",
)
def test_refuses_an_adapter(broken: tuple[Path, Path], changes: dict[str, Any], match: str) -> None:
    base, adapter = broken
    edit_json(adapter / "adapter_config.json", **changes)
    assert_refused(base, adapter, match)


def test_refuses_patterns_for_names_that_are_gone(broken: tuple[Path, Path]) -> None:
    """A pattern for a projection that is fused now would be ignored, and the scaling be another."""
    base, adapter = broken
    edit_json(adapter / "adapter_config.json", alpha_pattern={"gate_proj": 14})
    assert_refused(base, adapter, "match nothing it adapts: gate_proj")


def test_refuses_an_adapter_of_another_method_or_model(good: tuple[Path, Path], tmp_path: Path) -> None:
    base = shutil.copytree(good[0], tmp_path / "base")
    vera = save_adapter(tmp_path / "vera", base, VeraConfig(r=4, target_modules=["q_proj"]))
    assert_refused(base, vera, "not a LoRA adapter")
    narrow = save_base(tmp_path / "narrow", "olmoe", hidden_size=32)
    assert_refused(base, save_adapter(tmp_path / "a", narrow, lora_config("olmoe")), "does not fit.*size mismatch")
    deep = save_base(tmp_path / "deep", "qwen3_moe", num_hidden_layers=3)
    assert_refused(base, save_adapter(tmp_path / "b", deep, lora_config("qwen3_moe")), "the base model lacks")
    other = save_base(tmp_path / "other", "deepseek_v3")
    assert_refused(base, save_adapter(tmp_path / "c", other, lora_config("deepseek_v3")), "does not fit|lacks")


def test_refuses_folders_that_are_not_what_they_should_be(broken: tuple[Path, Path], tmp_path: Path) -> None:
    base, adapter = broken
    assert_refused(base, base, "no adapter_config.json")
    assert_refused(adapter, adapter, "no config.json")
    assert_refused(base, tmp_path / "nothing", "adapter .*nothing is not a folder")
    (adapter / "adapter_model.safetensors").unlink()
    assert_refused(base, adapter, "has no adapter_model.safetensors")
    (adapter / "adapter_config.json").write_text("{")
    (adapter / "adapter_model.bin").write_text("")
    assert_refused(base, adapter, "not valid JSON")
    edit_json(base / "config.json", model_type="unheard_of")
    assert_refused(base, adapter, "the config of .* cannot be used: .*unheard_of")
    edit_json(base / "config.json", model_type="bert", architectures=["MyBertForCausalLM"], hidden_size=10)
    assert_refused(base, adapter, "no model can be built from the config of")


@pytest.mark.parametrize("place", ["top", "text_config"])
def test_refuses_a_quantized_base(broken: tuple[Path, Path], place: str) -> None:
    base, adapter = broken
    quantized = {"quantization_config": {"quant_method": "bitsandbytes"}}
    edit_json(base / "config.json", **(quantized if place == "top" else {place: quantized}))
    assert_refused(base, adapter, "is quantized.*float checkpoint")


def test_refuses_tensors_that_are_not_float(broken: tuple[Path, Path]) -> None:
    base, adapter = broken
    for shard in base.glob("*.safetensors"):
        edit_tensors(shard, lambda tensors: tensors.update({n: t.to(torch.float8_e4m3fn) for n, t in tensors.items()}))
    assert_refused(base, adapter, "stored as F8_E4M3; only")


def test_refuses_tied_weights(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base", "qwen3_moe", tie_word_embeddings=True)
    for name in ("embed_tokens", "lm_head"):
        adapter = save_adapter(tmp_path / name, base, lora_config("qwen3_moe", target_modules=[name]))
        assert_refused(base, adapter, f"{name}.weight is adapted, but tied")


def drop(name: str) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.pop(name, None)


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("model.layers.0.self_attn.q_proj.weight", "layers.0.self_attn.q_proj.weight is adapted, but no tensor"),
        (
            "model.layers.1.mlp.experts.2.up_proj.weight",
            "layers.1.mlp.experts.gate_up_proj .*holds 43,008 elem.*49,152",
        ),
    ],
)
def test_refuses_an_incomplete_base(broken: tuple[Path, Path], name: str, match: str) -> None:
    base, adapter = broken
    for shard in base.glob("*.safetensors"):
        edit_tensors(shard, drop(name))
    assert_refused(base, adapter, match)


def test_refuses_more_experts_than_the_config_says(broken: tuple[Path, Path]) -> None:
    base, adapter = broken
    extra = "model.layers.1.mlp.experts.{}.up_proj.weight"

    def move(tensors: dict[str, Tensor]) -> None:  # same number of elements, one more `up` and one less `gate`
        if "model.layers.1.mlp.experts.3.gate_proj.weight" in tensors:
            tensors[extra.format(4)] = tensors.pop("model.layers.1.mlp.experts.3.gate_proj.weight")

    for shard in base.glob("*.safetensors"):
        edit_tensors(shard, move)
    assert_refused(base, adapter, "experts.4.up_proj.weight is one expert more")


def test_refuses_a_base_of_other_shapes(broken: tuple[Path, Path]) -> None:
    base, adapter = broken
    name = "model.layers.1.mlp.experts.2.up_proj.weight"

    def transpose(tensors: dict[str, Tensor]) -> None:
        if name in tensors:
            tensors[name] = tensors[name].t().contiguous()

    for shard in base.glob("*.safetensors"):
        edit_tensors(shard, transpose)
    assert_refused(base, adapter, r"experts.2.up_proj.weight has shape \(64, 96\), which does not fit")


def test_refuses_files_that_are_missing_or_damaged(broken: tuple[Path, Path]) -> None:
    base, adapter = broken
    shard = sorted(base.glob("*.safetensors"))[1]
    content = shard.read_bytes()
    shard.write_bytes(content[:-2])
    assert_refused(base, adapter, f"{shard.name} is truncated.*bytes where its header says")
    shard.write_bytes(b"\x00" * 4)
    assert_refused(base, adapter, f"{shard.name} is truncated")
    shard.unlink()
    assert_refused(base, adapter, f"lacks {shard.name}")
    (base / "model.safetensors.index.json").unlink()
    (base / "pytorch_model.bin").write_text("")
    assert_refused(base, adapter, "neither model.safetensors nor .* pytorch_model.bin; save it as safetensors")


def test_refuses_results_that_are_not_finite(broken: tuple[Path, Path]) -> None:
    base, adapter = broken
    name = "base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight"
    edit_tensors(adapter / "adapter_model.safetensors", lambda tensors: tensors[name].fill_(float("nan")))
    assert_refused(base, adapter, "layers.1.self_attn.q_proj.weight is not finite after the merge")


def test_out_is_replaced_only_when_asked(broken: tuple[Path, Path], tmp_path: Path) -> None:
    base, adapter = broken
    out = tmp_path / "out"
    out.mkdir()
    merge_checkpoint(base, adapter, out)  # an empty folder is fine
    expected = digest(out)
    (out / "note").write_text("mine")
    with pytest.raises(MergeError, match="not empty"):
        merge_checkpoint(base, adapter, out)
    shard = next(base.glob("*.safetensors"))
    content = shard.read_bytes()
    shard.write_bytes(content[:-2])
    with pytest.raises(MergeError, match="truncated"):
        merge_checkpoint(base, adapter, out, overwrite=True)
    assert (out / "note").read_text() == "mine"  # a merge that fails leaves what was there
    shard.write_bytes(content)
    merge_checkpoint(base, adapter, out, overwrite=True)
    assert digest(out) == expected
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "base", "out"]


def test_never_writes_over_what_it_reads(broken: tuple[Path, Path], tmp_path: Path) -> None:
    base, adapter = broken
    before = digest(tmp_path)
    for out in (base, adapter, tmp_path, base / ".." / "base"):
        with pytest.raises(MergeError, match="would replace"):
            merge_checkpoint(base, adapter, out, overwrite=True)
    with pytest.raises(MergeError, match="not a folder"):
        merge_checkpoint(base, adapter, base / "config.json", overwrite=True)
    assert digest(tmp_path) == before
