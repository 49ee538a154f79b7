"""Any routing gives the reference's result; calls that do not fit raise."""

import copy
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hf_qmoe.experts import ExpertsNbit
from hf_qmoe.ops.reference import experts_forward
from tests.support.experts import (
    EXPERTS,
    HIDDEN,
    Inputs,
    Layout,
    decoded_stack,
    float_experts,
    gate_function,
    gradients,
    inputs,
    layout_class,
    packed_experts,
    relative_error,
)
from tests.support.oracle import assert_same_bits, dtype_name


SIZE = {"hidden": 32, "intermediate": 32}
quickly = settings(max_examples=40, deadline=None, derandomize=True)


@cache
def small(num_experts: int, has_bias: bool) -> ExpertsNbit:
    """A small packed module in float64, its blocks within rows."""
    torch.manual_seed(num_experts)
    cls = layout_class(Layout(has_bias=has_bias))
    return ExpertsNbit.from_experts(float_experts(cls, num_experts=num_experts, **SIZE), blocksize=32).double()


class Reference(torch.nn.Module):
    """The executable specification with the weights and biases of a packed module."""

    def __init__(self, packed: ExpertsNbit) -> None:
        super().__init__()
        self.weights = [decoded_stack(packed, name).double() for name in packed.stack_names]
        self.names = [f"{name}_bias" for name in packed.stack_names] if packed.has_bias else []
        for name in self.names:
            self.register_parameter(name, torch.nn.Parameter(getattr(packed, name).detach().clone()))

    def forward(self, *arguments: Tensor) -> Tensor:
        biases = (getattr(self, name) for name in self.names)
        return experts_forward(*arguments, *self.weights, gate_function("concatenated"), *biases)


@st.composite
def routings(draw: st.DrawFn, sentinels: bool = False) -> tuple[int, Inputs]:
    """E and inputs of T in 0..40 tokens, k in 1..4 experts each (repeats too), drawn from any subset of them."""
    num_experts = draw(st.integers(1, 6))
    tokens, top_k = draw(st.integers(0, 40)), draw(st.integers(1, 4))
    names = range(num_experts + 3 if sentinels else num_experts)
    chosen = torch.tensor(draw(st.lists(st.sampled_from(names), min_size=1, unique=True)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    index = chosen[torch.randint(len(chosen), (tokens, top_k), generator=generator)]
    index = index.to(draw(st.sampled_from([torch.int64, torch.int32])))
    hidden_states = torch.randn(tokens, SIZE["hidden"], generator=generator, dtype=torch.float64)
    weights = torch.rand(tokens, top_k, generator=generator, dtype=torch.float64)
    return num_experts, Inputs(hidden_states, index, weights.masked_fill(index >= num_experts, 0.0))


@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "bias"])
@given(case=routings())
@quickly
def test_any_routing_equals_the_reference(case: tuple[int, Inputs], has_bias: bool) -> None:
    """Forward and gradients, whichever experts are hit, how often, and in which integer dtype they are named."""
    num_experts, arguments = case
    packed = small(num_experts, has_bias)
    reference = Reference(packed)
    assert relative_error(packed(*arguments), reference(*arguments)) <= 1e-12
    expected = gradients(reference, arguments.to(torch.float64)) if arguments.hidden_states.numel() else {}
    actual = gradients(packed, arguments.to(torch.float64))
    assert {n: e for n in expected if (e := relative_error(actual[n], expected[n])) > 1e-11} == {}


@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "bias"])
@given(case=routings(sentinels=True))
@quickly
def test_sentinels_add_nothing(case: tuple[int, Inputs], has_bias: bool) -> None:
    """Indices of E and more, which expert parallelism gives to experts of other ranks, leave the output alone."""
    num_experts, arguments = case
    packed = small(num_experts, has_bias)
    assert relative_error(packed(*arguments), Reference(packed)(*arguments)) <= 1e-12


@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "bias"])
def test_sentinels_get_no_gradient(has_bias: bool) -> None:
    """The routing weight of a sentinel gets zero, as in transformers: another rank's expert earns it its gradient."""
    packed = small(3, has_bias)
    index = torch.tensor([[0, 3], [4, 1], [3, 5], [2, 2]])
    weights = torch.rand(4, 2, dtype=torch.float64).masked_fill(index >= 3, 0.0)
    arguments = Inputs(torch.randn(4, SIZE["hidden"], dtype=torch.float64), index, weights)
    expected = gradients(Reference(packed), arguments.to(torch.float64))
    found = gradients(packed, arguments.to(torch.float64))
    assert {name: e for name in expected if (e := relative_error(found[name], expected[name])) > 1e-11} == {}
    assert found["top_k_weights"][index >= 3].tolist() == [0.0, 0.0, 0.0, 0.0]
    assert found["top_k_weights"][index < 3].abs().min() > 0


