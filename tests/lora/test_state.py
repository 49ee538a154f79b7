"""What may happen to an adapted model between forwards: copies, casts, precisions, grad modes, threads."""

import copy
import io
import pickle
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from peft import PeftModel, get_peft_model, prepare_model_for_kbit_training
from torch import Tensor, nn

from hf_qmoe.experts import ExpertsNbit
from tests.support.lora import (
    FORMS,
    expert_lora_tensors,
    logits,
    lora_config,
    lora_tensors,
    loss_and_gradients,
    packed_and_float,
    randomize,
    relative_error,
)
from tests.support.models import NUM_EXPERTS, token_ids
from tests.support.oracle import assert_same_bits, dtype_name
from tests.support.state import assert_same_state, snapshot


FAMILIES = ("qwen3_moe", "gpt_oss")
BOTH_FORMS = pytest.mark.parametrize("form", FORMS)
BOTH_FAMILIES = pytest.mark.parametrize("family", FAMILIES)
LOW_PRECISION = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=dtype_name)


#: Every token goes to every expert: rounding cannot route it to others, which would hide how exact the rest is.
ALL_EXPERTS = {"num_experts_per_tok": NUM_EXPERTS}


def adapted(
    family: str = "qwen3_moe", form: str = "nbit", dtype: torch.dtype = torch.float32, **changes: object
) -> PeftModel:
    """The same model with a random adapter at each call, in eval."""
    model = get_peft_model(packed_and_float(family, form, dtype, **changes)[0], lora_config())
    randomize(model)
    return model.eval()


def exact(model: PeftModel) -> PeftModel:
    """The same, with the bits of training where no gradient is asked for."""
    for module in model.modules():
        if isinstance(module, ExpertsNbit):
            module.exact = True
    return model


def float_twin(family: str, form: str, **changes: object) -> PeftModel:
    """Its control: the float model, and stock PEFT."""
    model = get_peft_model(packed_and_float(family, form, **changes)[1], lora_config())
    randomize(model)
    return model.eval()


def trained(model: nn.Module) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients, all of them real."""
    loss, gradients = loss_and_gradients(model)
    assert torch.isfinite(loss)
    assert len(gradients) == 12
    assert all(gradient.any() and torch.isfinite(gradient).all() for gradient in gradients.values())
    return loss, gradients


def assert_same_training(actual: nn.Module, expected: nn.Module) -> None:
    """Same loss, and same gradients of every LoRA tensor, bit for bit."""
    (loss, gradients), (expected_loss, expected_gradients) = trained(actual), trained(expected)
    assert_same_bits(loss, expected_loss)
    assert gradients.keys() == expected_gradients.keys()
    for name, gradient in expected_gradients.items():
        assert_same_bits(gradients[name], gradient)


# -- copies -----------------------------------------------------------------------------------------------------------


def saved_and_loaded(model: nn.Module) -> nn.Module:
    """Through `torch.save`."""
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda m: pickle.loads(pickle.dumps(m)),
    "torch.save": saved_and_loaded,
}


@pytest.mark.parametrize("after", ["new", "trained"])
@pytest.mark.parametrize("make", COPIES.values(), ids=COPIES)
@BOTH_FORMS
@BOTH_FAMILIES
def test_copies(family: str, form: str, make: Callable[[nn.Module], nn.Module], after: str) -> None:
    """A copy gives the same logits and trains alike; neither touches the other, nor is a forward left in it."""
    model = adapted(family, form)
    if after == "trained":
        trained(model)
        model.zero_grad()
    twin = make(model)
    assert_same_state(twin, snapshot(model))
    expected = logits(model)
    assert_same_bits(logits(twin), expected)
    assert_same_training(twin, model)
    randomize(twin, seed=9)
    assert_same_bits(logits(model), expected)
    assert relative_error(logits(twin), expected) > 1e-3
    with twin.disable_adapter(), model.disable_adapter():
        assert_same_bits(logits(twin), logits(model))


# -- casts ------------------------------------------------------------------------------------------------------------


CASTS: dict[str, tuple[torch.dtype, Callable[[nn.Module], nn.Module]]] = {
    "half": (torch.float16, lambda m: m.half()),
    "bfloat16": (torch.bfloat16, lambda m: m.bfloat16()),
    "to-bf16": (torch.bfloat16, lambda m: m.to(torch.bfloat16)),
    "to-device-fp16": (torch.float16, lambda m: m.to("cpu", torch.float16)),
    "double": (torch.float64, lambda m: m.double()),
    "there-and-back": (torch.float32, lambda m: m.double().float()),
}


@pytest.mark.parametrize(("dtype", "cast"), CASTS.values(), ids=CASTS)
@BOTH_FORMS
@BOTH_FAMILIES
def test_casts(family: str, form: str, dtype: torch.dtype, cast: Callable[[nn.Module], nn.Module]) -> None:
    """Packed bytes and scales stay, adapters follow, and logits and gradients are as close as stock PEFT's."""
    model, twin = (make(family, form, **ALL_EXPERTS) for make in (adapted, float_twin))
    before, expected = snapshot(model), logits(twin)
    _, wanted = trained(twin)
    cast(model), cast(twin)
    assert_same_state(model, before)
    assert {p.dtype for p in lora_tensors(model).values()} == {dtype}
    actual, stock = logits(model), logits(twin)
    assert actual.dtype == stock.dtype
    assert relative_error(actual, expected) < 1.1 * relative_error(stock, expected) + 1e-6
    _, gradients = trained(model)
    _, theirs = trained(twin)
    errors = [sum(relative_error(g[n], wanted[n]) for n in wanted) for g in (gradients, theirs)]
    assert errors[0] < 1.25 * errors[1] + 1e-5


