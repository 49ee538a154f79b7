"""A quantized linear loads what it wrote: bytes with their scales, or nothing."""

import copy

import bitsandbytes
import pytest
import torch
from torch import Tensor, nn

from hf_qmoe import QMoEConfig, matmul_4bit, quantize_experts
from hf_qmoe.linears import replace_linears
from tests.support.models import tiny_model, token_ids
from tests.support.oracle import assert_same_bits


def linear(seed: int, double_quant: bool = False, quant_type: str = "nf4") -> nn.Module:
    """A quantized linear with a bias, alone in its parent."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(128, 64))
    config = QMoEConfig(bnb_4bit_use_double_quant=double_quant, bnb_4bit_quant_type=quant_type)
    replace_linears(model, [], config, torch.float32)
    return model


@pytest.mark.parametrize("assign", [False, True], ids=["copied", "assigned"])
@pytest.mark.parametrize("strict", [False, True], ids=["lenient", "strict"])
@pytest.mark.parametrize("double_quant", [False, True], ids=["plain", "nested"])
def test_round_trip(double_quant: bool, strict: bool, assign: bool) -> None:
    """Output and gradient after loading are those of the module that was saved."""
    source, target = linear(1, double_quant), linear(2, double_quant)
    x = torch.randn(5, 128)
    assert not torch.equal(source(x), target(x))
    state = {name: value.clone() for name, value in source.state_dict().items()}
    target.load_state_dict(state, strict=strict, assign=assign)
    for module in (target, copy.deepcopy(target)):
        results = []
        for each in (source, module):
            leaf = x.clone().requires_grad_()
            out = each(leaf)
            results.append((out.detach(), torch.autograd.grad(out.square().sum(), leaf)[0]))
        for actual, expected in zip(results[1], results[0], strict=True):
            assert_same_bits(actual, expected)


def test_format_of_the_saved_one_is_taken() -> None:
    """Bytes of the other 4-bit format come with their own codebook."""
    source, target = linear(1, quant_type="fp4"), linear(2, quant_type="nf4")
    target.load_state_dict(source.state_dict())
    x = torch.randn(5, 128)
    assert_same_bits(target(x), source(x))


@pytest.mark.parametrize("strict", [False, True], ids=["lenient", "strict"])
def test_bytes_without_scales_are_refused(strict: bool) -> None:
    """Packed bytes alone raise, whatever `strict` is, and leave the module as it was."""
    source, target = linear(1), linear(2)
    x = torch.randn(5, 128)
    before: Tensor = target(x)
    with pytest.raises(RuntimeError, match="without their scales"):
        target.load_state_dict({"0.weight": source[0].weight, "0.bias": source[0].bias}, strict=strict)
    assert_same_bits(target(x), before)


@pytest.mark.parametrize("form", ["nbit", "parametrize"])
@pytest.mark.parametrize("strict", [False, True], ids=["lenient", "strict"])
def test_whole_model(form: str, strict: bool) -> None:
    """A quantized model takes another's state dict and is that model then."""
    config = QMoEConfig(experts_module=form, experts_double_quant=True, bnb_4bit_use_double_quant=True)
    source, target = (quantize_experts(tiny_model("qwen3_moe", seed=seed), config) for seed in (1, 2))
    ids = token_ids()
    expected = source(ids).logits
    assert not torch.equal(target(ids).logits, expected)
    target.load_state_dict(source.state_dict(), strict=strict)
    assert_same_bits(target(ids).logits, expected)


def test_vmap_over_inputs() -> None:
    """Where nothing trains, the product is mapped like bitsandbytes' own: all samples at once, it takes one by one.

    A library may add up a product of twenty rows in another order than one of five.
    """
    model, x = linear(1), torch.randn(4, 5, 128)
    weight = model[0].weight
    mapped = torch.vmap(lambda v: matmul_4bit(v, weight, weight.quant_state))(x)
    expected = torch.vmap(lambda v: bitsandbytes.matmul_4bit(v, weight, weight.quant_state))(x)
    torch.testing.assert_close(mapped, expected, rtol=1e-5, atol=5e-6)
