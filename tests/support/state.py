"""Packed modules and their state: made empty or filled, snapshot, compared bit for bit."""

import torch
from torch import Tensor, nn

from hf_qmoe.experts import ExpertsNbit
from tests.support.experts import EXPERTS, HIDDEN, INTERMEDIATE
from tests.support.oracle import assert_same_bits


def plain(quant_type: str = "nf4", blocksize: int = 64, **options: object) -> ExpertsNbit:
    """An empty module of the constructor."""
    return ExpertsNbit(EXPERTS, HIDDEN, INTERMEDIATE, quant_type=quant_type, blocksize=blocksize, **options)


def filled(quant_type: str = "nf4", blocksize: int = 64, **options: object) -> ExpertsNbit:
    """A module of `from_float` with random weights."""
    up = 0.3 * torch.randn(EXPERTS, 2 * INTERMEDIATE, HIDDEN)
    down = 0.3 * torch.randn(EXPERTS, HIDDEN, INTERMEDIATE)
    return ExpertsNbit.from_float(up, down, quant_type=quant_type, blocksize=blocksize, **options)


def snapshot(module: nn.Module) -> dict[str, Tensor]:
    """Copies of all integer tensors: packed bytes, scales, metadata."""
    return {n: t.clone() for n, t in module.state_dict().items() if not t.is_floating_point()}


def assert_same_state(module: nn.Module, expected: dict[str, Tensor]) -> None:
    """Same names, dtypes and bits as `expected`."""
    actual = snapshot(module)
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert_same_bits(actual[name], tensor)
