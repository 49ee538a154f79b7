"""Bytes of the weights of known models, computed from their shapes on the meta device (nothing is downloaded or run).

`python benchmarks/weights_table.py` prints the Markdown table of the README.
"""

import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    GptOssConfig,
    MixtralConfig,
    OlmoeConfig,
    PreTrainedConfig,
    Qwen3MoeConfig,
)

from hf_qmoe import QMoEConfig
from hf_qmoe.experts import ExpertsNbit
from hf_qmoe.quantizer import prepare_model


#: Shapes as published with each checkpoint.
MODELS: dict[str, PreTrainedConfig] = {
    "OLMoE-1B-7B": OlmoeConfig(
        vocab_size=50304,
        hidden_size=2048,
        intermediate_size=1024,
        num_hidden_layers=16,
        num_attention_heads=16,
        num_experts=64,
        num_experts_per_tok=8,
    ),
    "gpt-oss-20b": GptOssConfig(
        vocab_size=201088,
        hidden_size=2880,
        intermediate_size=2880,
        num_hidden_layers=24,
        num_attention_heads=64,
        num_key_value_heads=8,
        head_dim=64,
        num_local_experts=32,
        num_experts_per_tok=4,
    ),
    "Qwen3-30B-A3B": Qwen3MoeConfig(
        vocab_size=151936,
        hidden_size=2048,
        intermediate_size=6144,
        moe_intermediate_size=768,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
    ),
    "Mixtral-8x7B": MixtralConfig(
        vocab_size=32000,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        num_local_experts=8,
        num_experts_per_tok=2,
    ),
}

#: Bytes per weight of a 4-bit block of 64 with one fp32 scale, as bitsandbytes' linears store it by default.
_LINEAR_4BIT = 0.5 + 4 / 64


def weight_bytes(config: PreTrainedConfig) -> dict[str, float]:
    """Bytes of all weights: in bf16, as stock bitsandbytes loads them in 4 bit, and as `QMoEConfig` does."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    bf16 = sum(p.nbytes for p in model.parameters())
    prepare_model(model, QMoEConfig(quantize_linears=False), pre_quantized=True)
    packed = sum(p.nbytes for m in model.modules() if isinstance(m, ExpertsNbit) for p in m.parameters(recurse=False))
    without_experts = sum(
        p.nbytes for m in model.modules() if not isinstance(m, ExpertsNbit) for p in m.parameters(recurse=False)
    )
    linear = sum(
        m.weight.numel() for name, m in model.named_modules() if isinstance(m, nn.Linear) and name != "lm_head"
    )
    saved = linear * (2 - _LINEAR_4BIT)
    return {"bf16": bf16, "bitsandbytes": bf16 - saved, "hf_qmoe": without_experts - saved + packed}


def table() -> str:
    """The README's table, in GB of 10^9 bytes."""
    lines = [
        "| weights in GB | bf16 | `BitsAndBytesConfig` 4-bit | `QMoEConfig()` |",
        "|---|---|---|---|",
    ]
    for name, config in MODELS.items():
        values = weight_bytes(config)
        lines.append(f"| {name} | " + " | ".join(f"{value / 1e9:.1f}" for value in values.values()) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
