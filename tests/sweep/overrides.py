"""What shrinking by field names alone does not get right."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel


def _embedded(model: PreTrainedModel, ids: Tensor) -> dict[str, Any]:
    """For a model that takes what another model has embedded."""
    return {"inputs_embeds": model.get_input_embeddings()(ids).detach()}


def _half_vision(model: PreTrainedModel, ids: Tensor) -> dict[str, Any]:
    """For a model with other experts for the tokens of an image."""
    return {"input_ids": ids, "moe_mm_token_type_ids": (ids % 2).int()}


def _with_images(model: PreTrainedModel, ids: Tensor) -> dict[str, Any]:
    """An image of 4 x 4 patches, which become 2 x 2 tokens, for each row."""
    vision, ids = model.config.vision_config, ids.clone()
    ids[:, 2:6] = model.config.image_token_id
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randn(32, vision.num_channels * vision.patch_size**2, generator=generator)
    return {"input_ids": ids, "pixel_values": pixels, "image_grid_thw": torch.tensor([[1, 4, 4], [1, 4, 4]])}


#: Fields by config class.
OVERRIDES: dict[str, dict[str, Any]] = {
    "AriaTextConfig": {"intermediate_size": 128},
    "DbrxAttentionConfig": {"rope_theta": 1e4, "kv_n_heads": 2, "clip_qkv": 8},
    "DbrxConfig": {"d_model": 64, "n_heads": 4, "n_layers": 2},
    "DbrxFFNConfig": {"ffn_hidden_size": 96, "moe_top_k": 2},
    "DeepseekOcr2SamVisionConfig": {"downsample_channels": [32, 32]},
    "DeepseekV4Config": {"mlp_layer_types": ["moe", "moe"]},
    "DiffusionGemmaConfig": {"canvas_length": 12},
    "DiffusionGemmaTextConfig": {"global_head_dim": 16},
    "Dots1Config": {"n_shared_experts": 1},
    "Dots3NoteAudioConfig": {"adapter_input_size": 32, "adapter_out_dim": 64},
    "Dots3NoteVisionConfig": {
        **{"num_hidden_layers": 2, "pyramid_num_routed": [-1, 4], "moe_intermediate_size": 96, "adapter_in_dim": 32},
        **{"adapter_out_dim": 64, "num_experts_per_tok": 2},
    },
    "Ernie4_5_VLMoeTextConfig": {
        **{"hidden_size": 256, "head_dim": 128, "num_attention_heads": 2, "num_key_value_heads": 2},
        **{"moe_intermediate_size": [96, 64]},
    },
    "Gemma4TextConfig": {"enable_moe_block": True, "global_head_dim": 16},
    "Glm4vMoeTextConfig": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}},
    "Glm5NextTextConfig": {"index_kpool": 4, "qk_rope_head_dim": 0},
    "HunYuanMoEV1Config": {"head_dim": 16},
    "InklingTextConfig": {"n_shared_experts": 2},
    "InklingVisionConfig": {"patch_size": 4, "num_hidden_layers": 5},
    "JetMoeConfig": {"kv_channels": 16},
    "Lfm2MoeConfig": {"layer_types": ["conv", "full_attention"]},
    "Llama4TextConfig": {"interleave_moe_layer_step": 2, "num_experts_per_tok": 1},
    "LongcatFlashConfig": {
        **{"num_layers": 1, "ffn_hidden_size": 96, "expert_ffn_hidden_size": 96, "head_dim": 8, "zero_expert_num": 2},
    },
    "MuseSparkAudioConfig": {"num_hidden_layers": 4, "hidden_sizes": [32] * 4, "out_hidden_size": 64},
    "NllbMoeConfig": {
        **{"d_model": 64, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128},
        **{"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_sparse_step": 1},
        **{"decoder_sparse_step": 1},
    },
    "Qwen3OmniMoeTalkerConfig": {"spatial_merge_size": 2},
    "Qwen3OmniMoeTalkerTextConfig": {"shared_expert_intermediate_size": 96},
    "Step3p7TextConfig": {"sliding_window": 8, "share_expert_dim": 96},
    "SwitchTransformersConfig": {
        **{"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 1, "num_decoder_layers": 1, "num_heads": 4},
        **{"num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1},
    },
    "ZayaConfig": {"num_experts_per_tok": 1},
}

#: Modules of models that by default hold the experts of another model.
ELSEWHERE: dict[str, list[str]] = {"DeepseekV3Experts": ["kimi_k25.modeling_kimi_k25"]}

#: Multimodal models that can hold many a language model, and one that they are tried with: model types.
NESTED = [
    ("internvl", "gpt_oss"),
    ("internvl", "qwen3_moe"),
    ("llava", "mixtral"),
    ("llava_next", "granitemoe"),
    ("mistral3", "deepseek_v3"),
    ("mistral3", "mistral4"),
]

#: Arguments of a forward by model class, from the model and token ids ``[2, T]``.
INPUTS: dict[str, Callable[[PreTrainedModel, Tensor], dict[str, Any]]] = {
    "Dots3NoteForConditionalGeneration": _with_images,
    "Ernie4_5_VLMoeForConditionalGeneration": _half_vision,
    "Qwen3OmniMoeTalkerForConditionalGeneration": _embedded,
}

# Three tables of exceptions. Each entry is checked to be still true: one that no longer is fails the sweep.

#: Models that are refused before any weight is packed, and the error.
REFUSED: dict[str, str] = {
    "SwitchTransformersForConditionalGeneration": "would stay in full precision",
}

#: Experts that bitsandbytes cannot replace, since the model's own code reads their weight. Where a model is refused
#: for them, it is loaded with this in ``modules_to_not_convert``, as the error advises.
LEFT_FLOAT: dict[str, str] = {"SwitchTransformersForConditionalGeneration": "wo"}

#: Models whose experts PEFT cannot adapt, packed or not, and the error it gives.
NO_LORA: dict[str, str] = {"DbrxForCausalLM": "has no attribute 'v1'"}
