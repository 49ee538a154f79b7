"""Gradients of packed experts against the model's own eager code; packed tensors never get one."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from hf_qmoe.experts import ExpertsNbit
from tests.support.experts import (
    EXPERTS,
    HIDDEN,
    LAYOUTS,
    Inputs,
    Layout,
    decorated_classes,
    float_experts,
    float_twin,
    gradients,
    inputs,
    layout_class,
    packed_and_twin,
    packed_experts,
    relative_error,
)
from tests.support.oracle import dtype_name, storage_params


TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-11}
EVERYTHING = Layout("interleaved", has_bias=True, is_transposed=True, has_norm=True)


def assert_close(actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    """Same names, and each gradient within `tolerance` of the largest value of the expected one."""
    assert actual.keys() == expected.keys()
    assert {name: e for name in actual if (e := relative_error(actual[name], expected[name])) > tolerance} == {}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=dtype_name)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_layout_equals_eager(layout: Layout, dtype: torch.dtype, device: str) -> None:
    """Gradients to hidden states, routing weights, biases and norm weights are the eager ones."""
    packed, twin = packed_and_twin(float_experts(layout_class(layout), device))
    arguments = inputs(device=device)
    actual = gradients(packed.to(dtype), arguments.to(dtype))
    assert {gradient.dtype for gradient in actual.values()} == {dtype}
    assert len(actual) == 2 + 2 * layout.has_bias + layout.has_norm
    assert_close(actual, gradients(twin, arguments.to(torch.float64)), TOLERANCE[dtype])


@pytest.mark.parametrize("name", decorated_classes())
def test_every_class_of_transformers_equals_eager(name: str) -> None:
    """Backward goes through each class's own gate, clamps, biases and norm."""
    packed, twin = packed_and_twin(float_experts(decorated_classes()[name]))
    arguments = inputs()
    expected = gradients(twin, arguments.to(torch.float64))
    assert_close(gradients(packed, arguments.to(torch.float32)), expected, TOLERANCE[torch.float32])


@pytest.mark.parametrize(("quant_type", "double_quant"), storage_params())
def test_every_format_equals_eager(quant_type: str, double_quant: bool, device: str) -> None:
    """Backward unpacks each format as forward did."""
    cls = layout_class(EVERYTHING)
    packed, twin = packed_and_twin(float_experts(cls, device), quant_type, double_quant=double_quant)
    arguments = inputs(device=device)
    expected = gradients(twin, arguments.to(torch.float64))
    for dtype, tolerance in TOLERANCE.items():
        assert_close(gradients(packed.to(dtype), arguments.to(dtype)), expected, tolerance)


@pytest.mark.parametrize(("hidden", "intermediate"), [(64, 32), (64, 64), (64, 48)], ids=["2I=H", "I=H", "I=48"])
@pytest.mark.parametrize("is_transposed", [False, True], ids=["plain", "transposed"])
def test_every_proportion_equals_eager(hidden: int, intermediate: int, is_transposed: bool) -> None:
    """Where forward and backward shapes could be confused, they are not."""
    cls = layout_class(Layout(has_bias=True, is_transposed=is_transposed))
    packed, twin = packed_and_twin(float_experts(cls, hidden=hidden, intermediate=intermediate), "int8")
    arguments = inputs(hidden=hidden)
    expected = gradients(twin, arguments.to(torch.float64))
    assert_close(gradients(packed, arguments.to(torch.float32)), expected, TOLERANCE[torch.float32])


def as_function(packed: ExpertsNbit, tokens: int) -> tuple[Callable[..., Tensor], tuple[Tensor, ...]]:
    """A module in float64 as a function of everything that is trainable, and where to evaluate it."""
    arguments = inputs(tokens, num_experts=packed.num_experts, hidden=8, dtype=torch.float64).requires_grad_()
    floats = {name: p for name, p in packed.double().named_parameters() if p.requires_grad}

    def function(hidden_states: Tensor, top_k_weights: Tensor, *values: Tensor) -> Tensor:
        call = (hidden_states, arguments.top_k_index, top_k_weights)
        return torch.func.functional_call(packed, dict(zip(floats, values, strict=True)), call)

    return function, (arguments.hidden_states, arguments.top_k_weights, *floats.values())


@pytest.mark.parametrize(("quant_type", "double_quant"), storage_params())
def test_gradcheck_of_the_module(quant_type: str, double_quant: bool) -> None:
    """Finite differences in float64, with respect to everything that is trainable."""
    module = float_experts(layout_class(Layout(has_bias=True)), hidden=8, intermediate=8, num_experts=3)
    packed = ExpertsNbit.from_experts(module, quant_type, double_quant=double_quant)
    function, trainable = as_function(packed, tokens=3)
    assert len(trainable) == 4
    assert torch.autograd.gradcheck(function, trainable)


