"""Dtypes of an experts layer: what the caller hands in comes back, products run in the compute dtype."""

import copy

import pytest
import torch
from torch import Tensor

from hf_qmoe.experts import ExpertsNbit
from tests.support.experts import (
    Inputs,
    Layout,
    float_experts,
    float_twin,
    gradients,
    inputs,
    layout_class,
    packed_experts,
    relative_error,
)
from tests.support.oracle import assert_same_bits, dtype_name, storage_params


FLOATS = (torch.float32, torch.bfloat16, torch.float16)
WITH_BIAS = layout_class(Layout("clamped", has_bias=True, is_transposed=True))


def with_compute_dtype(module: ExpertsNbit, dtype: torch.dtype | None) -> ExpertsNbit:
    """A copy of `module` that computes in `dtype`."""
    module = copy.deepcopy(module)
    module.compute_dtype = dtype
    return module


@pytest.mark.parametrize("weights_dtype", FLOATS, ids=lambda d: f"weights-{dtype_name(d)}")
@pytest.mark.parametrize("hidden_dtype", [*FLOATS, torch.float64], ids=lambda d: f"hidden-{dtype_name(d)}")
@pytest.mark.parametrize("compute_dtype", [None, *FLOATS], ids=lambda d: f"compute-{dtype_name(d)}")
def test_dtypes_of_outputs_and_gradients(
    compute_dtype: torch.dtype | None, hidden_dtype: torch.dtype, weights_dtype: torch.dtype
) -> None:
    """The output has the dtype of the hidden states, each gradient that of its tensor, and both are right."""
    original = float_experts(WITH_BIAS)
    packed = ExpertsNbit.from_experts(copy.deepcopy(original), compute_dtype=compute_dtype)
    arguments = inputs().to(hidden_dtype, weights_dtype)
    out = packed(*arguments)
    assert out.dtype == hidden_dtype
    found = gradients(packed, arguments)
    expected_dtypes = {"hidden_states": hidden_dtype, "top_k_weights": weights_dtype}
    assert {n: g.dtype for n, g in found.items()} == {n: expected_dtypes.get(n, torch.float32) for n in found}

    products = compute_dtype or hidden_dtype
    twin = float_twin(original, packed)
    # A few roundings in the coarsest dtype that takes part.
    coarsest = max(torch.finfo(d).eps for d in (products, hidden_dtype, weights_dtype))
    expected = arguments.to(torch.float64)
    assert relative_error(out, twin(*expected)) <= 4 * coarsest
    for name, gradient in gradients(twin, expected).items():
        assert relative_error(found[name], gradient) <= 16 * coarsest, name


@pytest.mark.parametrize(("quant_type", "double_quant"), storage_params())
def test_bf16_products_of_fp32_states(quant_type: str, double_quant: bool, device: str) -> None:
    """float32 states (as k-bit preparation leaves them) are rounded once, and the result is not rounded again."""
    original = float_experts(WITH_BIAS, device)
    options = {"quant_type": quant_type, "double_quant": double_quant}
    packed = ExpertsNbit.from_experts(original, **options, compute_dtype=torch.bfloat16)
    arguments = inputs(device=device)
    out = packed(*arguments)
    rounded = arguments.to(torch.bfloat16, torch.float32)
    assert out.dtype == torch.float32
    assert_same_bits(out.bfloat16(), with_compute_dtype(packed, None)(*rounded))
    assert not torch.equal(out, out.bfloat16().float())


@pytest.mark.parametrize("configured", [None, torch.float32, torch.bfloat16], ids=lambda d: f"compute-{dtype_name(d)}")
@pytest.mark.parametrize("hidden_dtype", FLOATS, ids=lambda d: f"hidden-{dtype_name(d)}")
@pytest.mark.parametrize("autocast_dtype", [torch.bfloat16, torch.float16], ids=lambda d: f"autocast-{dtype_name(d)}")
def test_autocast_is_the_compute_dtype(
    autocast_dtype: torch.dtype, hidden_dtype: torch.dtype, configured: torch.dtype | None, device: str
) -> None:
    """Under autocast, outputs and gradients are bit for bit those of a module with that compute dtype."""
    packed = packed_experts(WITH_BIAS).to(device)
    arguments = inputs(device=device).to(hidden_dtype)
    expected = gradients(with_compute_dtype(packed, autocast_dtype), arguments.to(hidden_dtype))
    expected_out = with_compute_dtype(packed, autocast_dtype)(*arguments)

    module = with_compute_dtype(packed, configured)
    live = arguments.to(hidden_dtype).requires_grad_()
    with torch.autocast(device, autocast_dtype):
        out = module(*live)
    assert_same_bits(out, expected_out)
    out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(0)).to(out))
    assert_same_bits(live.hidden_states.grad, expected["hidden_states"])
    assert_same_bits(live.top_k_weights.grad, expected["top_k_weights"])
    assert_same_bits(module.down_proj_bias.grad, expected["down_proj_bias"])

    with torch.autocast(device, autocast_dtype), torch.autocast(device, enabled=False):
        assert_same_bits(module(*arguments), with_compute_dtype(packed, configured)(*arguments))


def test_autocast_keeps_eager_accuracy() -> None:
    """Under autocast the result is no further from float64 than the float module's own under autocast."""
    original = float_experts()
    packed = ExpertsNbit.from_experts(copy.deepcopy(original))
    arguments = inputs(tokens=64)
    twin = float_twin(original, packed, torch.float32)
    expected = float_twin(original, packed, torch.float64, torch.bfloat16)(*arguments.to(torch.float64))
    with torch.autocast("cpu", torch.bfloat16):
        outputs = packed(*arguments), twin(*arguments)
    ours, eager = ((out - expected).norm() / expected.norm() for out in outputs)
    assert ours <= eager


@pytest.mark.parametrize("compute_dtype", FLOATS, ids=dtype_name)
def test_experts_of_a_token_are_added_in_float32(compute_dtype: torch.dtype) -> None:
    """The weighted sum over k loses nothing to the compute dtype: it is that of the rows, to float32 accuracy."""
    packed = packed_experts(compute_dtype=compute_dtype)
    arguments = inputs(tokens=16, top_k=4)

    def rows(slot: int) -> Tensor:
        index = arguments.top_k_index[:, slot : slot + 1]
        return packed(arguments.hidden_states, index, torch.ones_like(index, dtype=torch.float32))

    weights = arguments.top_k_weights.double()
    expected = sum(rows(slot).double() * weights[:, slot : slot + 1] for slot in range(4))
    assert relative_error(packed(*arguments), expected) <= 1e-6


def test_routing_weights_are_not_rounded() -> None:
    """float32 routing weights multiply bfloat16 rows as they are."""
    packed = packed_experts()
    arguments = inputs(top_k=1).to(torch.bfloat16, torch.float32)
    arguments.top_k_weights.uniform_()
    ones = Inputs(arguments.hidden_states, arguments.top_k_index, torch.ones_like(arguments.top_k_weights))
    rows = packed(*ones)
    expected = (rows.float() * arguments.top_k_weights).bfloat16()
    assert not torch.equal(expected, rows * arguments.top_k_weights.bfloat16())
    assert_same_bits(packed(*arguments), expected)
