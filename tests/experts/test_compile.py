"""Packed experts under `torch.compile` and on fake tensors: one graph, whatever the routing."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from hf_qmoe.experts import ExpertsNbit
from tests.support.experts import HIDDEN, Inputs, Layout, gradients, inputs, layout_class, packed_experts
from tests.support.oracle import assert_same_bits


by_layout = pytest.mark.parametrize(
    "layout", [Layout(), Layout("interleaved", has_bias=True, is_transposed=True), Layout("none")], ids=str
)


def module(layout: Layout) -> ExpertsNbit:
    """A packed module with double-quantized scales."""
    return packed_experts(layout_class(layout), double_quant=True)


@by_layout
def test_one_graph_gives_the_same_bits(layout: Layout) -> None:
    """`fullgraph=True` meets nothing that depends on the routing; outputs and gradients are those of eager mode."""
    torch._dynamo.reset()
    packed = module(layout)
    compiled = torch.compile(packed, backend="aot_eager", fullgraph=True)
    arguments = inputs()
    for index in (arguments.top_k_index, torch.zeros_like(arguments.top_k_index)):
        routed = Inputs(arguments.hidden_states, index, arguments.top_k_weights)
        assert_same_bits(compiled(*routed), packed(*routed))
        expected = {name: gradient.clone() for name, gradient in gradients(packed, routed.to(torch.float32)).items()}
        for name, gradient in gradients(compiled, routed.to(torch.float32)).items():
            assert_same_bits(gradient, expected[name.removeprefix("_orig_mod.")])


@by_layout
def test_fake_tensors_get_a_shape(layout: Layout) -> None:
    """A forward on fake tensors, as tracing and memory estimates run it, reads no data."""
    packed = module(layout)
    arguments = inputs(dtype=torch.bfloat16)

    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        out = packed(*(mode.from_tensor(tensor) for tensor in arguments))
    assert (tuple(out.shape), out.dtype) == ((10, HIDDEN), torch.bfloat16)
