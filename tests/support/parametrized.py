"""A module whose weight is packed in the parametrized form, and its float twin."""

import copy

import torch
from torch import Tensor, nn

from hf_qmoe import parametrize_experts
from tests.support.oracle import assert_same_bits, control_weights


SHAPE, TOKENS = (3, 32, 64), 5


class Experts(nn.Module):
    """Experts that follow nobody's interface: every expert sees every token."""

    def __init__(self, shape: tuple[int, ...] = SHAPE, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weight = nn.Parameter((0.2 * torch.randn(shape)).to(dtype))
        self.bias = nn.Parameter(0.2 * torch.randn(shape[-2], dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        """``[..., T, N]`` of ``[T, K]``."""
        return x @ self.weight.mT + self.bias


def packed_and_twin(
    quant_type: str = "nf4",
    double_quant: bool = False,
    shape: tuple[int, ...] = SHAPE,
    dtype: torch.dtype = torch.float32,
    blocksize: int = 64,
) -> tuple[Experts, Experts]:
    """A packed module, and a float one with the values that bitsandbytes gives for it."""
    packed = Experts(shape, dtype)
    twin = copy.deepcopy(packed)
    stacked = twin.weight.detach().reshape(-1, *shape[-2:])
    stacked = stacked.float() if dtype == torch.float64 else stacked  # bitsandbytes takes no other; nothing is lost
    twin.weight.data = control_weights(stacked, quant_type, blocksize, double_quant, dtype).view(shape)
    parametrize_experts(packed, "weight", quant_type, blocksize, double_quant)
    return packed, twin


def results(module: nn.Module, x: Tensor) -> list[Tensor]:
    """Output, and gradients of input and bias."""
    x = x.clone().requires_grad_()
    out = module(x)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), (x, module.bias))]


def assert_equivalent(module: nn.Module, twin: nn.Module, x: Tensor | None = None) -> None:
    """Same weight, output and gradients, bit for bit."""
    x = torch.randn(TOKENS, twin.weight.shape[-1], dtype=twin.weight.dtype) if x is None else x
    assert_same_bits(module.weight + 0, twin.weight.detach() + 0)
    for actual, expected in zip(results(module, x), results(twin, x), strict=True):
        assert_same_bits(actual, expected)
