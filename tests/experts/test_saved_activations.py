"""How much autograd keeps of an experts layer, to the byte: each activation once, whatever the number of experts."""

import pytest
import torch
from torch import Tensor

from benchmarks.memory import peak_of_tensors
from hf_qmoe.experts import ExpertsNbit
from hf_qmoe.ops.combine import combine_experts, dot_rows, spread_tokens
from hf_qmoe.routing import route
from tests.support.experts import Inputs, Layout, float_experts, inputs, layout_class
from tests.support.oracle import recorded_saves


TOKENS, TOP_K, HIDDEN, INTERMEDIATE = 11, 2, 64, 96
PAIRS = TOKENS * TOP_K


def layer(num_experts: int = 4) -> ExpertsNbit:
    """A packed layer of the sizes above."""
    cls = layout_class(Layout())
    sizes = {"hidden": HIDDEN, "intermediate": INTERMEDIATE, "num_experts": num_experts}
    return ExpertsNbit.from_experts(float_experts(cls, **sizes))


def arguments(num_experts: int = 4) -> Inputs:
    """Trainable hidden states and routing weights."""
    return inputs(TOKENS, TOP_K, num_experts, HIDDEN, torch.bfloat16).requires_grad_()


def kept(saved: list[Tensor], *known: Tensor) -> int:
    """Bytes of the activations among `saved`, each storage once, those of `known` tensors left out."""
    ignored = {t.untyped_storage().data_ptr() for t in known}
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in saved if t.is_floating_point()}
    return sum(size for pointer, size in storages.items() if pointer not in ignored)


@pytest.mark.parametrize("num_experts", [4, 32])
def test_a_layer_keeps_its_two_projections(num_experts: int) -> None:
    """The rows of both projections in the compute dtype, and nothing widened, activated or multiplied besides."""
    packed, given = layer(num_experts=num_experts), arguments(num_experts)
    with recorded_saves() as saved:
        packed(*given)
    rows = PAIRS * (2 * INTERMEDIATE + HIDDEN)
    assert kept(saved, *given, *packed.parameters()) == 2 * rows


def test_frozen_routing_weights_keep_the_first_projection_alone() -> None:
    """Rows of the second one are for the gradient of the routing weights."""
    packed, given = layer(), arguments()
    frozen = given.top_k_weights.detach()
    with recorded_saves() as saved:
        packed(given.hidden_states, given.top_k_index, frozen)
    assert kept(saved, *given, frozen, *packed.parameters()) == 2 * PAIRS * 2 * INTERMEDIATE


@pytest.mark.parametrize("change", ["hook", "function"])
def test_a_gate_that_may_do_more_is_called(change: str) -> None:
    """An activation that someone listens to, and a gate that was replaced, are called; the default one need not be."""
    packed, given, calls = layer(), arguments(), []
    plain = packed(*given)
    own = packed._apply_gate
    if change == "hook":
        packed.act_fn.register_forward_hook(lambda *_: calls.append(1))
    else:
        packed._apply_gate = lambda rows: (calls.append(1), own(rows))[1]
    torch.testing.assert_close(packed(*given), plain, rtol=0, atol=0)
    assert calls == [1]


@pytest.mark.parametrize("native", [True, False], ids=["kernels", "torch"])
def test_combining_makes_no_tensor_of_all_rows(native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond results, the operators between tokens and rows take no memory that grows with the experts per token."""
    tokens, top_k, hidden = 256, 8, 128
    if not native:
        monkeypatch.setattr("hf_qmoe.ops.combine._native", lambda *_: False)
    monkeypatch.setattr("hf_qmoe.ops.combine._AT_ONCE", 1 << 12)
    routing = route(torch.randint(0, 8, (tokens, top_k)), 8)
    pairs = routing.inverse.view(tokens, top_k), routing.offsets, torch.bfloat16
    rows, x = torch.randn(tokens * top_k, hidden).bfloat16(), torch.randn(tokens, hidden).bfloat16()
    weights = torch.rand(tokens, top_k)
    widened = 4 * tokens * hidden
    for operator, results in (
        (lambda: combine_experts(rows, weights, *pairs), x.nbytes),
        (lambda: spread_tokens(x, weights, *pairs), rows.nbytes),
        (lambda: dot_rows(x, rows, *pairs), weights.nbytes),
    ):
        operator()
        assert peak_of_tensors(operator) <= results + 3 * widened
