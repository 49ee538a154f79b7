"""`examples/upcycle.py`: the answers are known, in full precision and in 4 bit."""

import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM, MixtralForCausalLM

from hf_qmoe import QMoEConfig


sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from upcycle import upcycle_by_copying, upcycle_by_cutting


Upcycle = Callable[[LlamaForCausalLM], MixtralForCausalLM]
WAYS = pytest.mark.parametrize("upcycle", [upcycle_by_copying, upcycle_by_cutting])


def tiny_llama(**changes: object) -> LlamaForCausalLM:
    """Two layers with grouped heads, weights large enough to matter, and norms that are not all ones."""
    fields = {
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-4,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    }
    model = LlamaForCausalLM(LlamaConfig(**(fields | changes)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(mean=float(parameter.ndim == 1), std=0.1)
    return model.eval()


@torch.no_grad()
def logits(model: torch.nn.Module) -> torch.Tensor:
    """Those of 2 x 20 fixed tokens; `eager` because grouped products know no float64."""
    if isinstance(model, MixtralForCausalLM):
        model.set_experts_implementation("eager")
    tokens = torch.randint(128, (2, 20), generator=torch.Generator().manual_seed(1))
    return model(tokens, use_cache=False).logits


@WAYS
@pytest.mark.parametrize("tied", [True, False])
def test_logits_are_those_of_the_dense_model(upcycle: Upcycle, tied: bool) -> None:
    dense = tiny_llama(tie_word_embeddings=tied).double()
    # In float64 only the router's weights, which Mixtral computes in float32, are rounded; those of a zero router
    # are exact.
    tolerance = 1e-6 if upcycle is upcycle_by_copying else 1e-12
    torch.testing.assert_close(logits(upcycle(dense)), logits(dense), rtol=tolerance, atol=tolerance)


@WAYS
def test_experts_are_used_and_differ_where_they_should(upcycle: Upcycle) -> None:
    model = upcycle(tiny_llama())
    routed = []
    model.model.layers[0].mlp.gate.register_forward_hook(lambda module, inputs, output: routed.append(output[2]))
    logits(model)
    assert routed[0].unique().tolist() == [0, 1, 2, 3]
    stacks = model.model.layers[1].mlp.experts.gate_up_proj
    assert torch.equal(stacks[0], stacks[3]) == (upcycle is upcycle_by_copying)


def test_the_seed_chooses_the_router() -> None:
    dense = tiny_llama()
    routers = [upcycle_by_copying(dense, seed=seed).model.layers[0].mlp.gate.weight for seed in (0, 0, 1)]
    assert torch.equal(routers[0], routers[1])
    assert not torch.equal(routers[0], routers[2])


@WAYS
def test_the_dense_model_is_not_changed_and_shares_no_memory(upcycle: Upcycle) -> None:
    dense = tiny_llama()
    before = {name: tensor.clone() for name, tensor in dense.state_dict().items()}
    model = upcycle(dense)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert all(torch.equal(tensor, before[name]) for name, tensor in dense.state_dict().items())


@WAYS
def test_checkpoints_have_mixtrals_layout_and_reload(upcycle: Upcycle, tmp_path: Path) -> None:
    model = upcycle(tiny_llama()).to(torch.bfloat16)
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    shards = list(tmp_path.glob("*.safetensors"))
    assert len(shards) > 1
    names = {name for shard in shards for name in load_file(shard)}
    pattern = re.compile(r"model\.layers\.[01]\.block_sparse_moe\.experts\.[0-3]\.w[123]\.weight")
    assert len([name for name in names if pattern.fullmatch(name)]) == 2 * 4 * 3
    assert not [name for name in names if "gate_up_proj" in name or ".mlp." in name]
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert all(torch.equal(tensor, reloaded.state_dict()[name]) for name, tensor in model.state_dict().items())


def test_packed_copies_answer_as_the_dense_model_packed_by_bitsandbytes(tmp_path: Path) -> None:
    # Whole blocks in each row: bitsandbytes' dequantization on a CPU is wrong where the block size does not divide K.
    dense = tiny_llama(intermediate_size=128)
    dense.save_pretrained(tmp_path / "dense")
    upcycle_by_copying(dense).save_pretrained(tmp_path / "moe")
    stock_config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    stock = LlamaForCausalLM.from_pretrained(tmp_path / "dense", quantization_config=stock_config, dtype=torch.float32)
    stock.train()  # in eval mode bitsandbytes rounds the scales to bf16 on some CPUs
    packed = MixtralForCausalLM.from_pretrained(
        tmp_path / "moe", quantization_config=QMoEConfig(), dtype=torch.float32
    )
    assert (logits(stock) - logits(dense)).abs().max() > 0.01  # so that packing is seen at all
    torch.testing.assert_close(logits(packed), logits(stock), rtol=1e-5, atol=1e-5)


def test_what_cannot_be_upcycled_raises() -> None:
    with pytest.raises(ValueError, match="biases"):
        upcycle_by_copying(tiny_llama(mlp_bias=True))
    with pytest.raises(ValueError, match="96 cannot be cut into 5"):
        upcycle_by_cutting(tiny_llama(), num_experts=5)
