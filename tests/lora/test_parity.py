"""LoRA on packed experts against stock PEFT on the float model with the same weights."""

import copy
import warnings
from pathlib import Path

import pytest
import torch
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import PreTrainedModel

from hf_qmoe.lora.wrapper import ParamWrapper
from tests.support.lora import (
    FORMS,
    TARGETS,
    adapted_pair,
    expert_lora_tensors,
    logits,
    lora_config,
    lora_tensors,
    loss_and_gradients,
    packed_and_float,
    randomize,
    relative_error,
)
from tests.support.models import FAMILIES
from tests.support.state import assert_same_state, snapshot


STEPS = 3


def wrappers(model: torch.nn.Module) -> list[ParamWrapper]:
    """Our wrappers in `model`."""
    return [module for module in model.modules() if isinstance(module, ParamWrapper)]


@pytest.mark.parametrize("targets", TARGETS.values(), ids=TARGETS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", FAMILIES)
def test_names_shapes_order_and_initial_values(family: str, form: str, targets: list[str]) -> None:
    """The adapter of packed experts is the one stock PEFT makes with the same seed, tensor by tensor."""
    ours, stock = adapted_pair(family, form, config=lambda: lora_config(target_parameters=targets), randomized=False)
    assert len(wrappers(ours)) == 2 * len(targets)
    assert not wrappers(stock)
    mine, theirs = lora_tensors(ours), lora_tensors(stock)
    assert list(mine) == list(theirs)
    for name, tensor in mine.items():
        assert tensor.dtype == theirs[name].dtype
        torch.testing.assert_close(tensor, theirs[name], rtol=0, atol=0)


@pytest.mark.parametrize("targets", TARGETS.values(), ids=TARGETS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", FAMILIES)
def test_training_follows_stock(family: str, form: str, targets: list[str]) -> None:
    """Loss and every gradient of three steps, weights updated in between; packed tensors keep their bits."""
    ours, stock = adapted_pair(family, form, config=lambda: lora_config(target_parameters=targets))
    before = snapshot(ours)
    optimizers = [torch.optim.SGD(lora_tensors(model).values(), lr=0.5) for model in (ours, stock)]
    for step in range(STEPS):
        (loss, grads), (expected, wanted) = (loss_and_gradients(model, seed=step) for model in (ours, stock))
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
        for name, grad in grads.items():
            assert relative_error(grad, wanted[name]) < 1e-4, (step, name)
            assert grad.any()
        for optimizer in optimizers:
            optimizer.step()
    assert_same_state(ours, before)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_is_no_further_from_the_truth(family: str, form: str) -> None:
    """Against float64 on the same weights: our logits and gradients err no more than stock PEFT's in bfloat16."""
    ours, stock = adapted_pair(family, form, dtype=torch.bfloat16)
    exact = copy.deepcopy(stock).double()
    (loss, grads), (stock_loss, stock_grads), (truth, true_grads) = (
        loss_and_gradients(model) for model in (ours, stock, exact)
    )
    assert abs(loss - truth) <= 2 * abs(stock_loss - truth) + 2e-3
    mine = [relative_error(grads[name], true_grads[name]) for name in expert_lora_tensors(ours)]
    theirs = [relative_error(stock_grads[name], true_grads[name]) for name in expert_lora_tensors(ours)]
    assert sum(mine) <= 1.1 * sum(theirs)


@pytest.mark.parametrize("targets", TARGETS.values(), ids=TARGETS)
@pytest.mark.parametrize("rank", [4, 3], ids=["E==R", "E!=R"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_are_interchangeable(family: str, form: str, rank: int, targets: list[str], tmp_path: Path) -> None:
    """Saved from packed experts it loads with stock PEFT on the float model, and the other way round."""
    config = lora_config(r=rank, target_parameters=targets)
    ours, stock = adapted_pair(family, form, config=lambda: copy.deepcopy(config))
    ours.save_pretrained(tmp_path / "ours")
    stock.save_pretrained(tmp_path / "stock")
    saved = [load_file(tmp_path / name / "adapter_model.safetensors") for name in ("ours", "stock")]
    assert list(saved[0]) == list(saved[1])
    assert all(torch.equal(saved[0][key], saved[1][key]) for key in saved[0])
    configs = [(tmp_path / name / "adapter_config.json").read_text() for name in ("ours", "stock")]
    assert configs[0] == configs[1]

    packed, plain = packed_and_float(family, form)
    expected = logits(ours)
    assert relative_error(logits(packed), expected) > 1e-3  # the adapter matters
    for base, source in ((plain, "ours"), (packed, "stock")):
        loaded = PeftModel.from_pretrained(base, tmp_path / source)
        assert relative_error(logits(loaded), expected) < 1e-5


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_factor_counts_and_nothing_piles_up(family: str, form: str) -> None:
    """Three evaluations agree; two steps give every factor a gradient; without either ``lora_B`` logits differ."""
    packed, _ = packed_and_float(family, form)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", FutureWarning)  # PEFT asks transformers for `is_gradient_checkpointing`
        model = get_peft_model(packed, lora_config())
        randomize(model)
        chains = parametrization_counts(model)
        outputs = [logits(model) for _ in range(3)]
        gradients = [loss_and_gradients(model, seed=step)[1] for step in range(2)]
        assert torch.equal(outputs[0], outputs[1])
        assert torch.equal(outputs[0], outputs[2])
        assert all(grad.any() for grads in gradients for grad in grads.values())
        for name, parameter in expert_lora_tensors(model).items():
            if "lora_B" not in name:
                continue
            kept = parameter.detach().clone()
            parameter.data.zero_()
            assert relative_error(logits(model), outputs[0]) > 1e-4, name
            parameter.data.copy_(kept)
        assert parametrization_counts(model) == chains


def parametrization_counts(model: torch.nn.Module) -> dict[str, int]:
    """How many parametrizations sit on each parametrized parameter."""
    return {
        n: len(m) for n, m in model.named_modules() if isinstance(m, torch.nn.utils.parametrize.ParametrizationList)
    }


@pytest.mark.parametrize("form", FORMS)
def test_unhit_experts_get_zero_gradients(form: str) -> None:
    """Gradients are never None, and zero where no token was routed: data parallel training waits for all of them."""
    ours, stock = adapted_pair("qwen3_moe", form, num_experts=16, num_hidden_layers=1)
    ids = torch.tensor([[5, 6]])
    for model in (ours, stock):
        model(input_ids=ids, labels=ids).loss.backward()
    for name, parameter in expert_lora_tensors(ours).items():
        grad, expected = parameter.grad, expert_lora_tensors(stock)[name].grad
        assert grad is not None
        by_expert = grad.view(16, -1) if "lora_A" in name else grad.view(-1, 16).t()
        unhit = (by_expert == 0).all(dim=1)
        assert 0 < unhit.sum() < 16
        assert relative_error(grad, expected) < 1e-4


def test_a_model_without_packed_experts_is_left_to_peft() -> None:
    """Importing this package changes nothing for others: PEFT's own class and tensors."""
    _, plain = packed_and_float("qwen3_moe")
    assert isinstance(plain, PreTrainedModel)
    model = get_peft_model(plain, lora_config())
    assert not wrappers(model)
    kinds = {type(m).__module__ for m in model.modules() if type(m).__name__ == "ParamWrapper"}
    assert kinds == {"peft.tuners.lora.layer"}
