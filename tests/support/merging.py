"""Bases and adapters for tests of merging, and what PEFT itself makes of them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, DeepseekV3Config, PreTrainedConfig, PreTrainedModel

from tests.support.checkpoints import load
from tests.support.models import VOCAB, tiny_model


EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
ATTENTION = ["q_proj", "v_proj"]


def _deepseek_config(**changes: Any) -> PreTrainedConfig:
    """One dense layer, one with routed and shared experts."""
    return DeepseekV3Config(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        q_lora_rank=None,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=16,
        pad_token_id=0,
        **changes,
    )


def randomized(model: PreTrainedModel) -> PreTrainedModel:
    """`model` in eval mode with matrices large enough that every part of it changes the logits."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(std=0.1)
    return model.eval()


def save_base(path: Path, family: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
    """A checkpoint of several shards: one of the tiny families, or ``deepseek_v3``."""
    if family == "deepseek_v3":
        model = randomized(AutoModelForCausalLM.from_config(_deepseek_config(**changes)))
    else:
        model = tiny_model(family, **changes)
    model.to(dtype).save_pretrained(path, max_shard_size="100KB")
    assert len(list(path.glob("*.safetensors"))) > 2
    return path


def lora_config(family: str, **fields: Any) -> LoraConfig:
    """Experts and attention, unless `fields` say otherwise."""
    fields = {"r": 4, "lora_alpha": 12, "target_parameters": EXPERTS, "target_modules": ATTENTION} | fields
    if family == "deepseek_v3":
        fields["target_modules"] = ["q_proj", "kv_b_proj"]
    return LoraConfig(**fields)


def save_adapter(path: Path, base: Path, config: Any, std: float = 0.1) -> Path:
    """An adapter that stock PEFT makes for the float model, with random factors."""
    model = get_peft_model(load(base, dtype=torch.float32), config)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name or "modules_to_save" in name:
                parameter.normal_(std=std)
    model.save_pretrained(path)
    return path


def peft_merged(base: Path, adapter: Path) -> PreTrainedModel:
    """The oracle: PEFT's merge of the fp32 model."""
    return PeftModel.from_pretrained(load(base, dtype=torch.float32), adapter).merge_and_unload()


def edit_json(file: Path, **changes: Any) -> None:
    """Sets fields of a JSON object in place."""
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def edit_tensors(file: Path, edit: Callable[[dict[str, Tensor]], object]) -> None:
    """Runs `edit` on the tensors of one safetensors file, in place."""
    tensors = load_file(file)
    edit(tensors)
    save_file(tensors, file, metadata={"format": "pt"})