# -- precisions -------------------------------------------------------------------------------------------------------


@BOTH_FORMS
@BOTH_FAMILIES
def test_autocast_with_float32_adapters(family: str, form: str) -> None:
    """bf16 autocast over fp32 adapters: gradients in fp32, as close to fp32's as stock PEFT's."""
    model, twin = (make(family, form, **ALL_EXPERTS) for make in (adapted, float_twin))

    def results(model: nn.Module) -> tuple[Tensor, dict[str, Tensor]]:
        model.zero_grad()
        ids = token_ids()
        out = model(input_ids=ids, labels=ids, use_cache=False)
        out.loss.backward()
        return out.logits.detach(), {name: p.grad.clone() for name, p in lora_tensors(model).items()}

    expected, wanted = results(twin)
    plain, _ = results(model)
    with torch.autocast("cpu", torch.bfloat16):
        (actual, gradients), (stock, theirs) = results(model), results(twin)
    assert actual.dtype == stock.dtype
    assert 1e-4 < relative_error(actual, expected) < 1.2 * relative_error(stock, expected)
    assert {g.dtype for g in gradients.values()} == {torch.float32}
    errors = [sum(relative_error(g[n], wanted[n]) for n in wanted) for g in (gradients, theirs)]
    assert errors[0] < 1.2 * errors[1]
    assert_same_bits(results(model)[0], plain)  # nothing of autocast is left


@BOTH_FORMS
@BOTH_FAMILIES
@LOW_PRECISION
def test_adapters_of_either_dtype(family: str, form: str, dtype: torch.dtype) -> None:
    """A low-precision model takes adapters of its own dtype and fp32 ones; gradients have the adapter's dtype."""
    losses = []
    for adapter_dtype in (dtype, torch.float32):
        model = adapted(family, form, dtype)
        for parameter in lora_tensors(model).values():
            parameter.data = parameter.data.to(dtype).to(adapter_dtype)
        if form == "nbit" or family == "gpt_oss":
            assert {p.dtype for p in expert_lora_tensors(model).values()} == {adapter_dtype}
        assert logits(model).dtype == dtype
        loss, gradients = trained(model)
        losses.append(loss)
        assert {g.dtype for g in gradients.values()} == {adapter_dtype}
    assert relative_error(losses[0], losses[1]) < 1e-2


@pytest.mark.parametrize("autocast", [False, True], ids=["", "autocast"])
@pytest.mark.parametrize("autocast_adapter_dtype", [False, True], ids=["as-they-are", "fp32-adapters"])
@BOTH_FORMS
@BOTH_FAMILIES
def test_prepared_for_kbit_training(family: str, form: str, autocast_adapter_dtype: bool, autocast: bool) -> None:
    """After PEFT's preparation hidden states are fp32 in front of packed experts of a bf16 model, and it trains."""
    model, _ = packed_and_float(family, form, torch.bfloat16)
    before = list(snapshot(model).values())
    model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    model = get_peft_model(model, lora_config(lora_dropout=0.1), autocast_adapter_dtype=autocast_adapter_dtype)
    randomize(model)
    model.train()
    seen = []
    experts = next(m for n, m in model.named_modules() if n.endswith("mlp.experts"))
    experts.register_forward_pre_hook(lambda _, args: seen.append(args[0].dtype))
    with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
        trained(model)
    assert seen == [torch.float32]
    for actual, expected in zip(snapshot(model).values(), before, strict=True):  # under names with PEFT's prefix
        assert_same_bits(actual, expected)


