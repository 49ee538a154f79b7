"""Tiny models of many families, and by hand what LoRA's targets are in each."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma4TextConfig,
    LlamaConfig,
    NemotronHConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen3_5MoeTextConfig,
    Qwen3NextConfig,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
)
from transformers.models.afmoe import AfmoeConfig
from transformers.models.deepseek_v32 import DeepseekV32Config
from transformers.models.llama4 import Llama4TextConfig

from tests.support.models import FAMILIES, VOCAB, tiny_config


_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
_TEXT = {"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2} | _HEADS
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96}
_LINEAR_ATTENTION = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16}
_LINEAR_ATTENTION |= {"linear_value_head_dim": 16, "layer_types": ["linear_attention", "full_attention"]}


def _nemotron_h() -> PreTrainedConfig:
    changes = {"layers_block_type": ["mamba", "moe", "attention"], "n_routed_experts": 4, "moe_intermediate_size": 96}
    changes |= {"mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 1, "ssm_state_size": 16}
    fields = {name: value for name, value in _TEXT.items() if name != "num_hidden_layers"}
    return NemotronHConfig(**fields, **changes, moe_shared_expert_intermediate_size=64, n_shared_experts=1)


def _deepseek_v3() -> PreTrainedConfig:
    mla = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
    moe = {"n_routed_experts": 4, "moe_intermediate_size": 96, "n_group": 1, "topk_group": 1}
    fields = _TEXT | {"num_key_value_heads": 4, "num_hidden_layers": 3}
    del fields["head_dim"]
    return DeepseekV3Config(**fields, **mla, **moe, num_experts_per_tok=2, first_k_dense_replace=1)


def _deepseek_v32() -> PreTrainedConfig:
    """Sparse attention, whose indexer chooses tokens with linears of its own."""
    fields = _deepseek_v3().to_dict()
    indexer = {"index_n_heads": 2, "index_head_dim": 16, "index_topk": 4}
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    names += ("num_key_value_heads", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim")
    names += ("v_head_dim", "n_routed_experts", "moe_intermediate_size", "n_group", "topk_group")
    return DeepseekV32Config(**{n: fields[n] for n in names}, **indexer, first_k_dense_replace=1)


def _gemma4() -> PreTrainedConfig:
    text = _TEXT | {"layer_types": ["sliding_attention", "full_attention"], "hidden_size_per_layer_input": 16}
    moe = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 96}
    return Gemma4TextConfig(**text, **moe, global_head_dim=16, vocab_size_per_layer_input=VOCAB)


def _llama4() -> PreTrainedConfig:
    sizes = {"intermediate_size_mlp": 96, "num_local_experts": 4, "num_experts_per_tok": 1}
    return Llama4TextConfig(**_TEXT, **sizes, interleave_moe_layer_step=2)


def _afmoe() -> PreTrainedConfig:
    """Attention has a linear called ``gate_proj``, and the router one called ``gate``."""
    layers = {"num_dense_layers": 1, "num_shared_experts": 1, "layer_types": ["full_attention"] * 2}
    return AfmoeConfig(**_TEXT, **_MOE, **layers)


def _qwen3_vl_moe() -> PreTrainedConfig:
    vision = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 64, "out_hidden_size": 64}
    vision |= {"num_position_embeddings": 16, "deepstack_visual_indexes": []}
    return Qwen3VLMoeConfig(text_config=_TEXT | _MOE, vision_config=vision)


class Family(NamedTuple):
    """A config and, as patterns of whole module or parameter names, what is to be found in its model."""

    config: Callable[[], PreTrainedConfig]
    attention: str
    experts: tuple[str, ...]
    shared_experts: str = "none"
    dense: str = "none"


_QKVO = r"model\.layers\.\d\.self_attn\.[qkvo]_proj"
_GATED = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
_MLP = "(gate|up|down)_proj"
_DELTA = r"model\.layers\.0\.linear_attn\.(in_proj_\w+|out_proj)|model\.layers\.1\.self_attn\.[qkvo]_proj"
CASES: dict[str, Family] = {
    **{family: Family(lambda family=family: tiny_config(family), _QKVO, _GATED) for family in FAMILIES},
    "deepseek_v3": Family(
        _deepseek_v3,
        r"model\.layers\.\d\.self_attn\.(q_a_proj|q_b_proj|kv_a_proj_with_mqa|kv_b_proj|o_proj)",
        _GATED,
        rf"model\.layers\.[12]\.mlp\.shared_experts\.{_MLP}",
        rf"model\.layers\.0\.mlp\.{_MLP}",
    ),
    "deepseek_v32": Family(
        _deepseek_v32,
        r"model\.layers\.\d\.self_attn\.(q_a_proj|q_b_proj|kv_a_proj_with_mqa|kv_b_proj|o_proj)",
        _GATED,
        rf"model\.layers\.[12]\.mlp\.shared_experts\.{_MLP}",
        rf"model\.layers\.0\.mlp\.{_MLP}",
    ),
    "qwen2_moe": Family(
        lambda: Qwen2MoeConfig(**_TEXT, **_MOE, shared_expert_intermediate_size=96, mlp_only_layers=[0]),
        _QKVO,
        _GATED,
        rf"model\.layers\.1\.mlp\.shared_expert\.{_MLP}",
        rf"model\.layers\.0\.mlp\.{_MLP}",
    ),
    "qwen3_next": Family(
        lambda: Qwen3NextConfig(**_TEXT, **_MOE, **_LINEAR_ATTENTION, shared_expert_intermediate_size=96),
        _DELTA,
        _GATED,
        rf"model\.layers\.\d\.mlp\.shared_expert\.{_MLP}",
    ),
    "qwen3_5_moe": Family(
        lambda: Qwen3_5MoeTextConfig(**_TEXT, **_MOE, **_LINEAR_ATTENTION, shared_expert_intermediate_size=96),
        _DELTA,
        _GATED,
        rf"model\.layers\.\d\.mlp\.shared_expert\.{_MLP}",
    ),
    "llama4": Family(
        _llama4,
        _QKVO,
        ("feed_forward.experts.gate_up_proj", "feed_forward.experts.down_proj"),
        rf"model\.layers\.1\.feed_forward\.shared_expert\.{_MLP}",
        rf"model\.layers\.0\.feed_forward\.{_MLP}",
    ),
    "nemotron_h": Family(  # a fused kernel reads the weight of the mixer's out_proj
        _nemotron_h,
        r"model\.layers\.0\.mixer\.in_proj|model\.layers\.2\.mixer\.[qkvo]_proj",
        ("mixer.experts.up_proj", "mixer.experts.down_proj"),
        r"model\.layers\.1\.mixer\.shared_experts\.(up|down)_proj",
    ),
    "gemma4": Family(
        _gemma4,
        _QKVO,
        ("experts.gate_up_proj", "experts.down_proj"),
        dense=rf"model\.layers\.\d\.mlp\.{_MLP}",
    ),
    "afmoe": Family(
        _afmoe,
        r"model\.layers\.\d\.self_attn\.([qkvo]|gate)_proj",
        _GATED,
        rf"model\.layers\.1\.mlp\.shared_experts\.{_MLP}",
        rf"model\.layers\.0\.mlp\.{_MLP}",
    ),
    "qwen3_vl_moe": Family(_qwen3_vl_moe, r"model\.language_model\.layers\.\d\.self_attn\.[qkvo]_proj", _GATED),
    "dense": Family(lambda: LlamaConfig(**_TEXT), _QKVO, (), dense=rf"model\.layers\.\d\.mlp\.{_MLP}"),
}


def build(family: str) -> PreTrainedModel:
    """A float model of a family."""
    torch.manual_seed(0)
    cls = Qwen3VLMoeForConditionalGeneration._from_config if family == "qwen3_vl_moe" else None
    return (cls or AutoModelForCausalLM.from_config)(CASES[family].config())
