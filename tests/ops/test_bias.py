"""Biases of routed rows and their gradients."""

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from hf_qmoe.ops.bias import _add_without_waiting, add_expert_bias, sum_by_expert


OFFSETS = torch.tensor([0, 3, 3, 7])  # the second expert has no row, and two rows belong to none


def rows(dtype: torch.dtype = torch.float64, count: int = 9) -> Tensor:
    return torch.randn(count, 5, dtype=dtype)


def naive(x: Tensor, bias: Tensor) -> Tensor:
    """The sum row by row."""
    owners = [0, 0, 0, 2, 2, 2, 2]
    return torch.stack([row + bias[owners[i]] if i < len(owners) else row for i, row in enumerate(x)])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_equals_the_sum_row_by_row(dtype: torch.dtype) -> None:
    """Each row gets its expert's bias, and rows of no expert none; the input is not written to."""
    x, bias = rows(dtype), rows(dtype, 3)
    before = x.clone()
    torch.testing.assert_close(add_expert_bias(x, bias, OFFSETS), naive(x, bias), rtol=0, atol=0)
    torch.testing.assert_close(x, before, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("count", [9, 7])
def test_the_way_of_an_accelerator_has_the_same_bits(dtype: torch.dtype, count: int) -> None:
    """It leaves the offsets on the device: nothing of it reads data, and no row and negative zeros change nothing."""
    x, bias = rows(dtype, count), rows(dtype, 3)
    x[-1] = -0.0
    torch.testing.assert_close(_add_without_waiting(x, bias, OFFSETS), naive(x, bias), rtol=0, atol=0)
    assert _add_without_waiting(x, bias, OFFSETS)[7:].signbit().equal(x[7:].signbit())
    assert _add_without_waiting(x[:0], bias, torch.zeros(4, dtype=torch.int64)).shape == (0, 5)
    with FakeTensorMode() as mode:
        fake = _add_without_waiting(*(mode.from_tensor(t) for t in (x, bias, OFFSETS)))
    assert (fake.shape, fake.dtype) == (x.shape, dtype)


def test_gradients_are_those_of_the_sum_row_by_row() -> None:
    """First and second derivatives, by finite differences, and against plain autograd."""
    x, bias = rows().requires_grad_(), rows(count=3).requires_grad_()
    assert torch.autograd.gradcheck(lambda a, b: add_expert_bias(a, b, OFFSETS), (x, bias))
    assert torch.autograd.gradgradcheck(lambda a, b: add_expert_bias(a, b, OFFSETS), (x, bias))
    assert torch.autograd.gradcheck(lambda a: sum_by_expert(a, OFFSETS), (x,))
    weights = rows()
    ours = torch.autograd.grad((add_expert_bias(x, bias, OFFSETS) * weights).sum(), (x, bias))
    plain = torch.autograd.grad((naive(x, bias) * weights).sum(), (x, bias))
    for a, b in zip(ours, plain, strict=True):
        torch.testing.assert_close(a, b)


def test_bias_gradient_keeps_its_precision() -> None:
    """A bfloat16 gradient of many rows is the exact sum rounded once."""
    offsets, grad = torch.tensor([0, 4096]), torch.rand(4096, 5, dtype=torch.bfloat16)
    exact = grad.double().sum(dim=0, keepdim=True)
    torch.testing.assert_close(sum_by_expert(grad, offsets).double(), exact, rtol=2**-8, atol=0)


@pytest.mark.parametrize("count", [9, 7])
def test_operators_pass_opcheck(count: int) -> None:
    """Schema, fake implementation and autograd registration agree."""
    x, bias = rows(count=count).requires_grad_(), rows(count=3).requires_grad_()
    torch.library.opcheck(add_expert_bias, (x, bias, OFFSETS))
    torch.library.opcheck(sum_by_expert, (x, OFFSETS))


@pytest.mark.parametrize("bias", [torch.zeros(2, 5), torch.zeros(3, 4), torch.zeros(3, 5, dtype=torch.bfloat16)])
def test_bias_that_does_not_fit(bias: Tensor) -> None:
    """A bias of another shape or dtype is refused."""
    with pytest.raises(RuntimeError, match="bias must be"):
        add_expert_bias(rows(torch.float32), bias, OFFSETS)
