"""Packed experts under `torch.compile` and on fake tensors: one graph, whatever the routing."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from hf_qmoe.experts import ExpertsNbit
from hf_qmoe.ops.build_native import find_compiler
from hf_qmoe.ops.cuda import READS_ON_HOST
from tests.support.experts import (
    HIDDEN,
    Inputs,
    Layout,
    gradients,
    inputs,
    layout_class,
    packed_experts,
    relative_error,
)
from tests.support.layers import MoELayer, Stack, trainable_gradients
from tests.support.oracle import assert_same_bits


by_layout = pytest.mark.parametrize(
    "layout", [Layout(), Layout("interleaved", has_bias=True, is_transposed=True), Layout("none")], ids=str
)
needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="inductor needs a C++ compiler")
#: Tokens of ten calls. Sizes 0 and 1 are special to torch: it compiles such a call by itself.
TOKENS = (10, 10, 7, 33, 1, 2, 64, 10, 5, 1)


@pytest.fixture(autouse=True)
def _forget_graphs() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def module(layout: Layout, **kwargs: Any) -> ExpertsNbit:
    """A packed module with double-quantized scales."""
    return packed_experts(layout_class(layout), **{"double_quant": True, **kwargs})


def routings() -> list[Inputs]:
    """Ten calls: experts at random, the first alone, the first two, and so on."""
    calls = []
    for step, tokens in enumerate(TOKENS):
        drawn = inputs(tokens)
        index = drawn.top_k_index.clamp(max=(4, 0, 1)[step % 3])
        calls.append(Inputs(drawn.hidden_states, index, drawn.top_k_weights))
    return calls


def recompilations() -> int:
    """How often a graph was compiled again since the counters were cleared."""
    return counters["stats"]["unique_graphs"] - 1


@by_layout
def test_one_graph_gives_the_same_bits(layout: Layout) -> None:
    """`fullgraph=True` meets nothing that depends on the routing; outputs and gradients are those of eager mode."""
    packed = module(layout)
    compiled = torch.compile(packed, backend="aot_eager", fullgraph=True)
    arguments = inputs()
    for index in (arguments.top_k_index, torch.zeros_like(arguments.top_k_index)):
        routed = Inputs(arguments.hidden_states, index, arguments.top_k_weights)
        assert_same_bits(compiled(*routed), packed(*routed))
        expected = {name: gradient.clone() for name, gradient in gradients(packed, routed.to(torch.float32)).items()}
        for name, gradient in gradients(compiled, routed.to(torch.float32)).items():
            assert_same_bits(gradient, expected[name.removeprefix("_orig_mod.")])


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inference_mode"])
@by_layout
def test_ten_routings_recompile_twice_at_most_in_inference(layout: Layout, mode: Any) -> None:
    """A second number of tokens makes their number dynamic, a single token is torch's special case; routing none."""
    packed = module(layout).eval()
    compiled = torch.compile(packed, backend="aot_eager", fullgraph=True)
    with mode():
        for arguments in routings():
            arguments = arguments.to(torch.bfloat16)
            assert_same_bits(compiled(*arguments), packed(*arguments))
    assert recompilations() <= 2


@by_layout
def test_ten_routings_recompile_twice_at_most_in_training(layout: Layout) -> None:
    """The same with gradients, for all that is trainable."""
    packed = module(layout).train()
    compiled = torch.compile(packed, backend="aot_eager", fullgraph=True)
    for arguments in routings():
        expected = {
            name: gradient.clone() for name, gradient in gradients(packed, arguments.to(torch.float32)).items()
        }
        for name, gradient in gradients(compiled, arguments.to(torch.float32)).items():
            assert_same_bits(gradient, expected[name.removeprefix("_orig_mod.")])
    assert recompilations() <= 2


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@by_layout
def test_the_graph_holds_the_operators_that_eager_mode_runs(layout: Layout, training: bool) -> None:
    """Which kernels there are is asked while the graph is traced, when tensors are fake: the answer is the same."""
    packed = module(layout).train(training)
    arguments = inputs(dtype=torch.bfloat16)
    run: list[str] = []
    traced: list[str] = []

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            run.append(func.name())
            return func(*args, **(kwargs or {}))

    def backend(graph: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
        traced.extend(
            node.target.name() for node in graph.graph.nodes if isinstance(node.target, torch._ops.OpOverload)
        )
        return graph.forward

    with torch.no_grad():
        with Record():
            packed(*arguments)
        torch.compile(packed, backend=backend, fullgraph=True)(*arguments)
    expected, actual = ([name for name in names if name.startswith("hf_qmoe::")] for names in (run, traced))
    assert expected
    assert actual == expected


@pytest.mark.parametrize("mode", ["off", "non_reentrant"])
def test_checkpointed_layers(mode: str) -> None:
    """Two layers with router and norm in one graph, each recomputed in backward if checkpointed: eager's gradients."""

    def layers(mode: str) -> Stack:
        torch.manual_seed(0)
        return Stack([MoELayer(module(Layout()), HIDDEN) for _ in range(2)], mode).train()

    def run(function: Callable[[Tensor], Tensor], stack: Stack, x: Tensor) -> dict[str, Tensor]:
        stack.zero_grad()
        x = x.clone().requires_grad_()
        out = function(x)
        out.square().sum().backward()
        return trainable_gradients(stack) | {"x": x.grad, "out": out.detach()}

    eager, stack = layers("off"), layers(mode)
    compiled = torch.compile(stack, backend="aot_eager", fullgraph=True)
    for tokens in (10, 6, 6):
        x = torch.randn(tokens, HIDDEN)
        expected = run(eager, eager, x)
        for name, tensor in run(compiled, stack, x).items():
            assert tensor.any()
            assert_same_bits(tensor, expected[name])
    assert recompilations() <= 1


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_inductor(training: bool) -> None:
    """torch's own compiler takes the operators as they are; what it fuses around them is rounded in another order."""
    packed = module(Layout("interleaved", has_bias=True, is_transposed=True)).train(training)
    compiled = torch.compile(packed, fullgraph=True)
    for arguments in routings()[:2]:
        with nullcontext() if training else torch.no_grad():
            assert relative_error(compiled(*arguments), packed(*arguments)) < 1e-5
        if training:
            expected = {n: g.clone() for n, g in gradients(packed, arguments.to(torch.float32)).items()}
            for name, gradient in gradients(compiled, arguments.to(torch.float32)).items():
                assert relative_error(gradient, expected[name.removeprefix("_orig_mod.")]) < 1e-5
    assert recompilations() <= 1


@pytest.mark.skipif(not READS_ON_HOST, reason="torch before 2.9 has no such tag")
@pytest.mark.parametrize(
    "name",
    ["grouped_linear", "sum_by_expert", "add_expert_lora", "expert_lora_backward"],
)
def test_operators_that_wait_for_the_device_stay_out_of_cuda_graphs(name: str) -> None:
    """transformers compiles decoding with ``mode="reduce-overhead"``, where an operator that waits would fail."""
    assert torch.Tag.cudagraph_unsafe in getattr(torch.ops.hf_qmoe, name).default.tags


@by_layout
def test_fake_tensors_get_a_shape(layout: Layout) -> None:
    """A forward on fake tensors, as tracing and memory estimates run it, reads no data."""
    packed = module(layout)
    arguments = inputs(dtype=torch.bfloat16)

    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        out = packed(*(mode.from_tensor(tensor) for tensor in arguments))
    assert (tuple(out.shape), out.dtype) == ((10, HIDDEN), torch.bfloat16)
