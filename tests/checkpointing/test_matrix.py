"""Checkpointing changes nothing, in any combination: form x format x LoRA x dropout x precision x mode.

Each combination trains a tiny model three steps without checkpointing and compares the run with each kind of it.
"""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn.utils import parametrize

from hf_qmoe import ExpertsNbit, QMoEConfig, quantize_experts
from hf_qmoe.ops.torch_ops import release_scratch
from hf_qmoe.parametrize import packed_parametrizations
from tests.support.heap import live_tensors
from tests.support.models import NUM_EXPERTS, experts_of, tiny_model, token_ids
from tests.support.oracle import assert_same_bits


STEPS = 3
FORMS = ("nbit", "parametrize")
QUANT_TYPES = ("nf4", "fp4", "int8", "fp8", "bf16", "fp16")
MODES = {"off": None, "non_reentrant": False, "reentrant": True}
#: Which modules LoRA goes on; the router is a parameter holder in transformers v5 and trained as it is.
LORA = {"none": None, "attention": ["q_proj", "v_proj"], "router": ["mlp.gate"]}
PRECISIONS = {"fp32": (torch.float32, False), "bf16": (torch.bfloat16, False), "autocast": (torch.float32, True)}


@dataclass(frozen=True)
class Step:
    """What one step gave."""

    loss: Tensor
    gradients: dict[str, Tensor]
    alive: int


def build(form: str, quant_type: str, lora: str, dropout: float, dtype: torch.dtype) -> nn.Module:
    """The same quantized model, adapters included, at each call."""
    model = tiny_model("qwen3_moe", dtype=dtype, attention_dropout=dropout)
    torch.manual_seed(7)
    double_quant = quant_type in ("nf4", "int8")
    config = QMoEConfig(experts_module=form, experts_quant_type=quant_type, experts_double_quant=double_quant)
    model = quantize_experts(model, config)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    if lora == "attention":
        adapter = LoraConfig(r=4, target_modules=LORA[lora], lora_dropout=dropout, init_lora_weights=False)
        return get_peft_model(model, adapter)
    if lora == "router":
        # transformers' routers are modules with a bare weight, which PEFT reaches by `target_parameters`.
        adapter = LoraConfig(r=4, target_parameters=["mlp.gate.weight"], target_modules=[], init_lora_weights=False)
        return get_peft_model(model, adapter)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith("norm.weight"))
    return model


def count_live() -> int:
    """Number of live tensors."""
    release_scratch()
    return len(live_tensors())


def full_stacks(model: nn.Module) -> list[tuple[int, ...]]:
    """Shapes of live float tensors as large as a whole stack, other than the model's own parameters."""
    shapes = {(NUM_EXPERTS, 192, 64), (NUM_EXPERTS, 64, 96), (NUM_EXPERTS, 64, 192), (NUM_EXPERTS, 96, 64)}
    own = {id(p) for p in model.parameters()}
    tensors = (t for t in live_tensors() if id(t) not in own)
    return [tuple(t.shape) for t in tensors if t.is_floating_point() and tuple(t.shape) in shapes]


def train(model: nn.Module, mode: bool | None, autocast: bool, dropout: float) -> Iterator[Step]:
    """Loss, gradients and live tensors of each of a few optimizer steps."""
    model.train()
    if mode is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": mode})
    model.enable_input_require_grads()
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.SGD(trainable.values(), lr=0.1)
    ids = token_ids()
    torch.manual_seed(11)  # the same dropout masks in each run
    for _ in range(STEPS):
        with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss  # a cache changes bits
        loss.backward()
        gradients = {name: p.grad.clone() for name, p in trainable.items() if p.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
        result = loss.detach().clone()
        del loss
        yield Step(result, gradients, count_live())


def run(mode: bool | None, form: str, quant_type: str, lora: str, dropout: float, precision: str) -> list[Step]:
    """Trains a new model, and checks what it leaves behind."""
    dtype, autocast = PRECISIONS[precision]
    model = build(form, quant_type, lora, dropout, dtype)
    kinds = {isinstance(m, ExpertsNbit) for m in experts_of(model).values()}
    assert kinds == {form == "nbit"}
    packed = {n: p.clone() for n, p in model.named_parameters() if not p.is_floating_point()}
    assert any(True for m in model.modules() for _ in packed_parametrizations(m)) == (form == "parametrize")
    alive, steps = [], []
    for step in train(model, mode, autocast, dropout):
        alive.append(step.alive)
        steps.append(step)
        # The recorded steps themselves are live tensors: count only what is beyond them.
        recorded = 1 + len(step.gradients)
        assert alive[-1] - len(steps) * recorded == alive[0] - recorded
    assert full_stacks(model) == []
    assert (parametrize._cache_enabled, parametrize._cache) == (0, {})
    assert torch.is_grad_enabled()
    assert not torch.is_autocast_enabled("cpu")
    for name, value in packed.items():
        assert_same_bits(model.get_parameter(name), value)
    return steps


CASES = [
    pytest.param(f, q, lora, drop, p, id=f"{f}-{q}-{lora}-{'dropout' if drop else 'plain'}-{p}")
    for f in FORMS
    for q in QUANT_TYPES
    for lora in LORA
    for drop in (0.0, 0.1)
    for p in PRECISIONS
]


@pytest.mark.parametrize(("form", "quant_type", "lora", "dropout", "precision"), CASES)
def test_checkpointing_changes_nothing(form: str, quant_type: str, lora: str, dropout: float, precision: str) -> None:
    """Losses and all gradients of three steps are bit-identical in all modes, and nothing is left behind."""
    expected = run(None, form, quant_type, lora, dropout, precision)
    assert len({step.loss.item() for step in expected}) == STEPS
    assert all(torch.isfinite(step.loss) for step in expected)
    for mode in (False, True):
        steps = run(mode, form, quant_type, lora, dropout, precision)
        for step, reference in zip(steps, expected, strict=True):
            assert_same_bits(step.loss, reference.loss)
            assert step.gradients.keys() == reference.gradients.keys()
            assert len(reference.gradients) >= 2
            for name, gradient in reference.gradients.items():
                assert gradient.abs().sum() > 0, name
                assert_same_bits(step.gradients[name], gradient)
