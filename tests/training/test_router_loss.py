"""The router's logits and its auxiliary loss, in models whose experts are packed and have LoRA."""

import pytest
import torch
from peft import PeftModel
from torch import Tensor, nn

from tests.support.layers import CHECKPOINTING
from tests.support.lora import FORMS, adapted_pair, lora_config, loss_and_gradients
from tests.support.models import token_ids
from tests.support.oracle import assert_same_bits


LAYERS, COEFFICIENT = 2, 0.5
#: Families with an auxiliary loss, and the path of the router in a layer.
ROUTERS = {"qwen3_moe": "mlp.gate", "mixtral": "mlp.gate", "olmoe": "mlp.gate", "gpt_oss": "mlp.router"}
by_form = pytest.mark.parametrize("form", FORMS)
by_family = pytest.mark.parametrize("family", ROUTERS)


def pair(family: str, form: str, **changes: object) -> tuple[PeftModel, PeftModel]:
    """A packed model and the float one with its weights, which have the same adapter and want router logits."""
    models = adapted_pair(family, form, config=lambda: lora_config(**changes), router_aux_loss_coef=COEFFICIENT)
    for model in models:
        model.config.output_router_logits = True
        model.config.use_cache = False
    return models


def routers(model: nn.Module, family: str) -> dict[str, nn.Parameter]:
    """Trainable parameters of routers."""
    name = ROUTERS[family]
    return {n: p for n, p in model.named_parameters() if f".{name}." in n and p.requires_grad and "lora_" not in n}


def assert_all_close(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Close in fp32, name by name, and not zero."""
    assert expected
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert value.abs().sum() > 0, name
        torch.testing.assert_close(actual[name], value, rtol=1e-5, atol=1e-5, msg=name)


@by_form
@by_family
def test_loss_and_logits_are_the_float_models(family: str, form: str) -> None:
    """Router logits of each layer, auxiliary loss and total loss equal those of stock PEFT on the float model."""
    ids = token_ids()
    mask = torch.ones_like(ids)
    mask[0, :3] = 0  # padding does not count
    ours, stock = (model(input_ids=ids, labels=ids, attention_mask=mask) for model in pair(family, form))
    assert len(ours.router_logits) == len(stock.router_logits) == LAYERS
    for actual, expected in zip(ours.router_logits, stock.router_logits, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    assert ours.aux_loss > 0
    torch.testing.assert_close(ours.aux_loss, stock.aux_loss, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours.loss, stock.loss, rtol=1e-5, atol=1e-5)


def unfreeze(model: PeftModel, family: str) -> None:
    """Makes the routers trainable in place."""
    for name, parameter in model.named_parameters():
        if f".{ROUTERS[family]}." in name:
            parameter.requires_grad_()


@pytest.mark.parametrize("saved", [False, True], ids=["unfrozen", "modules_to_save"])
@by_form
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_gradients_reach_the_router(family: str, form: str, saved: bool) -> None:
    """A trainable router and every LoRA factor get the float model's gradients, with each kind of checkpointing."""
    changes = {"modules_to_save": [ROUTERS[family].rpartition(".")[2]]} if saved else {}
    ours, stock = pair(family, form, **changes)
    for model in (ours, stock):
        if not saved:
            unfreeze(model, family)
    assert len(routers(stock, family)) == LAYERS * (2 if family == "gpt_oss" else 1)
    results = {}
    for mode, switches in CHECKPOINTING.items():
        for model in (ours, stock):
            if switches is not None:
                model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=switches)
                model.enable_input_require_grads()
            assert model.get_base_model().is_gradient_checkpointing == (mode != "off")
        # Reentrant checkpointing takes the router's logits from a forward without gradient, in any model of
        # transformers: the auxiliary loss then trains nothing.
        results[mode] = gradients(ours.train(), family)
        assert_all_close(results[mode], gradients(stock.train(), family))
    assert results["off"].keys() == results["non_reentrant"].keys()
    for name, value in results["off"].items():
        assert_same_bits(results["non_reentrant"][name], value)


def gradients(model: PeftModel, family: str) -> dict[str, Tensor]:
    """Of every LoRA factor and router, and the auxiliary loss beside them."""
    loss, factors = loss_and_gradients(model)
    return factors | {n: p.grad.clone() for n, p in routers(model, family).items()} | {"loss": loss}