@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "bias"])
def test_ranks_of_expert_parallelism_add_up(has_bias: bool) -> None:
    """Two modules with half of the experts each, given sentinels for the other half, sum to the whole layer."""
    whole = float_experts(layout_class(Layout(has_bias=has_bias)))
    arguments = inputs().requires_grad_()
    expected = ExpertsNbit.from_experts(copy.deepcopy(whole))(*arguments)
    total = torch.zeros_like(expected)
    for rank in range(2):
        local = copy.deepcopy(whole)
        for name, parameter in whole.named_parameters():
            setattr(local, name, torch.nn.Parameter(parameter.detach()[2 * rank : 2 * rank + 2].clone()))
        local.num_experts, local._is_expert_parallel = 2, True
        index = arguments.top_k_index - 2 * rank
        index = index.masked_fill((index < 0) | (index >= 2), 2)
        weights = arguments.top_k_weights.masked_fill(index == 2, 0.0)
        total = total + ExpertsNbit.from_experts(local)(arguments.hidden_states, index, weights)
    assert relative_error(total, expected) <= 1e-6


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8], ids=dtype_name)
def test_integer_dtypes_of_indices(dtype: torch.dtype) -> None:
    """Indices may come in any integer dtype."""
    packed = packed_experts()
    hidden_states, index, weights = inputs()
    assert_same_bits(packed(hidden_states, index.to(dtype), weights), packed(hidden_states, index, weights))


def test_names_of_gpt_oss() -> None:
    """`router_indices` and `routing_weights` are the other names of the same arguments."""
    packed = packed_experts()
    hidden_states, index, weights = inputs()
    expected = packed(hidden_states, index, weights)
    assert_same_bits(packed(hidden_states, router_indices=index, routing_weights=weights), expected)
    assert_same_bits(packed(hidden_states=hidden_states, top_k_index=index, top_k_weights=weights), expected)


BAD_CALLS = {
    "no-weights": lambda x, i, w: (x, i),
    "no-routing": lambda x, i, w: (x,),
    "3-D-states": lambda x, i, w: (x[None], i, w),
    "1-D-index": lambda x, i, w: (x, i[:, 0], w[:, 0]),
    "fewer-tokens-routed": lambda x, i, w: (x, i[1:], w[1:]),
    "fewer-weights": lambda x, i, w: (x, i, w[:, :1]),
    "weights-per-expert": lambda x, i, w: (x, i, torch.rand(x.shape[0], EXPERTS)),
}


@pytest.mark.parametrize("call", BAD_CALLS.values(), ids=BAD_CALLS)
def test_shapes_that_do_not_belong_together(call: object) -> None:
    """Each raises a `ValueError` that names the arguments."""
    with pytest.raises(ValueError, match=r"hidden_states|top_k"):
        packed_experts()(*call(*inputs()))


def test_wrong_width_of_states() -> None:
    """Hidden states of another width raise, also where there are no tokens."""
    packed = packed_experts()
    for tokens in (0, 3):
        with pytest.raises((RuntimeError, ValueError), match=rf"\b{HIDDEN}\b"):
            packed(*inputs(tokens, hidden=HIDDEN // 2))


def test_negative_indices_raise() -> None:
    """A negative index is no expert and no sentinel."""
    hidden_states, index, weights = inputs()
    with pytest.raises(ValueError, match="negative"):
        packed_experts()(hidden_states, index - 1, weights)


def test_float_indices_raise() -> None:
    """Indices and weights in the wrong order are refused; truncated weights would route every token to expert 0."""
    hidden_states, index, weights = inputs()
    with pytest.raises((TypeError, ValueError), match="top_k_index"):
        packed_experts()(hidden_states, weights, index)


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64], ids=dtype_name)
def test_weights_and_indices_of_other_kinds(dtype: torch.dtype, training: bool) -> None:
    """Weights are floats; a complex index is not rounded to its real part."""
    packed, arguments = packed_experts().train(training), inputs()
    with pytest.raises(ValueError, match="top_k_weights must be floats"):
        packed(arguments.hidden_states, arguments.top_k_index, arguments.top_k_weights.to(dtype))
    if dtype != torch.int64:
        with pytest.raises(ValueError, match="top_k_index must hold integers"):
            packed(arguments.hidden_states, arguments.top_k_index.to(dtype), arguments.top_k_weights)


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("part", ["hidden_states", "top_k_index", "top_k_weights", "down_proj", "gate_up_proj_absmax"])
def test_a_tensor_without_data_is_refused(part: str, training: bool) -> None:
    """On meta any one of them would turn the call into shape arithmetic, and its result into what memory holds."""
    packed, arguments = packed_experts().train(training), inputs()
    if part in Inputs._fields:
        arguments = arguments._replace(**{part: getattr(arguments, part).to("meta")})
    else:
        setattr(packed, part, torch.nn.Parameter(getattr(packed, part).to("meta"), requires_grad=False))
    with pytest.raises(RuntimeError, match="are on cpu, meta"):
        packed(*arguments)
