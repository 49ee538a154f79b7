"""Case 4: a real GGUF file of a MoE, and fp8 in the family that publishes it.

gpt-oss in mxfp4: tests/sources/test_mxfp4.py; fp8 in other families: tests/sources/test_fp8.py; methods that are
refused: tests/sources/test_refusals.py.
"""

import re
from pathlib import Path

import gguf
import pytest
import torch
from bitsandbytes.nn import Linear4bit
from torch import Tensor
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedModel

from hf_qmoe import QMoEConfig, disable, enable, quantize_experts
from tests.cases.helpers import packed_bytes, tensors_of
from tests.lora.families import build
from tests.sources.checkpoints import fp8_checkpoint
from tests.support.checkpoints import assert_same_tensors, edited, load, logits, tensors_on_disk
from tests.support.families import varied
from tests.support.models import tiny_model
from tests.sweep.oracle import reference


FILE = "tiny.gguf"
WIDTH = 768  # what transformers takes where a GGUF's config says nothing that it reads
_LAYER = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate": "ffn_gate_inp",
}
_OTHER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def write_gguf(path: Path, model: PreTrainedModel, kind: str) -> dict[str, Tensor]:
    """`model` as llama.cpp stores it, linears and experts in the type `kind`; returns what that keeps, by name."""
    config, kept = model.config, {}
    writer = gguf.GGUFWriter(path, "qwen3moe")
    writer.add_name("tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    writer.add_expert_count(config.num_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)

    def add(name: str, weight: Tensor) -> Tensor:
        values = weight.detach().contiguous().numpy()
        if kind == "F32" or not re.search("_exps|attn_[qkvo](utput)?$", name):
            writer.add_tensor(f"{name}.weight", values)
            return weight.detach()
        stored = gguf.GGMLQuantizationType[kind]
        codes = gguf.quantize(values, stored)
        writer.add_tensor(f"{name}.weight", codes, raw_dtype=stored)
        return torch.from_numpy(gguf.dequantize(codes, stored))

    for name, weight in model.state_dict().items():
        match = re.fullmatch(r"model\.layers\.(\d)\.(.*)", name)
        if match is None:
            kept[name] = add(_OTHER[name.removesuffix(".weight")], weight)
        elif name.endswith("gate_up_proj"):
            halves = zip(("gate", "up"), weight.chunk(2, dim=1), strict=True)
            kept[name] = torch.cat([add(f"blk.{match[1]}.ffn_{n}_exps", half) for n, half in halves], dim=1)
        elif name.endswith("down_proj"):
            kept[name] = add(f"blk.{match[1]}.ffn_down_exps", weight)
        else:
            kept[name] = add(f"blk.{match[1]}.{_LAYER[match[2].removesuffix('.weight')]}", weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return kept


def gguf_model() -> PreTrainedModel:
    """What is written."""
    return tiny_model("qwen3_moe", moe_intermediate_size=WIDTH, norm_topk_prob=True)


@pytest.mark.parametrize("experts_module", ["nbit", "parametrize"])
@pytest.mark.parametrize("kind", ["F32", "Q8_0", "Q4_1"])
def test_gguf_is_packed_in_memory(kind: str, experts_module: str, tmp_path: Path) -> None:
    """Loaded without a quantization config, then `quantize_experts`: as any other float model, saved and reloaded."""
    kept = write_gguf(tmp_path / FILE, gguf_model(), kind)
    exact, model = (
        AutoModelForCausalLM.from_pretrained(
            tmp_path, gguf_file=FILE, dtype=torch.float32, experts_implementation="eager"
        )
        for _ in range(2)
    )
    assert_same_tensors(dict(exact.state_dict()), kept)
    quantize_experts(model, QMoEConfig(experts_module=experts_module))
    packed = tensors_of(model)
    stacks = [name for name, tensor in kept.items() if tensor.ndim == 3]
    assert len(stacks) == 4
    for name in stacks:
        assert packed[name].dtype == torch.uint8
        assert torch.equal(packed[name].flatten(1), packed_bytes(kept[name]))
    assert sum(isinstance(module, Linear4bit) for module in model.modules()) == 8
    expected = logits(reference(exact, model))
    assert (logits(model) - expected).abs().max() <= 1e-5 * expected.abs().max()
    model.save_pretrained(tmp_path / "packed")
    again = load(tmp_path / "packed", dtype=torch.float32)
    assert_same_tensors(tensors_of(again), packed)
    model.dequantize().save_pretrained(tmp_path / "float")
    restored = load(tmp_path / "float", dtype=torch.float32)
    assert not hasattr(restored.config, "quantization_config")
    assert (logits(restored) - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("enabled", [False, True], ids=["own config", "enabled"])
def test_gguf_with_a_config(enabled: bool, tmp_path: Path) -> None:
    """One error, which names the argument that cannot be combined; also for bitsandbytes' after `enable`."""
    write_gguf(tmp_path / FILE, gguf_model(), "F32")
    config = BitsAndBytesConfig(load_in_4bit=True) if enabled else QMoEConfig()
    if enabled:
        enable()
    try:
        with pytest.raises(ValueError, match=r"GGUF file.*`quantization_config`") as error:
            AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=FILE, quantization_config=config)
    finally:
        if enabled:
            disable()
    assert error.value.__cause__ is None


@pytest.mark.parametrize("experts_module", ["nbit", "parametrize"])
def test_fp8_of_deepseek_v3(experts_module: str, tmp_path: Path) -> None:
    """Routed, shared and dense experts with ``weight_scale_inv``: bitsandbytes' bytes of the dequantized values."""
    varied(build("deepseek_v3")).to(torch.bfloat16).save_pretrained(tmp_path / "source")
    path, weights = fp8_checkpoint(tmp_path / "source", tmp_path / "fp8", lambda name: ".mlp." in name)
    assert any(name.endswith("shared_experts.up_proj.weight_scale_inv") for name in tensors_on_disk(path))
    config = QMoEConfig(experts_module=experts_module)
    model, info = load(path, config, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    exact = load(
        edited(tmp_path / "source", tmp_path / "float", lambda tensors: tensors.update(weights)), dtype=torch.float32
    )
    packed = tensors_of(model)
    stacks = {name: p for name, p in exact.named_parameters() if p.ndim == 3}
    assert len(stacks) == 4
    for name, weight in stacks.items():
        assert torch.equal(packed[name].flatten(1), packed_bytes(weight)), name
    expected = logits(reference(exact, model))
    assert (logits(model) - expected).abs().max() <= 1e-5 * expected.abs().max()
