"""A parametrization that someone else puts on packed weights is refused: it would train without them, in silence."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn.utils import parametrize
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from hf_qmoe import QMoEConfig, quantize_experts
from tests.support.experts import inputs, packed_experts
from tests.support.models import tiny_model, token_ids
from tests.support.oracle import assert_same_bits


class Unchanged(nn.Module):
    """A parametrization that returns what it gets."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight


@pytest.mark.parametrize("name", ["gate_up_proj", "down_proj", "gate_up_proj_absmax", "down_proj_nested_absmax"])
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_a_parametrization_is_refused_by_forward(name: str, mode: str) -> None:
    """Forward raises while it is there, in any mode; once it is removed, the module is what it was."""
    packed = packed_experts(GptOssExperts, double_quant=True)
    arguments = inputs()
    expected, kind = packed(*arguments), type(packed)
    parametrize.register_parametrization(packed, name, Unchanged(), unsafe=True)
    getattr(packed, mode)()
    with pytest.raises(RuntimeError, match="parametrization"), torch.set_grad_enabled(mode == "train"):
        packed(*arguments)
    with pytest.raises(RuntimeError, match="parametrization"), parametrize.cached():
        packed(*arguments)
    parametrize.remove_parametrizations(packed, name)
    assert type(packed) is kind
    assert_same_bits(packed(*arguments), expected)


TARGETS = {
    "gate_up": ["experts.gate_up_proj"],
    "down": ["experts.down_proj"],
    "both": ["experts.gate_up_proj", "experts.down_proj"],
}


@pytest.mark.usefixtures("stock_peft")
@pytest.mark.parametrize("target_modules", [["q_proj"], []], ids=["with-attention", "experts-alone"])
@pytest.mark.parametrize("target_parameters", TARGETS.values(), ids=TARGETS)
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_stock_peft_is_refused(family: str, target_parameters: list[str], target_modules: list[str]) -> None:
    """PEFT's own `target_parameters` on packed experts raises in the first forward, and in each later one."""
    model = quantize_experts(tiny_model(family), QMoEConfig(quantize_linears=False, experts_exact=True))
    ids = token_ids()
    expected = model(input_ids=ids).logits
    adapted = get_peft_model(
        model, LoraConfig(r=4, target_modules=target_modules, target_parameters=target_parameters)
    )
    for _ in range(2):
        with pytest.raises(RuntimeError, match="import hf_qmoe"):
            adapted(input_ids=ids, labels=ids)
    assert_same_bits(adapted.unload()(input_ids=ids).logits, expected)


def test_attention_adapters_are_not_refused() -> None:
    """`target_modules` beside packed experts trains: every factor gets a gradient through them."""
    model = quantize_experts(tiny_model("qwen3_moe"), QMoEConfig(quantize_linears=False))
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False))
    ids = token_ids()
    adapted(input_ids=ids, labels=ids).loss.backward()
    factors = [p for name, p in adapted.named_parameters() if "lora_" in name]
    assert len(factors) == 4
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in factors)
