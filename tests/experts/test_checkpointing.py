"""Activation checkpointing changes neither losses, nor gradients, nor what stays alive."""

import copy
import weakref
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from hf_qmoe.experts import ExpertsNbit
from tests.support.experts import EXPERTS, HIDDEN, Layout, float_experts, inputs, layout_class, relative_error
from tests.support.heap import live_tensors
from tests.support.layers import CHECKPOINTING, MoELayer, Stack, counted, run, trainable_gradients
from tests.support.oracle import assert_same_bits, storage_params


TOKENS, STEPS = 12, 3
WITH_BIAS = layout_class(Layout("clamped", has_bias=True, is_transposed=True))
with_checkpointing = pytest.mark.parametrize("mode", ["non_reentrant", "reentrant"])

#: dtype of parameters and hidden states, and whether autocast to bfloat16 is on.
PRECISIONS = {"fp32": (torch.float32, False), "bf16": (torch.bfloat16, False), "autocast": (torch.float32, True)}


def stack(
    mode: str, quant_type: str = "nf4", double_quant: bool = False, layers: int = 3, device: str = "cpu"
) -> Stack:
    """Layers with trainable norms, routers and biases; the same ones at each call."""
    torch.manual_seed(1)
    experts = [
        ExpertsNbit.from_experts(float_experts(WITH_BIAS, device), quant_type, double_quant=double_quant)
        for _ in range(layers)
    ]
    return Stack([MoELayer(e, HIDDEN).to(device) for e in experts], mode)


def train(model: Stack, dtype: torch.dtype, autocast: bool, device: str) -> list[tuple[Tensor, dict[str, Tensor]]]:
    """Loss and gradients of each of a few optimizer steps, the input's gradient among them."""
    generator = torch.Generator().manual_seed(2)
    batch = torch.randn(TOKENS, HIDDEN, generator=generator).to(device, dtype)
    target = torch.randn(TOKENS, HIDDEN, generator=generator).to(device, dtype)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    history = []
    for _ in range(STEPS):
        hidden_states = batch.clone().requires_grad_()
        with torch.autocast(device, torch.bfloat16) if autocast else nullcontext():
            loss = nn.functional.mse_loss(model(hidden_states).float(), target.float())
        loss.backward()
        history.append((loss.detach(), trainable_gradients(model) | {"input": hidden_states.grad}))
        optimizer.step()
        optimizer.zero_grad()
    return history


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(("quant_type", "double_quant"), storage_params())
def test_losses_and_gradients_are_bit_identical(
    quant_type: str, double_quant: bool, precision: str, device: str
) -> None:
    """Over three steps, with no checkpointing, the non-reentrant kind and the reentrant one."""
    dtype, autocast = PRECISIONS[precision]
    histories = {}
    for mode in CHECKPOINTING:
        model = stack(mode, quant_type, double_quant, device=device).to(dtype)
        before = {name: p.clone() for name, p in model.named_parameters() if not p.is_floating_point()}
        with counted(model.layers[0].experts) as calls:
            histories[mode] = train(model, dtype, autocast, device)
        assert calls[0] == STEPS * (1 if mode == "off" else 2)
        for name, parameter in before.items():
            assert_same_bits(model.get_parameter(name), parameter)
    reference = histories.pop("off")
    assert len({loss.item() for loss, _ in reference}) == STEPS
    assert len(reference[0][1]) == 3 * 4 + 1
    for loss, gradients in reference:
        assert torch.isfinite(loss)
        assert all(gradient.abs().sum() > 0 for gradient in gradients.values())
    for history in histories.values():
        for (loss, gradients), (expected_loss, expected) in zip(history, reference, strict=True):
            assert_same_bits(loss, expected_loss)
            assert gradients.keys() == expected.keys()
            for name, gradient in expected.items():
                assert_same_bits(gradients[name], gradient)


def count_live() -> tuple[int, int]:
    """Number of live tensors, and the bytes of their storages."""
    tensors = live_tensors()
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return len(tensors), sum(storages.values())


@pytest.mark.parametrize("mode", CHECKPOINTING)
def test_nothing_stays_alive_after_a_step(mode: str) -> None:
    """As many tensors, of as many bytes, live after the third step as after the first."""
    model = stack(mode, double_quant=True)
    batch = torch.randn(TOKENS, HIDDEN)
    alive = []
    for _ in range(STEPS):
        model(batch.clone().requires_grad_()).square().mean().backward()
        model.zero_grad()
        alive.append(count_live())
    assert alive[0] == alive[1] == alive[2]


@with_checkpointing
def test_activations_of_a_region_are_freed(mode: str) -> None:
    """Between forward and backward no activation of the inside of a checkpointed layer is alive."""
    model = stack(mode)
    inside: list[weakref.ref[Tensor]] = []
    act = model.layers[1].experts.act_fn
    model.layers[1].experts._apply_gate = lambda rows: (inside.append(weakref.ref(rows)), act(rows).chunk(2, -1)[0])[1]
    loss = model(torch.randn(TOKENS, HIDDEN, requires_grad=True)).square().mean()
    assert len(inside) == 1
    assert inside[0]() is None
    loss.backward()
    assert len(inside) == 2
    assert inside[1]() is None


