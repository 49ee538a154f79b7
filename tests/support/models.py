"""Tiny models of the four families the loading tests run on, built from configs (no download)."""

from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    GptOssConfig,
    MixtralConfig,
    OlmoeConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3MoeConfig,
)


VOCAB = 128
_SHARED = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FAMILIES = ("qwen3_moe", "olmoe", "mixtral", "gpt_oss")
#: Families whose checkpoints hold one tensor per expert and projection; gpt-oss holds fused stacks.
PER_EXPERT_FAMILIES = ("qwen3_moe", "olmoe", "mixtral")
NUM_EXPERTS = 4


def tiny_config(family: str, **changes: object) -> PreTrainedConfig:
    """The tiny config: hidden 64, moe intermediate 96, 4 experts, top-2, 2 layers."""
    fields: dict[str, object] = dict(_SHARED)
    if family == "qwen3_moe":
        cls = Qwen3MoeConfig
        fields |= {"intermediate_size": 128, "moe_intermediate_size": 96, "num_experts": NUM_EXPERTS, "head_dim": 16}
    elif family == "olmoe":
        cls = OlmoeConfig
        fields |= {"intermediate_size": 96, "num_experts": NUM_EXPERTS}
    elif family == "mixtral":
        cls = MixtralConfig
        fields |= {"intermediate_size": 96, "num_local_experts": NUM_EXPERTS}
    elif family == "gpt_oss":
        cls = GptOssConfig
        fields |= {"intermediate_size": 96, "num_local_experts": NUM_EXPERTS, "head_dim": 16}
    else:
        raise ValueError(family)
    return cls(**(fields | changes))


def tiny_model(family: str, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: object) -> PreTrainedModel:
    """A float model with weights large enough that every part of it changes the logits."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(tiny_config(family, **changes), experts_implementation="eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2 or name.endswith(("bias", "sinks")):
                parameter.normal_(std=0.1)
    return model.to(dtype).eval()


def save_tiny(path: Path, family: str, dtype: torch.dtype = torch.bfloat16, **changes: object) -> Path:
    """Saves `tiny_model` in the family's original layout on disk; returns `path`."""
    tiny_model(family, dtype=dtype, **changes).save_pretrained(path)
    return path


def token_ids(batch: int = 2, length: int = 12, seed: int = 0) -> torch.Tensor:
    """Random token ids ``[batch, length]`` in the tiny vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB, (batch, length), generator=generator)


def experts_of(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Experts modules of a model by name, float or packed."""
    return {n: m for n, m in model.named_modules() if hasattr(m, "has_gate") and hasattr(m, "is_transposed")}