# -- grad modes -------------------------------------------------------------------------------------------------------


MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
}


@pytest.mark.parametrize("autocast", [False, True], ids=["", "autocast"])
@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
@BOTH_FORMS
@BOTH_FAMILIES
def test_grad_modes(family: str, form: str, mode: Callable[[], AbstractContextManager[Any]], autocast: bool) -> None:
    """Without gradients the logits are those with, bit for bit if asked, and training afterwards is what it was."""
    model, untouched = exact(adapted(family, form)), adapted(family, form)
    ids = token_ids()
    with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
        with mode():
            first = model(ids, use_cache=False).logits
        with_gradients = model(ids, use_cache=False).logits
        with mode():
            second = model(ids, use_cache=False).logits
    assert with_gradients.requires_grad
    assert not first.requires_grad
    assert torch.equal(first, with_gradients)
    assert torch.equal(second, first)
    assert_same_training(model, untouched)


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
@BOTH_FORMS
def test_adapted_without_gradients(form: str, mode: Callable[[], AbstractContextManager[Any]]) -> None:
    """Packed and adapted inside the mode, a model gives the same logits there."""
    expected = logits(adapted(form=form))
    with mode():
        model = adapted(form=form)
        assert torch.equal(model(token_ids(), use_cache=False).logits, expected)


# -- threads ----------------------------------------------------------------------------------------------------------


def in_threads(*functions: Callable[[], Any]) -> list[Any]:
    """Results of functions that run at the same time; raises what one of them raised."""
    results: list[Any] = [None] * len(functions)
    start = threading.Barrier(len(functions))

    def call(index: int) -> None:
        try:
            start.wait()
            results[index] = functions[index]()
        except BaseException as error:
            results[index] = error

    threads = [threading.Thread(target=call, args=(index,)) for index in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


@BOTH_FORMS
@BOTH_FAMILIES
def test_two_threads(family: str, form: str) -> None:
    """Forwards of one adapted model at once, in grad mode and without, of different batches: each its own result."""
    model = exact(adapted(family, form))
    batches = [token_ids(seed=seed) for seed in range(3)]

    def forward(ids: Tensor, grad: bool) -> Callable[[], list[Tensor]]:
        def run() -> list[Tensor]:
            with torch.set_grad_enabled(grad):
                return [model(ids, use_cache=False).logits for _ in range(4)]

        return run

    expected = [forward(ids, False)()[0] for ids in batches]
    calls = [forward(batches[0], False), forward(batches[1], True), forward(batches[2], False)]
    for outputs, wanted in zip(in_threads(*calls), expected, strict=True):
        for output in outputs:
            assert_same_bits(output.detach(), wanted)


@BOTH_FORMS
def test_two_threads_of_two_adapted_models(form: str) -> None:
    """Two models trained at once each get their own gradients."""
    models = [adapted("qwen3_moe", form), adapted("gpt_oss", form)]
    expected = [loss_and_gradients(model) for model in models]
    calls = [lambda m=m: [loss_and_gradients(m) for _ in range(4)] for m in models]
    for steps, (loss, gradients) in zip(in_threads(*calls), expected, strict=True):
        for own_loss, own_gradients in steps:
            assert_same_bits(own_loss, loss)
            for name, gradient in gradients.items():
                assert_same_bits(own_gradients[name], gradient)


@BOTH_FORMS
def test_two_layers_in_two_threads_within_one_forward(form: str) -> None:
    """Adapters that one thread has switched on are not seen by another, which reads the weights without a forward."""
    model = adapted(form=form)
    experts = next(m for n, m in model.named_modules() if n.endswith("mlp.experts")).get_base_layer()
    hidden, index = torch.randn(4, 64), torch.tensor([[0, 1], [2, 3], [1, 2], [3, 0]])
    arguments = (hidden, index, torch.full((4, 2), 0.5))
    with torch.no_grad():
        bare, expected = experts(*arguments), logits(model)
        calls = (lambda: [experts(*arguments) for _ in range(30)], lambda: [logits(model) for _ in range(4)])

        def without_gradients(call: Callable[[], Any]) -> Callable[[], Any]:
            def run() -> Any:
                with torch.no_grad():
                    return call()

            return run

        own, whole = in_threads(*map(without_gradients, calls))
    assert all(torch.equal(output, bare) for output in own)
    assert all(torch.equal(output, expected) for output in whole)
