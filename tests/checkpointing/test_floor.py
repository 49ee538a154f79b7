"""The oldest bitsandbytes that is supported, whose own hooks leak when checkpointing, leaves ours alone.

`make floor` runs this and other tests with that version; here its hooks are stood in for by the two lines they are.
"""

import re
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import bitsandbytes.nn.parametrize as bnb_parametrize
import pytest
import torch
from packaging.version import Version
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

from hf_qmoe import parametrize_experts
from hf_qmoe.versions import MINIMUM
from tests.support.heap import live_tensors
from tests.support.oracle import assert_same_bits


ROOT = Path(__file__).parents[2]
EXPERTS, ROWS, COLUMNS, TOKENS, STEPS = 3, 48, 64, 5, 4


@pytest.fixture(autouse=True)
def _clean_cache() -> Iterator[None]:
    """Puts torch's global cache right again: these tests leave it on, as the old hooks do."""
    yield
    parametrize._cache_enabled, parametrize._cache = 0, {}


class Layer(nn.Module):
    """A stack that every token goes through, and whose last product ends the recomputation early."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.1 * torch.randn(EXPERTS, COLUMNS, COLUMNS))

    def forward(self, x: Tensor) -> Tensor:
        return sum(torch.tanh(x @ expert.mT) for expert in self.weight) + x  # type: ignore[return-value]


def leak(module: nn.Module) -> None:
    """What bitsandbytes did before 0.50: a post-hook that early stop skips."""

    def enable(*_: object) -> None:
        parametrize._cache_enabled += 1

    def disable(*_: object) -> None:
        parametrize._cache_enabled -= 1
        if not parametrize._cache_enabled:
            parametrize._cache = {}

    module.register_forward_pre_hook(enable)
    module.register_forward_hook(disable)


def train(layers: list[Layer], checkpointed: bool) -> list[Tensor]:
    """The input's gradient of each step."""
    gradients = []
    for step in range(STEPS):
        x = torch.randn(TOKENS, COLUMNS, generator=torch.Generator().manual_seed(step)).requires_grad_()
        out = x
        for layer in layers:
            out = checkpoint(layer, out, use_reentrant=False) if checkpointed else layer(out)
        out.square().sum().backward()
        gradients.append(x.grad)
    return gradients


def full_stacks() -> int:
    """Live float tensors as large as the stack."""
    return sum(t.is_floating_point() and t.shape == (EXPERTS, COLUMNS, COLUMNS) for t in live_tensors())


@pytest.mark.parametrize("quant_type", ["nf4", "int8", "bf16"])
def test_leaking_hooks_of_others_change_nothing(quant_type: str) -> None:
    """With the old hooks on the very same modules, the counter leaks, and nothing of ours stays or goes wrong."""
    layers = [Layer() for _ in range(2)]
    for layer in layers:
        parametrize_experts(layer, "weight", quant_type)
    expected = train(layers, checkpointed=False)
    for layer in layers:
        leak(layer)
    gradients = train(layers, checkpointed=True)
    assert parametrize._cache_enabled >= STEPS  # the stand-in does leak
    assert parametrize._cache == {}
    assert full_stacks() == 0
    for gradient, reference in zip(gradients, expected, strict=True):
        assert_same_bits(gradient, reference)


def test_bitsandbytes_own_parametrization_beside_ours() -> None:
    """Modules that the installed bitsandbytes has parametrized may share a model and a region with ours."""
    ours, theirs = Layer(), Layer()
    parametrize_experts(ours, "weight")
    bnb_parametrize.replace_parameter_4bit(theirs, "weight", quant_type="nf4", blocksize=64)
    expected = train([ours, theirs, ours], checkpointed=False)
    for gradient, reference in zip(train([ours, theirs, ours], checkpointed=True), expected, strict=True):
        assert_same_bits(gradient, reference)
    assert not any(key[0] == id(ours) for key in parametrize._cache)


@pytest.mark.parametrize("package", ["bitsandbytes", "peft"])
def test_the_floor_is_named_once(package: str) -> None:
    """pyproject, the import check (of bitsandbytes) and the version that `make floor` installs agree."""
    (declared,) = re.findall(rf'"{package}>=([\d.]+)"', (ROOT / "pyproject.toml").read_text("utf-8"))
    floor = re.search(r"^FLOOR := (.*)$", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    assert floor
    (tested,) = re.findall(rf"{package}==([\d.]+)", floor[1])
    assert (Version(tested).major, Version(tested).minor) == (Version(declared).major, Version(declared).minor)
    assert Version(MINIMUM.get(package, declared)) == Version(declared)
    assert Version(version(package)) >= Version(declared)
