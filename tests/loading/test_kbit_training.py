"""A loaded model on its way into training: PEFT's preparation, checkpointing, and evaluation in between."""

from pathlib import Path

import pytest
import torch
from bitsandbytes.nn import Linear4bit
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_qmoe import QMoEConfig, quantize_experts
from tests.support.checkpoints import (
    assert_same_tensors,
    digest,
    load,
    logits,
    packed_modules,
    packed_state,
)
from tests.support.models import FAMILIES, token_ids


def loaded(how: str, checkpoint: Path, config: QMoEConfig, path: Path) -> PreTrainedModel:
    """`checkpoint` packed while it is read, reloaded packed, or packed in memory."""
    if how == "quantize_experts":
        return quantize_experts(load(checkpoint), config)
    model = load(checkpoint, config)
    if how == "reloaded":
        model.save_pretrained(path)
        return load(path)
    return model


EVERY_WAY = pytest.mark.parametrize("how", ["from_pretrained", "reloaded", "quantize_experts"])


def with_adapter(model: PreTrainedModel) -> nn.Module:
    """A seeded adapter on attention whose two factors both matter."""
    torch.manual_seed(0)
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj", "o_proj"]))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    return adapted


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Gradients of one training step, by name."""
    model.train()
    model.zero_grad(set_to_none=True)
    model(token_ids(), labels=token_ids()).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


# -- prepare_model_for_kbit_training --------------------------------------------------------------------------------


@EVERY_WAY
@pytest.mark.parametrize("quant_type", ["nf4", "int8", "bf16", "fp16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_preparation_leaves_packed_weights(
    family: str, quant_type: str, how: str, tiny_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """PEFT's preparation changes no packed byte and no scale, and makes no 16-bit stack fp32."""
    config = QMoEConfig(experts_quant_type=quant_type, experts_double_quant=quant_type == "nf4")
    model = loaded(how, tiny_checkpoints[family], config, tmp_path)
    before = {n: t for n, t in packed_state(model).items() if not n.endswith("bias")}
    prepared = prepare_model_for_kbit_training(model)
    assert_same_tensors({n: t for n, t in packed_state(prepared).items() if not n.endswith("bias")}, before)
    for module in packed_modules(prepared).values():
        assert {getattr(module, name).dtype for name in module.stack_names} == {torch.uint8}
        assert module.quant_type == quant_type
    assert not any(p.requires_grad for p in prepared.parameters())
    assert prepared.model.norm.weight.dtype is torch.float32


@pytest.mark.parametrize("family", FAMILIES)
def test_prepared_logits(family: str, tiny_checkpoints: dict[str, Path]) -> None:
    """After preparation, with norms and routers in fp32, the logits are those of before within bf16's error."""
    model = load(tiny_checkpoints[family], QMoEConfig())
    expected = logits(model).float()
    actual = logits(prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)).float()
    exact = logits(load(tiny_checkpoints[family], QMoEConfig(), dtype=torch.float32))
    assert (actual - exact).abs().mean() <= 1.2 * (expected - exact).abs().mean()


@EVERY_WAY
@pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "non_reentrant"])
def test_checkpointing_is_on(use_reentrant: bool, how: str, tiny_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """Preparation turns checkpointing on: each layer's experts run once more in the backward pass."""
    model = loaded(how, tiny_checkpoints["qwen3_moe"], QMoEConfig(), tmp_path)
    model = prepare_model_for_kbit_training(model, gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
    assert model.is_gradient_checkpointing
    adapted = with_adapter(model).train()
    calls: list[int] = []
    for index, layer in enumerate(model.model.layers):
        layer.mlp.experts.register_forward_pre_hook(lambda *_, index=index: calls.append(index))
    loss = adapted(token_ids(), labels=token_ids()).loss
    assert calls == [0, 1]
    loss.backward()
    assert sorted(calls) == [0, 0, 1, 1]
    factors = [p for name, p in adapted.named_parameters() if "lora_" in name]
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in factors)


@EVERY_WAY
def test_checkpointing_can_stay_off(how: str, tiny_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """Without checkpointing the experts run once."""
    model = loaded(how, tiny_checkpoints["qwen3_moe"], QMoEConfig(), tmp_path)
    model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    assert not model.is_gradient_checkpointing
    calls: list[int] = []
    model.model.layers[0].mlp.experts.register_forward_pre_hook(lambda *_: calls.append(0))
    gradients(with_adapter(model))
    assert calls == [0]


# -- evaluation and training ----------------------------------------------------------------------------------------


@EVERY_WAY
@pytest.mark.parametrize("family", FAMILIES)
def test_evaluation_changes_no_gradient(
    family: str, how: str, tiny_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """Gradients of every adapter factor after an evaluation equal, bit for bit, those without one."""
    plain = with_adapter(loaded(how, tiny_checkpoints[family], QMoEConfig(), tmp_path))
    evaluated = with_adapter(loaded(how, tiny_checkpoints[family], QMoEConfig(), tmp_path))
    evaluated.eval()
    for ids in (token_ids(), token_ids(1, 1)):  # one token takes another path in bitsandbytes
        with torch.no_grad():
            evaluated(ids)
    expected = gradients(plain)
    assert len(expected) == 2 * 3 * 2
    assert all(gradient.abs().sum() > 0 for gradient in expected.values())
    assert_same_tensors(gradients(evaluated), expected)


@EVERY_WAY
@pytest.mark.parametrize("family", FAMILIES)
def test_evaluation_changes_no_byte(family: str, how: str, tiny_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """What is in memory and what is saved after evaluating is what it was before."""
    model = loaded(how, tiny_checkpoints[family], QMoEConfig(), tmp_path / "packed")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.save_pretrained(tmp_path / "before")
    model.eval()
    with torch.no_grad():
        for ids in (token_ids(), token_ids(1, 1)):
            model(ids)
        model.generate(token_ids(1, 4), max_new_tokens=2, do_sample=False)
    assert_same_tensors(model.state_dict(), before)
    model.save_pretrained(tmp_path / "after")
    assert digest(tmp_path / "after") == digest(tmp_path / "before")


@pytest.mark.parametrize("how", ["from_pretrained", "reloaded", "quantize_experts"])
def test_training_changes_no_packed_byte(how: str, tiny_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """Three optimizer steps move the adapter and nothing that is packed."""
    model = loaded(how, tiny_checkpoints["gpt_oss"], QMoEConfig(), tmp_path)
    before = packed_state(model)
    adapted = with_adapter(model).train()
    optimizer = torch.optim.SGD([p for p in adapted.parameters() if p.requires_grad], lr=0.1)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = adapted(token_ids(), labels=token_ids()).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert_same_tensors(packed_state(adapted.unload()), before)


def test_linears_do_not_repack(tiny_checkpoints: dict[str, Path]) -> None:
    """bitsandbytes' rewriting of its weights for inference, which loses gradients, is off on every linear."""
    for model in (
        load(tiny_checkpoints["qwen3_moe"], QMoEConfig()),
        quantize_experts(load(tiny_checkpoints["qwen3_moe"])),
    ):
        linears = [module for module in model.modules() if isinstance(module, Linear4bit)]
        assert len(linears) == 8
        assert not any(linear.support_avx512bf16_for_cpu for linear in linears)
