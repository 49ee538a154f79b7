"""A merged checkpoint is the one that PEFT's own merge of the float model would save, in the layout it had."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    AutoModelForCausalLM,
    HrmTextConfig,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
)

from hf_qmoe.lora.merge_checkpoint import MergeReport, merge_checkpoint
from tests.lora.test_v4_adapters import RANK, V4Adapter, v4_module
from tests.support.checkpoints import assert_same_tensors, digest, load, logits, tensors_on_disk
from tests.support.merging import (
    EXPERTS,
    edit_json,
    edit_tensors,
    lora_config,
    peft_merged,
    randomized,
    save_adapter,
    save_base,
)
from tests.support.models import VOCAB, tiny_model


FAMILIES = ("qwen3_moe", "olmoe", "mixtral", "gpt_oss", "deepseek_v3")


def assert_is_peft_merge(base: Path, adapter: Path, tmp_path: Path, report: MergeReport) -> None:
    """`report` tells of a merge that equals PEFT's: same logits, and each tensor rounded once from its fp32 one."""
    oracle = peft_merged(base, adapter)
    merged = load(report.out, dtype=torch.float32)
    dtypes = {tensor.dtype for tensor in tensors_on_disk(base).values()}
    if dtypes == {torch.float32}:
        torch.testing.assert_close(logits(merged), logits(oracle), atol=1e-5, rtol=1e-5)
        assert (logits(merged) - logits(load(base, dtype=torch.float32))).abs().max() > 1e-2
    oracle.save_pretrained(tmp_path / "oracle")
    before, after, expected = (tensors_on_disk(path) for path in (base, report.out, tmp_path / "oracle"))
    assert after.keys() == before.keys() == expected.keys()
    changed = 0
    for name, tensor in before.items():
        assert (after[name].dtype, after[name].shape) == (tensor.dtype, tensor.shape)
        torch.testing.assert_close(after[name], expected[name].to(tensor.dtype), atol=1e-6, rtol=0)
        changed += not torch.equal(after[name], tensor)
    assert changed == report.merged_tensors


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_equals_the_merge_by_peft(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    base = save_base(tmp_path / "base", family, dtype)
    adapter = save_adapter(tmp_path / "adapter", base, lora_config(family))

    report = merge_checkpoint(base, adapter, tmp_path / "out")

    assert_is_peft_merge(base, adapter, tmp_path, report)
    for shard in base.glob("*.safetensors"):
        with safe_open(shard, "pt") as old, safe_open(report.out / shard.name, "pt") as new:
            assert list(new.keys()) == list(old.keys())
            assert new.metadata() == old.metadata()


@pytest.mark.parametrize(
    "fields",
    [
        {"rank_pattern": {"gate_up_proj": 6}, "alpha_pattern": {"down_proj": 20, "q_proj": 3}},
        {"use_rslora": True},
        {"target_parameters": EXPERTS[:1]},
        {"target_parameters": EXPERTS[1:], "target_modules": []},
        {"target_parameters": None, "target_modules": ["gate_proj", "up_proj", "down_proj", "q_proj"]},
        {"target_parameters": None, "target_modules": "all-linear"},
        {"layers_to_transform": [1], "target_parameters": None},
        {"target_modules": ["embed_tokens", "lm_head", "v_proj"]},
        {"modules_to_save": ["lm_head", "norm"]},
    ],
    ids=lambda fields: "-".join(fields),
)
def test_what_a_config_can_ask_for(fields: dict[str, Any], tmp_path: Path) -> None:
    base = save_base(tmp_path / "base", "qwen3_moe")
    adapter = save_adapter(tmp_path / "adapter", base, lora_config("qwen3_moe", **fields))
    assert_is_peft_merge(base, adapter, tmp_path, merge_checkpoint(base, adapter, tmp_path / "out"))


def test_v4_adapter_with_rslora(tmp_path: Path) -> None:
    """``alpha / sqrt(r)`` of each expert's own factors, which PEFT's conversion of gate and up misses by sqrt(2)."""
    base = save_base(tmp_path / "base", "qwen3_moe")
    v4 = V4Adapter("qwen3_moe", use_rslora=True)
    out = merge_checkpoint(base, v4.save(tmp_path / "adapter"), tmp_path / "out").out
    before, after = tensors_on_disk(base), tensors_on_disk(out)
    for projection in ("gate", "up", "down"):
        name = v4_module("qwen3_moe", 1, 2, projection)
        expected = before[f"{name}.weight"].double() + v4.delta(name) * RANK**0.5
        torch.testing.assert_close(after[f"{name}.weight"].double(), expected, rtol=1e-5, atol=1e-6)


def test_shared_experts_and_matrices_as_parameters(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base", "deepseek_v3")
    config = lora_config("deepseek_v3", target_parameters=[*EXPERTS, "shared_experts.down_proj.weight"])
    adapter = save_adapter(tmp_path / "adapter", base, config)
    assert_is_peft_merge(base, adapter, tmp_path, merge_checkpoint(base, adapter, tmp_path / "out"))


def test_dropout_of_training_does_not_matter(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base", "qwen3_moe")
    adapter = save_adapter(tmp_path / "adapter", base, lora_config("qwen3_moe"))
    plain = merge_checkpoint(base, adapter, tmp_path / "plain")
    edit_json(adapter / "adapter_config.json", lora_dropout=0.1)
    dropped = merge_checkpoint(base, adapter, tmp_path / "dropped")
    assert digest(dropped.out) == digest(plain.out)


def fused_on_disk(base: Path, target: Path) -> Path:
    """A one-file copy of a per-expert checkpoint that holds the model's own fused stacks."""
    model = load(base)
    shutil.copytree(base, target, ignore=shutil.ignore_patterns("*.safetensors*"))
    state = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    save_file(state, target / "model.safetensors", metadata={"format": "pt"})
    return target


def test_fused_stacks_stay_fused_and_one_file_stays_one_file(tmp_path: Path) -> None:
    per_expert = save_base(tmp_path / "per_expert", "qwen3_moe")
    base = fused_on_disk(per_expert, tmp_path / "base")
    adapter = save_adapter(tmp_path / "adapter", base, lora_config("qwen3_moe"))

    report = merge_checkpoint(base, adapter, tmp_path / "out")

    assert [file.name for file in report.out.glob("*.safetensors")] == ["model.safetensors"]
    assert tensors_on_disk(report.out).keys() == tensors_on_disk(base).keys()
    torch.testing.assert_close(
        logits(load(report.out, dtype=torch.float32)), logits(peft_merged(base, adapter)), atol=1e-5, rtol=1e-5
    )
    same = merge_checkpoint(per_expert, adapter, tmp_path / "out_per_expert")
    assert_same_tensors(load(report.out).state_dict(), load(same.out).state_dict())


def test_what_is_not_adapted_is_copied(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base", "qwen3_moe", torch.bfloat16)
    for name in ("tokenizer.json", "merges.txt", "README.md", "pytorch_model.bin", ".hidden"):
        (base / name).write_text(name)
    (base / "additional_chat_templates").mkdir()
    (base / "additional_chat_templates" / "rag.jinja").write_text("x")
    (base / "original").mkdir()
    adapter = save_adapter(tmp_path / "adapter", base, lora_config("qwen3_moe", layers_to_transform=[1]))

    report = merge_checkpoint(base, adapter, tmp_path / "new" / "out")

    before, after = digest(base), digest(report.out)
    assert before.keys() - after.keys() == {"pytorch_model.bin", ".hidden"}
    assert after.keys() < before.keys()
    assert all(after[name] == before[name] for name in after if not name.endswith(".safetensors"))
    assert report.bytes_written == sum(f.stat().st_size for f in report.out.glob("*.safetensors"))
    assert report.total_tensors == len(tensors_on_disk(base))
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["out"]


class LargestTensor(TorchDispatchMode):
    """Records the size of the largest tensor that an operation has as its result."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.device.type != "meta":
                self.bytes = max(self.bytes, leaf.untyped_storage().nbytes())
        return result


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_holds_one_expert_at_a_time(family: str, tmp_path: Path) -> None:
    changes = {"num_experts" if family == "qwen3_moe" else "num_local_experts": 16}
    base = save_base(tmp_path / "base", family, torch.bfloat16, **changes)
    adapter = save_adapter(tmp_path / "adapter", base, lora_config(family, r=1))
    with LargestTensor() as largest:
        merge_checkpoint(base, adapter, tmp_path / "out")
    one_expert = 2 * 96 * 64 * 4
    assert largest.bytes <= one_expert


def test_old_adapters_of_transposed_experts_are_fine(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base", "gpt_oss")
    adapter = save_adapter(tmp_path / "adapter", base, lora_config("gpt_oss"))
    edit_json(adapter / "adapter_config.json", peft_version="0.18.1")
    assert_is_peft_merge(base, adapter, tmp_path, merge_checkpoint(base, adapter, tmp_path / "out"))


def test_fused_parts_of_a_dense_model(tmp_path: Path) -> None:
    """The checkpoint fuses what the model keeps apart: gate and up, of which one is adapted."""
    config = HrmTextConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        head_dim=16,
        num_attention_heads=4,
        num_key_value_heads=4,
        num_layers_per_stack=1,
    )
    randomized(AutoModelForCausalLM.from_config(config)).save_pretrained(tmp_path / "base")
    base = tmp_path / "base"
    assert any("mlp.gate_up_proj" in name for name in tensors_on_disk(base))
    adapter = save_adapter(tmp_path / "adapter", base, LoraConfig(r=4, target_modules=["up_proj", "v_proj", "o_proj"]))
    assert_is_peft_merge(base, adapter, tmp_path, merge_checkpoint(base, adapter, tmp_path / "out"))


@pytest.mark.parametrize("transposed", [True, False])
def test_stacks_that_may_be_transposed_on_disk(transposed: bool, tmp_path: Path) -> None:
    """As in the published Qwen3-VL-MoE (or as saved since), whose converter decides by the shape."""
    text = tiny_model("qwen3_moe").config.to_dict() | {"model_type": "qwen3_vl_moe_text"}
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
    vision |= {"deepstack_visual_indexes": [0], "num_position_embeddings": 16}
    model = randomized(Qwen3VLMoeForConditionalGeneration(Qwen3VLMoeConfig(text_config=text, vision_config=vision)))
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    model.save_pretrained(base)

    def transpose(tensors: dict[str, Tensor]) -> None:
        tensors |= {n: t.transpose(1, 2).contiguous() for n, t in tensors.items() if ".experts." in n}

    if transposed:
        edit_tensors(base / "model.safetensors", transpose)
    adapted = get_peft_model(model, lora_config("qwen3_moe"))
    randomized(adapted)
    adapted.save_pretrained(adapter)
    out = merge_checkpoint(base, adapter, tmp_path / "out").out

    assert {n: t.shape for n, t in tensors_on_disk(out).items()} == {
        n: t.shape for n, t in tensors_on_disk(base).items()
    }
    merged = Qwen3VLMoeForConditionalGeneration.from_pretrained(out, dtype=torch.float32).state_dict()
    original = Qwen3VLMoeForConditionalGeneration.from_pretrained(base, dtype=torch.float32)
    oracle = PeftModel.from_pretrained(original, adapter).merge_and_unload().state_dict()
    for name, tensor in oracle.items():
        torch.testing.assert_close(merged[name], tensor, atol=1e-6, rtol=0)