@pytest.mark.parametrize("early_stop", [True, False], ids=["early-stop", "to-the-end"])
def test_early_stop_of_the_recomputation(early_stop: bool) -> None:
    """Whether the recomputation ends at the last saved tensor or runs through, the gradients are the same bits.

    With early stop, the hook after a region's last module never runs: nothing may depend on it.
    """
    expected = None
    for mode in ("off", "non_reentrant"):
        model = stack(mode, layers=1)
        finished = []
        # What lies after the experts saves nothing for backward, so the recomputation stops before it.
        model.layers[0].register_forward_hook(lambda *_, log=finished: log.append(1))
        hidden_states = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(3), requires_grad=True)
        with set_checkpoint_early_stop(early_stop):
            model(hidden_states).square().sum().backward()
        gradients = trainable_gradients(model) | {"input": hidden_states.grad}
        if mode == "off":
            expected = gradients
    assert len(finished) == (1 if early_stop else 2)
    for name, gradient in expected.items():
        assert_same_bits(gradients[name], gradient)


@pytest.mark.parametrize("mode", CHECKPOINTING)
@pytest.mark.parametrize("when", ["forward", "recomputation"])
def test_a_forward_that_raises_leaves_clean_state(mode: str, when: str) -> None:
    """After an activation that raised, in forward or in the recomputation, the next step is that of a new model."""
    if mode == "off" and when == "recomputation":
        when = "forward"  # nothing is recomputed; the second step raises instead
    batch = torch.randn(TOKENS, HIDDEN)

    def step(model: Stack) -> dict[str, Tensor]:
        model.zero_grad()
        hidden_states = batch.clone().requires_grad_()
        model(hidden_states).square().mean().backward()
        return trainable_gradients(model) | {"input": hidden_states.grad}

    expected = step(stack(mode))
    model = stack(mode)
    experts = model.layers[1].experts
    own_gate, calls = experts._apply_gate, []

    def failing(rows: Tensor) -> Tensor:
        calls.append(1)
        if len(calls) == (2 if when == "recomputation" else 1):
            raise ArithmeticError("no gate today")
        return own_gate(rows)

    experts._apply_gate = failing
    alive = count_live()
    with pytest.raises(ArithmeticError, match="no gate today"):
        step(model)
    model.zero_grad()
    assert count_live() == alive
    assert torch.is_grad_enabled()
    assert not torch.is_autocast_enabled("cpu")
    assert torch.nn.utils.parametrize._cache_enabled == 0
    for name, gradient in step(model).items():
        assert_same_bits(gradient, expected[name])


@with_checkpointing
def test_one_region_around_all_layers(mode: str) -> None:
    """One checkpointed region that holds several experts layers gives the same bits too."""
    gradients = {}
    for kind in ("off", mode):
        model = stack("off")
        hidden_states = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(3), requires_grad=True)
        run(model, kind, hidden_states).square().mean().backward()
        gradients[kind] = trainable_gradients(model) | {"input": hidden_states.grad}
    for name, gradient in gradients["off"].items():
        assert_same_bits(gradients[mode][name], gradient)


def test_regions_within_a_region() -> None:
    """Nested non-reentrant regions give the same bits."""
    gradients = []
    for outer, inner in (("off", "off"), ("non_reentrant", "non_reentrant")):
        model = stack(inner)
        hidden_states = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(3), requires_grad=True)
        run(model, outer, hidden_states).square().mean().backward()
        gradients.append(trainable_gradients(model) | {"input": hidden_states.grad})
    for name, gradient in gradients[0].items():
        assert_same_bits(gradients[1][name], gradient)


def flipping(first: Tensor, second: Tensor) -> object:
    """Gives `first` at the first call and `second` afterwards, as a tie between experts may."""
    calls = []

    def index() -> Tensor:
        calls.append(1)
        return first if len(calls) == 1 else second

    return index


@with_checkpointing
@pytest.mark.parametrize("hit", ["more-experts", "fewer-experts", "one-swapped", "sentinels"])
def test_a_routing_that_flips(mode: str, hit: str) -> None:
    """Where the recomputation routes otherwise, the gradients are exactly those of the routing that it took.

    The loss is linear in the output, so the gradient of a routing is known without its forward.
    """
    packed = ExpertsNbit.from_experts(float_experts(layout_class(Layout())))
    hidden_states, index, weights = inputs(TOKENS)
    other = {
        "more-experts": index,
        "fewer-experts": torch.full_like(index, 3),
        "one-swapped": index.clone().index_put((torch.tensor(0),), index[0].flip(0)),
        "sentinels": index.masked_fill(index == 0, EXPERTS),
    }[hit]
    first = torch.zeros_like(index) if hit == "more-experts" else index
    assert not torch.equal(first, other)
    direction = torch.randn(TOKENS, HIDDEN)

    def step(kind: str, choose: object) -> tuple[Tensor, Tensor]:
        x, w = hidden_states.clone().requires_grad_(), weights.clone().requires_grad_()
        run(lambda x, w: packed(x, choose(), w), kind, x, w).backward(direction)
        return x.grad, w.grad

    expected = step("off", lambda: other)
    for actual, gradient, unflipped in zip(
        step(mode, flipping(first, other)), expected, step("off", lambda: first), strict=True
    ):
        assert_same_bits(actual, gradient)
        assert not torch.equal(actual, unflipped)


def test_checkpointing_within_autocast_keeps_its_dtype() -> None:
    """A backward that runs outside of autocast recomputes in the dtype that forward computed in."""
    packed = ExpertsNbit.from_experts(float_experts())
    hidden_states, index, weights = inputs(TOKENS)
    results = []
    for module, autocast in ((packed, True), (copy.deepcopy(packed), False)):
        module.compute_dtype = None if autocast else torch.bfloat16
        x = hidden_states.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out = checkpoint(module, x, index, weights, use_reentrant=False)
        out.backward(torch.ones_like(out))
        results.append(x.grad)
    assert_same_bits(*results)
    exact = hidden_states.clone().requires_grad_()
    packed.compute_dtype = torch.float64
    packed(exact, index, weights).sum().backward()
    assert 1e-4 < relative_error(results[0], exact.grad) < 0.1
