"""Routing against a loop: who goes where, in which order, and what happens to indices of no expert."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_qmoe.routing import Routing, route


def naive(top_k_index: list[list[int]], num_experts: int) -> tuple[list[int], list[int], list[int]]:
    """Pairs in expert order, the expert of each, and the offsets, by collecting each expert's pairs in turn."""
    flat = [expert for row in top_k_index for expert in row]
    perm, offsets = [], [0]
    for expert in range(num_experts):
        perm += [pair for pair, e in enumerate(flat) if e == expert]
        offsets.append(len(perm))
    sentinels = sorted({e for e in flat if e >= num_experts})
    perm += [pair for sentinel in sentinels for pair, e in enumerate(flat) if e == sentinel]
    return perm, [flat[pair] for pair in perm], offsets


def assert_routing(routing: Routing, index: torch.Tensor, num_experts: int) -> None:
    """`routing` is the naive one, in int64, and its permutations undo each other."""
    perm, expert_ids, offsets = naive(index.tolist(), num_experts)
    assert routing.perm.tolist() == perm
    assert routing.expert_ids.tolist() == expert_ids
    assert routing.offsets.tolist() == offsets
    pairs = torch.arange(index.numel(), device=index.device)
    assert torch.equal(routing.perm[routing.inverse], pairs)
    assert torch.equal(routing.inverse[routing.perm], pairs)
    assert {t.dtype for t in routing} == {torch.int64}
    assert {t.device for t in routing} == {index.device}


@settings(max_examples=150, deadline=None)
@given(
    tokens=st.integers(0, 40),
    top_k=st.integers(1, 6),
    num_experts=st.integers(1, 12),
    sentinels=st.integers(0, 3),
    dtype=st.sampled_from([torch.int64, torch.int32, torch.int16, torch.uint8]),
    seed=st.integers(0, 2**16),
)
def test_routing_is_that_of_a_loop(tokens, top_k, num_experts, sentinels, dtype, seed):
    """Any number of tokens (none too), experts and sentinels, any integer dtype."""
    generator = torch.Generator().manual_seed(seed)
    index = torch.randint(0, num_experts + sentinels, (tokens, top_k), generator=generator).to(dtype)
    assert_routing(route(index, num_experts), index, num_experts)


@pytest.mark.parametrize("tokens", [0, 1, 7, 300])
def test_routing_on_each_device(tokens, device):
    """The loop's routing, with every tensor on the device of the index."""
    index = torch.randint(0, 9, (tokens, 3), device=device)
    assert_routing(route(index, 8), index, 8)


def test_tokens_keep_their_order_within_an_expert():
    """The sort is stable: an expert sees its tokens in the order of the batch, also in a long one."""
    index = torch.randint(0, 3, (5000, 2))
    routing = route(index, 3)
    for expert in range(3):
        start, end = routing.offsets[expert : expert + 2].tolist()
        assert (routing.perm[start:end].diff() > 0).all()


def test_an_example():
    """Three tokens, two experts each, of four, worked out by hand; expert 2 gets none, and 4 is a sentinel."""
    routing = route(torch.tensor([[3, 0], [0, 4], [1, 3]]), 4)
    assert routing.perm.tolist() == [1, 2, 4, 0, 5, 3]
    assert routing.inverse.tolist() == [3, 0, 1, 5, 2, 4]
    assert routing.expert_ids.tolist() == [0, 0, 1, 3, 3, 4]
    assert routing.offsets.tolist() == [0, 2, 3, 3, 5]


def test_sentinels_of_several_values_belong_to_no_expert():
    """Whatever a rank uses for experts it does not own, from `num_experts` up, sorts behind the last offset."""
    routing = route(torch.tensor([[7, 1], [4, 100], [0, 4]]), 4)
    assert routing.offsets.tolist() == [0, 1, 2, 2, 2]
    assert (routing.expert_ids[2:] >= 4).all()


def test_routing_of_a_strided_index():
    """A slice of a wider index is read in logical order."""
    wide = torch.randint(0, 5, (6, 4))
    index = wide[:, ::2]
    assert not index.is_contiguous()
    assert_routing(route(index, 5), index, 5)


def test_the_index_is_left_as_it_was():
    """Routing writes into no tensor of the router."""
    index = torch.randint(0, 5, (6, 2))
    before = index.clone()
    route(index, 5)
    assert torch.equal(index, before)
    assert index._version == 0
