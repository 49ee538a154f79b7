"""`silu_gate` against the plain formula: its bits, its derivatives, and half of what autograd would keep."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from hf_qmoe.ops import gate
from hf_qmoe.ops.gate import silu_gate
from tests.support.oracle import DTYPES, assert_same_bits, dtype_name, poisoned_memory, recorded_saves


by_order = pytest.mark.parametrize("is_concatenated", [True, False], ids=["concatenated", "interleaved"])


def plain(rows: Tensor, is_concatenated: bool) -> Tensor:
    """The formula."""
    first, second = rows.chunk(2, dim=-1) if is_concatenated else (rows[..., ::2], rows[..., 1::2])
    return silu(first) * second


@pytest.mark.parametrize("at_once", [64, 1 << 16], ids=["parts", "whole"])
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize(("count", "width"), [(11, 32), (5, 21), (1, 64), (0, 8), (3, 0)])
@by_order
def test_bits_of_the_plain_formula(
    is_concatenated: bool, count: int, width: int, dtype: torch.dtype, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Output and gradient, a part of the rows at a time or all at once; the strides of the gradient change nothing."""
    monkeypatch.setattr(gate, "_AT_ONCE", at_once)
    x, grad = (3 * torch.randn(count, 2 * width)).to(dtype), torch.randn(width, count).to(dtype).t()
    results = []
    for function, upstream in ((plain, grad.contiguous()), (silu_gate, grad)):
        rows = x.clone().requires_grad_()
        with poisoned_memory():
            out = function(rows, is_concatenated)
            results.append((out.detach(), *torch.autograd.grad(out, rows, upstream)))
    for expected, actual in zip(*results, strict=True):
        assert_same_bits(actual, expected)


@by_order
def test_equals_the_definition_in_float64(is_concatenated: bool) -> None:
    """bfloat16 within the two roundings of its formula."""
    rows = (3 * torch.randn(50, 64)).bfloat16()
    first, second = (t.double() for t in (rows.chunk(2, -1) if is_concatenated else (rows[:, ::2], rows[:, 1::2])))
    exact = first / (1 + (-first).exp()) * second
    torch.testing.assert_close(silu_gate(rows, is_concatenated).double(), exact, rtol=2.02 * 2**-8, atol=1e-30)


@by_order
def test_derivatives_are_those_of_finite_differences(is_concatenated: bool) -> None:
    """First, second and third, in float64."""
    rows = torch.randn(2, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda r: silu_gate(r, is_concatenated), rows)
    assert torch.autograd.gradgradcheck(lambda r: silu_gate(r, is_concatenated), rows)

    def gradient(r: Tensor) -> Tensor:
        return torch.autograd.grad(silu_gate(r, is_concatenated).square().sum(), r, create_graph=True)[0]

    assert torch.autograd.gradgradcheck(gradient, rows)


@by_order
def test_keeps_the_projection_alone(is_concatenated: bool) -> None:
    """One saved tensor, the operand itself; the plain formula keeps the activated gate too."""
    rows = torch.randn(4, 8, requires_grad=True)
    with recorded_saves() as saved:
        silu_gate(rows, is_concatenated)
    with recorded_saves() as others:
        plain(rows, is_concatenated)
    assert [t.data_ptr() for t in saved] == [rows.data_ptr()]
    assert len({t.untyped_storage().data_ptr() for t in others}) == 2


@by_order
def test_is_a_well_formed_operator(is_concatenated: bool) -> None:
    """Schema, shape function and autograd registration agree (torch's own check)."""
    rows = torch.randn(4, 8, requires_grad=True)
    torch.library.opcheck(silu_gate, (rows, is_concatenated))
    torch.library.opcheck(gate.silu_gate_backward, (torch.randn(4, 4, requires_grad=True), rows, is_concatenated))


@pytest.mark.parametrize("shape", [(3, 7), (8,), (2, 3, 8)])
def test_refuses_shapes(shape: tuple[int, ...]) -> None:
    """Rows without halves, or no rows."""
    with pytest.raises(RuntimeError, match="rows must be"):
        silu_gate(torch.randn(shape), True)
