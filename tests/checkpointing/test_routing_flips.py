"""A routing that differs between forward and recomputation, under a forward that is not ours: right, or an error."""

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointError, checkpoint

from hf_qmoe import parametrize_experts
from tests.support.experts import EXPERTS, HIDDEN, float_experts, inputs
from tests.support.oracle import assert_same_bits


TOKENS = 12


def flips(index: Tensor) -> dict[str, Tensor]:
    """Other routings: two tokens exchanged, another expert with as many tokens, and other numbers of tokens."""
    renamed = torch.tensor([1, 0, 3, 2])[index]
    exchanged = index.clone()
    exchanged[0], exchanged[1] = index[1], index[0]
    fewer = torch.full_like(index, EXPERTS - 1)
    one = index.clone()
    one[0] = one[0].flip(0)
    return {"exchanged": exchanged, "renamed": renamed, "fewer": fewer, "slots-swapped": one}


@pytest.mark.parametrize("reentrant", [False, True], ids=["non_reentrant", "reentrant"])
@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
@pytest.mark.parametrize("kind", ["exchanged", "renamed", "fewer", "slots-swapped"])
def test_right_gradient_or_an_error(kind: str, implementation: str, reentrant: bool) -> None:
    """The gradient is that of the recomputed routing, or torch refuses: never that of neither, never NaN."""
    module = float_experts()
    for name in ("gate_up_proj", "down_proj"):
        parametrize_experts(module, name)
    module.config._experts_implementation = implementation
    hidden_states, index, weights = inputs(TOKENS)
    other = flips(index)[kind]
    direction = torch.randn(TOKENS, HIDDEN)

    def step(first: Tensor, second: Tensor | None) -> tuple[Tensor, Tensor]:
        x, w = hidden_states.clone().requires_grad_(), weights.clone().requires_grad_()
        routings = iter([first, second])
        if second is None:
            module(x, first, w).backward(direction)
        else:
            run = checkpoint(lambda x, w: module(x, next(routings), w), x, w, use_reentrant=reentrant)
            run.backward(direction)
        return x.grad, w.grad

    expected, unflipped = step(other, None), step(index, None)
    assert not torch.equal(expected[0], unflipped[0])
    try:
        actual = step(index, other)
    except CheckpointError:
        assert not reentrant
        assert implementation == "eager"  # the others save tensors of the same shapes for every routing
        assert kind != "slots-swapped"
        return
    for gradient, reference in zip(actual, expected, strict=True):
        assert_same_bits(gradient, reference)
