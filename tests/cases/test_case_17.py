"""Case 17 with all linears quantized, as a user has them: the adapted set is stock PEFT's on the bf16 model.

Many more configs and families, with float linears: tests/lora/test_adapted_set.py.
"""

import copy
import warnings
from functools import cache
from typing import Any

import pytest
import torch
from bitsandbytes.nn import Linear4bit
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import PreTrainedModel

from hf_qmoe import QMoEConfig, quantize_experts
from tests.cases.helpers import tensors_of
from tests.lora.families import build
from tests.support.families import randomize_by_name, varied
from tests.support.lora import lora_tensors, loss_and_gradients


FAMILIES = ("qwen3_moe", "qwen3_5_moe", "gemma4", "gpt_oss", "llama4", "nemotron_h", "deepseek_v3", "mixtral")
TARGETS: dict[str, dict[str, Any]] = {
    "projections": {"target_modules": ["gate_proj", "up_proj", "down_proj"]},
    "suffixes": {"target_parameters": ["experts.gate_up_proj", "experts.up_proj", "experts.down_proj"]},
    "all-linear": {"target_modules": "all-linear"},
    "all-linear-but-mamba": {"target_modules": "all-linear", "exclude_modules": r".*\.out_proj"},
}
#: What PEFT refuses, with the start of its message: names that are nowhere, a projection whose weight a kernel reads.
REFUSED = {
    ("gpt_oss", "projections"): "Target modules",
    ("mixtral", "projections"): "Target modules",
    ("nemotron_h", "all-linear"): "[PEFT:PeftType.LORA] Module 'out_proj' is incompatible",
}


def attached(model: nn.Module, targets: dict[str, Any]) -> PeftModel | Exception:
    """The model with a seeded adapter, or what PEFT raised."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return get_peft_model(model, LoraConfig(r=3, lora_alpha=6, **copy.deepcopy(targets)))
        except ValueError as error:
            return error


def layers(model: PeftModel) -> list[tuple[str, int, float]]:
    """Adapted modules, with rank and scaling."""
    found = [(n, m) for n, m in model.named_modules() if hasattr(m, "lora_A")]
    return [(n, m.r["default"], m.scaling["default"]) for n, m in found]


@cache
def _pair(family: str, form: str) -> tuple[PreTrainedModel, PreTrainedModel]:
    plain = varied(build(family)).to(torch.bfloat16)
    return quantize_experts(copy.deepcopy(plain), QMoEConfig(experts_module=form)), plain


def pair(family: str, form: str) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A model with experts and linears in 4 bit, and the bf16 model that it was."""
    packed, plain = _pair(family, form)
    return copy.deepcopy(packed), copy.deepcopy(plain)


@pytest.mark.parametrize("form", ["auto", "parametrize"])
@pytest.mark.parametrize(
    ("family", "targets"),
    [(f, t) for f in FAMILIES for t in TARGETS if t != "all-linear-but-mamba" or f == "nemotron_h"],
)
def test_adapted_set(family: str, targets: str, form: str, request: pytest.FixtureRequest) -> None:
    """Names in order, shapes, ranks, scalings and the config as PEFT left it, or the same refusal."""
    packed, plain = pair(family, form)
    assert any(isinstance(module, Linear4bit) for module in packed.modules())
    ours = attached(packed, TARGETS[targets])
    request.getfixturevalue("stock_peft")
    stock = attached(plain, TARGETS[targets])
    refused = REFUSED.get((family, targets))
    assert isinstance(stock, Exception) == (refused is not None)
    if refused is not None:
        assert type(ours) is type(stock)
        assert str(ours).startswith(refused)
        assert str(stock).startswith(refused)
        return
    assert not isinstance(ours, Exception), ours
    mine, theirs = lora_tensors(ours), lora_tensors(stock)
    assert [(n, t.shape) for n, t in mine.items()] == [(n, t.shape) for n, t in theirs.items()]
    assert layers(ours) == layers(stock)
    configs = [model.peft_config["default"].to_dict() for model in (ours, stock)]
    assert configs[0] == configs[1]


@pytest.mark.parametrize("form", ["auto", "parametrize"])
@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_adapted_trains(family: str, form: str) -> None:
    """Suffix targets beside linears in 4 bit: every factor has a gradient, and no packed byte changes."""
    packed, _ = pair(family, form)
    fields = TARGETS["suffixes"] | {"target_modules": ["q_proj", "o_proj", "q_a_proj", "in_proj_qkv"]}
    ours = attached(packed, fields)
    assert not isinstance(ours, Exception), ours
    randomize_by_name(ours)
    before = {n: t.clone() for n, t in tensors_of(ours).items() if t.dtype == torch.uint8}
    assert before
    _, gradients = loss_and_gradients(ours)
    assert gradients.keys() == lora_tensors(ours).keys()
    assert all(gradient.any() for gradient in gradients.values())
    torch.optim.SGD(lora_tensors(ours).values(), lr=0.1).step()
    after = tensors_of(ours)
    assert all(torch.equal(after[n], tensor) for n, tensor in before.items())
