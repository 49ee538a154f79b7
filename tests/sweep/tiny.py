"""The smallest model that holds an experts class, shrunk from its default config by the names of the fields."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

from tests.sweep.overrides import ELSEWHERE, INPUTS, OVERRIDES
from tests.sweep.registry import Found, decorated, model_classes


VOCAB, LENGTH = 128, 12
LARGEST = 20_000_000  # parameters; a field that was not shrunk shows here rather than in memory

#: Sizes of language models, by field. What is no field of a config, or `None` there, is left alone.
_TEXT = {
    "vocab_size": VOCAB,
    "unpadded_vocab_size": VOCAB,
    "vocab_size_per_layer_input": VOCAB,
    "max_position_embeddings": 512,
    "num_hidden_layers": 2,
    "sliding_window": 8,
    "sliding_window_size": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    # widths
    **dict.fromkeys(("hidden_size", "moe_hidden_size", "hidden_size_per_layer_input"), 64),
    **dict.fromkeys(("intermediate_size", "dense_intermediate_size", "moe_intermediate_size"), 96),
    **dict.fromkeys(("shared_expert_intermediate_size", "shared_experts_intermediate_size"), 96),
    **dict.fromkeys(("shared_intermediate_size", "moe_shared_expert_intermediate_size"), 96),
    **dict.fromkeys(("projector_hidden_size", "out_hidden_size", "thinker_hidden_size"), 64),
    "intermediate_size_mlp": 96,
    "router_hidden_size": 32,
    "swiglu_limit": 0.5,  # is met
    "use_cache": False,
    # experts
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"), 1),
    **dict.fromkeys(("n_group", "num_expert_group", "topk_group"), 1),
    # attention
    **dict.fromkeys(("num_attention_heads", "swa_num_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "swa_num_key_value_heads"), 2),
    **dict.fromkeys(("head_dim", "swa_head_dim", "global_head_dim", "v_head_dim", "qk_nope_head_dim"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "rotary_dim"), 8),
    "qk_head_dim": 24,
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "o_lora_rank"), 32),
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_topk": 4,
    # linear attention and state spaces
    **dict.fromkeys(("linear_num_key_heads", "linear_num_heads"), 2),
    "linear_num_value_heads": 4,
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim"), 16),
    **dict.fromkeys(("mamba_num_heads", "mamba_n_heads"), 8),
    **dict.fromkeys(("mamba_head_dim", "mamba_d_head", "mamba_d_state", "ssm_state_size", "mamba_dt_rank"), 16),
    "n_groups": 1,
    "mamba_chunk_size": 8,
    "chunk_size": 8,
}
#: The same, also where the default is `None`: four experts in the second of two layers.
_EXPERTS = {
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "top_k_experts"), 2),
    **dict.fromkeys(("intermediate_size", "moe_intermediate_size"), 96),
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers"), 1),
    "mlp_only_layers": [0],
    "mlp_layer_types": ["dense", "sparse"],
}
#: Sizes of vision and audio towers, which the sweep only carries along.
_TOWER = {
    **dict.fromkeys(("hidden_size", "d_model", "out_hidden_size", "embed_dim", "output_dim"), 32),
    **dict.fromkeys(("intermediate_size", "mlp_dim", "encoder_ffn_dim"), 64),
    **dict.fromkeys(("num_hidden_layers", "depth", "encoder_layers", "n_layers"), 1),
    **dict.fromkeys(("num_attention_heads", "num_heads", "encoder_attention_heads", "num_key_value_heads"), 2),
    "head_dim": 16,
    "vocab_size": VOCAB,
    "text_hidden_size": 64,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [],
    "downsample_hidden_size": 32,
    "downsample_channels": [32, 32],
    **dict.fromkeys(("output_channels", "decoder_dim", "codebook_size"), 32),
    **dict.fromkeys(("projection_hidden_dim", "projection_intermediate_size"), 64),
    **dict.fromkeys(("projector_input_dim", "projector_output_dim", "vision_output_dim"), 64),
}
_TOWERS = ("vision", "audio", "code2wav", "encoder")


def _is_token(name: str) -> bool:
    return name.endswith(("_token_id", "_token_index", "_bos_id", "_pad_id", "_nothink_id", "_eos_id", "_image_id"))


def shrunk(cls: type[PreTrainedConfig], **changes: Any) -> PreTrainedConfig:
    """A tiny config of `cls`, its sub-configs too, with `changes`."""
    default = vars(cls())  # reading attributes raises for those that vary from layer to layer
    is_tower = any(word in cls.__name__.lower() for word in _TOWERS)
    table: Mapping[str, Any] = _TOWER if is_tower else _TEXT
    values: dict[str, Any] = {}
    tokens = iter(range(VOCAB - 1, 0, -1))
    for field in dataclasses.fields(cls):
        value = None if field.default is dataclasses.MISSING else field.default
        if isinstance(default.get(field.name), PreTrainedConfig):
            values[field.name] = shrunk(type(default[field.name]))
        elif field.name in _EXPERTS and not is_tower:
            values[field.name] = _EXPERTS[field.name]
        elif field.name in table and value is not None:
            values[field.name] = table[field.name]
        elif _is_token(field.name) and isinstance(value, int):
            values[field.name] = next(tokens)
    if values.get("kv_lora_rank") is not None:  # latent attention has no groups of heads
        values["num_key_value_heads"] = values["num_attention_heads"]
    return cls(**(values | OVERRIDES.get(cls.__name__, {}) | changes))


def holds(model: nn.Module, name: str) -> bool:
    """Whether a model has a module of the class called `name`."""
    return any(type(module).__name__ == name for module in model.modules())


def outline(cls: type[PreTrainedModel], config: PreTrainedConfig) -> PreTrainedModel:
    """The model on the meta device.

    Raises:
        ValueError: it would not be tiny.
    """
    with torch.device("meta"):
        model = cls._from_config(config)
    if model.num_parameters() > LARGEST:
        raise ValueError(f"{cls.__name__} has {model.num_parameters()} parameters")
    return model


def find_models(found: Found) -> dict[type[PreTrainedModel], PreTrainedConfig]:
    """Model classes whose tiny model holds the experts, with its config.

    Of the module that defines the experts: the causal language model and every multimodal model; where there is
    neither, one other. Of modules that `ELSEWHERE` names, the same.

    Raises:
        LookupError: none does; says what became of each.
    """
    models: dict[type[PreTrainedModel], PreTrainedConfig] = {}
    others = []
    for cls in (c for module in (found.module, *ELSEWHERE.get(found.name, ())) for c in model_classes(module)):
        is_main = cls.__name__.endswith(("ForCausalLM", "ForConditionalGeneration"))
        if issubclass(cls, tuple(models)) or (models and not is_main):
            continue  # another name of a class that was found, or a smaller part of it
        config = shrunk(cls.config_class)
        if holds(outline(cls, config), found.name):
            models[cls] = config
        else:
            others.append(cls.__name__)
    if not models:
        raise LookupError(f"no model holds {found.name}, neither of {others}")
    return models


def nested_model(outer: str, inner: str) -> tuple[Found, type[PreTrainedModel], PreTrainedConfig]:
    """A multimodal model around another language model, both by model type, and the experts that this one has."""
    text, whole = CONFIG_MAPPING[inner], CONFIG_MAPPING[outer]
    package = text.__module__.split(".")[-2]
    found = next(found for found in decorated().values() if found.package == package)
    return found, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[whole], shrunk(whole, text_config=shrunk(text))


def build(cls: type[PreTrainedModel], config: PreTrainedConfig, seed: int = 0) -> PreTrainedModel:
    """A float32 model whose weights are so large that every part of it changes the output."""
    torch.manual_seed(seed)
    model = cls._from_config(config, dtype=torch.float32, experts_implementation="eager")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2 or name.endswith(("bias", "sinks")):
                parameter.normal_(std=0.1, generator=generator)
    return model.eval()


def inputs(model: PreTrainedModel) -> dict[str, Any]:
    """Arguments for a forward: token ids, or what the table says for a class."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, VOCAB // 2, (2, LENGTH), generator=generator)
    extra = INPUTS.get(type(model).__name__)
    if extra is not None:
        return extra(model, ids)
    return {"input_ids": ids} | ({"decoder_input_ids": ids} if model.config.is_encoder_decoder else {})