@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "bias"])
def test_gradients_of_gradients(has_bias: bool) -> None:
    """A gradient penalty works: finite differences of the gradient, in float64."""
    module = float_experts(layout_class(Layout(has_bias=has_bias)), hidden=8, intermediate=8, num_experts=2)
    function, trainable = as_function(ExpertsNbit.from_experts(module), tokens=2)
    assert torch.autograd.gradgradcheck(function, trainable)


@pytest.mark.parametrize(("quant_type", "double_quant"), storage_params())
def test_packed_tensors_get_no_gradient(quant_type: str, double_quant: bool) -> None:
    """Packed bytes and scales do not require a gradient, do not get one, and cannot be made to."""
    packed = packed_experts(layout_class(EVERYTHING), quant_type, double_quant=double_quant)
    gradients(packed, inputs())
    frozen = {name: p for name, p in packed.named_parameters() if not p.is_floating_point()}
    per_stack = 1 if quant_type in ("bf16", "fp16") else 4 if double_quant else 2
    assert len(frozen) == 2 * per_stack
    for parameter in frozen.values():
        assert parameter.grad is None
        assert not parameter.requires_grad
        with pytest.raises(RuntimeError, match="floating point"):
            parameter.requires_grad_()
    assert {n for n, p in packed.named_parameters() if p.requires_grad} == packed.state_dict().keys() - {
        *frozen,
        "quant_metadata",
    }


@pytest.mark.parametrize("trained", ["hidden_states", "top_k_weights", "down_proj_bias"])
def test_one_trained_input(trained: str) -> None:
    """Where a single input is trained, it gets the gradient that it gets among others."""
    packed = packed_experts(layout_class(Layout(has_bias=True)))
    arguments = inputs()
    expected = gradients(packed, arguments.to(torch.float32))[trained].clone()
    alone = arguments.to(torch.float32)
    packed.zero_grad()
    packed.requires_grad_(False)
    tensor = packed.down_proj_bias if trained == "down_proj_bias" else getattr(alone, trained)
    tensor.requires_grad_()
    out = packed(*alone)
    out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(0)))
    torch.testing.assert_close(tensor.grad, expected, rtol=0, atol=0)


def test_frozen_everything_builds_no_graph() -> None:
    """With nothing to train, the output requires no gradient."""
    packed = packed_experts()
    assert not packed(*inputs()).requires_grad


def test_experts_without_tokens_get_zero_gradients() -> None:
    """The biases of experts that no token chose get zeros, not nothing: DDP waits for every gradient."""
    packed = packed_experts(layout_class(Layout(has_bias=True)))
    arguments = inputs()
    arguments = Inputs(arguments.hidden_states, torch.full_like(arguments.top_k_index, 1), arguments.top_k_weights)
    found = gradients(packed, arguments)
    for name in ("gate_up_proj_bias", "down_proj_bias"):
        assert found[name].shape[0] == EXPERTS
        assert found[name][1].abs().sum() > 0
        assert found[name][[0, 2, 3]].abs().sum() == 0


def test_no_tokens() -> None:
    """A batch without tokens runs forward and backward; parameters get zeros."""
    packed = packed_experts(layout_class(EVERYTHING))
    found = gradients(packed, inputs(tokens=0))
    assert found["hidden_states"].shape == (0, HIDDEN)
    assert all(gradient.abs().sum() == 0 for gradient in found.values())


@pytest.mark.parametrize("tokens", [64, 1024])
def test_bf16_bias_gradients_are_as_accurate_as_eager(tokens: int) -> None:
    """A bias shared by many tokens gets their sum, not a bfloat16 running total that stops growing at 256 terms."""
    original = float_experts(layout_class(Layout(has_bias=True)))
    packed = ExpertsNbit.from_experts(copy.deepcopy(original))
    arguments = inputs(tokens, top_k=1)
    one_expert = Inputs(arguments.hidden_states, torch.zeros_like(arguments.top_k_index), arguments.top_k_weights)
    twin = float_twin(original, packed, torch.bfloat16, torch.bfloat16)
    reference = float_twin(original, packed, torch.float64, torch.bfloat16)

    def bias_gradients(module: torch.nn.Module, dtype: torch.dtype) -> Tensor:
        module.zero_grad()
        module(*one_expert.to(torch.bfloat16).to(dtype)).sum().backward()
        return torch.cat([module.gate_up_proj_bias.grad[0], module.down_proj_bias.grad[0]]).double()

    expected = bias_gradients(reference, torch.float64)
    errors = [
        ((bias_gradients(module, torch.bfloat16) - expected).norm() / expected.norm()).item()
        for module in (packed.bfloat16(), twin)
    ]
    assert errors[0] <= 1.1 * errors[1]
