"""Parametrized weights beside what others do: parametrizations on top, torch's global cache, torch.compile."""

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils import parametrize

from hf_qmoe import parametrize_experts
from hf_qmoe.ops import formats
from hf_qmoe.parametrize import restore_parameter
from tests.support.oracle import (
    assert_same_bits,
    control_weights,
    storage_params,
)
from tests.support.parametrized import SHAPE, TOKENS, Experts, assert_equivalent, packed_and_twin


class Delta(nn.Module):
    """An adapter, as PEFT's `target_parameters` registers one: adds a trainable delta."""

    def __init__(self) -> None:
        super().__init__()
        self.delta = nn.Parameter(0.1 * torch.randn(SHAPE))

    def forward(self, weight: Tensor) -> Tensor:
        """The weight plus the delta."""
        return weight + self.delta


@pytest.mark.parametrize("cached", [False, True], ids=["uncached", "cached"])
def test_a_parametrization_on_top(cached: bool) -> None:
    """A trainable delta is added, gets the gradient it gets on a float weight, is copied, and can be removed."""
    packed, twin = packed_and_twin("nf4", True)
    delta = Delta()
    for module in (packed, twin):
        parametrize.register_parametrization(module, "weight", copy.deepcopy(delta))
    x = torch.randn(TOKENS, SHAPE[-1])
    for module in (packed, copy.deepcopy(packed), twin):
        with parametrize.cached() if cached else torch.enable_grad():
            module(x).square().sum().backward()
            assert (module.weight is module.weight) == cached
        trained = [p for n, p in module.named_parameters() if n.endswith("delta")]
        if module is not twin:
            expected = torch.autograd.grad(twin(x).square().sum(), twin.parametrizations.weight[0].delta)[0]
            assert_same_bits(trained[0].grad, expected)
    with pytest.raises(ValueError, match="further parametrizations"):
        restore_parameter(packed, "weight")
    assert len(packed.parametrizations.weight) == 2
    del packed.parametrizations.weight[1]
    parametrize.remove_parametrizations(twin, "weight", leave_parametrized=False)
    assert_equivalent(packed, twin, x)


class Raising(Experts):
    """Raises in the middle of forward, as a checkpointed region that stops early does."""

    def forward(self, x: Tensor) -> Tensor:
        """Raises `RuntimeError`."""
        raise RuntimeError(f"stopped after {self.weight.sum()}")


class Nested(Experts):
    """Calls a packed child, and itself, from its forward."""

    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.child, self.depth = Experts(), depth

    def forward(self, x: Tensor, depth: int | None = None) -> Tensor:
        """Adds up `depth` levels of its own weight and the child's."""
        depth = self.depth if depth is None else depth
        out = super().forward(x) + self.child(x)
        return out + self(x.tanh(), depth - 1) if depth else out


@pytest.fixture(params=[0, 3, -1], ids=lambda count: f"counter-{count}")
def counter(request: pytest.FixtureRequest) -> Iterator[int]:
    """torch's cache counter as hooks of another package may have left it; restored afterwards."""
    before = parametrize._cache_enabled
    parametrize._cache_enabled = request.param
    yield request.param
    parametrize._cache_enabled = before
    parametrize._cache.clear()


def test_the_cache_is_not_touched(counter: int) -> None:
    """Whatever state torch's global cache is in, it never holds our weight, and its counter stays what it was."""
    nested = Nested()
    twin = copy.deepcopy(nested)
    for module, other in ((nested, twin), (nested.child, twin.child)):
        other.weight.data = control_weights(other.weight.detach(), "nf4", 64, True, torch.float32)
        parametrize_experts(module, "weight", "nf4", 64, True)
    stopped = Raising()
    parametrize_experts(stopped, "weight")
    x = torch.randn(TOKENS, SHAPE[-1])
    for _ in range(2):
        with pytest.raises(RuntimeError, match="stopped after"):
            stopped(x)
        assert_equivalent(nested, twin, x)
        assert (parametrize._cache_enabled, parametrize._cache) == (counter, {})
    for module in (nested, twin, nested.child, stopped):
        module.eval()
        with parametrize.cached():
            assert parametrize._cache_enabled == counter + 1
            if module is not stopped:
                module(x)
            assert (parametrize._cache_enabled, parametrize._cache) == (counter + 1, {})
        assert parametrize._cache_enabled == counter


def test_a_replaced_weight_is_read_anew(counter: int) -> None:
    """Packed bytes assigned, loaded or overwritten between two forwards are those that the next forward uses."""
    packed, _ = packed_and_twin("nf4", True)
    x = torch.randn(TOKENS, SHAPE[-1])
    with parametrize.cached():
        for assign in (True, False):
            packed(x)
            other, other_twin = packed_and_twin("nf4", True)
            packed.load_state_dict(other.state_dict(), assign=assign)
            assert_equivalent(packed, other_twin, x)
        other, other_twin = packed_and_twin("nf4", True)
        other_twin.bias = packed.bias
        for mine, theirs in zip(packed.parameters(), other.parameters(), strict=True):
            if not mine.requires_grad:
                mine.data = theirs.data
        assert_equivalent(packed, other_twin, x)
    assert parametrize._cache == {}


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize(
    ("quant_type", "double_quant"), storage_params([("nf4", True), ("fp8", False), ("bf16", False)])
)
def test_compiled_inference(quant_type: str, double_quant: bool, mode: type, backend: str) -> None:
    """Compiled in one graph, inference gives the bits of eager."""
    packed, twin = packed_and_twin(quant_type, double_quant)
    torch.compiler.reset()
    compiled = torch.compile(packed.eval(), backend=backend, fullgraph=True)
    x = torch.randn(TOKENS, SHAPE[-1])
    with mode():
        assert_same_bits(compiled(x), twin(x))
        assert_same_bits(packed(x), twin(x))


def test_fake_tensors_have_no_memory() -> None:
    """Under a mode that only computes shapes, as memory estimators use it, shapes come out and nothing is unpacked."""
    packed, twin = packed_and_twin("nf4", True)
    x = torch.randn(TOKENS, SHAPE[-1])
    expected, table = twin(x), formats.codebook("int8", "cpu").clone()
    formats._codebook.cache_clear()  # the table of the scales is made within the mode, and outlives it
    with FakeTensorMode(allow_non_fake_inputs=True):
        for weight in (packed.weight, packed.weight[1]):
            assert (torch.randn(2, SHAPE[-1]) @ weight.mT).shape[-2:] == (2, SHAPE[-2])
    assert_same_bits(formats.codebook("int8", "cpu"), table)
    assert_same_bits(packed(x), expected)
