"""What tests that count live tensors, or run trainers, which collect garbage at every run, have in common."""

import gc
from collections.abc import Iterator

import pytest
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


@pytest.fixture(autouse=True, scope="module")
def small_heap() -> Iterator[None]:
    """Leaves objects that exist already out of garbage collections, or these would take most of the time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def live_tensors() -> list[Tensor]:
    """Tensors that Python knows, after a collection; without the fake ones that a compilation may have left."""
    gc.collect()
    return [o for o in gc.get_objects() if issubclass(type(o), Tensor) and not issubclass(type(o), FakeTensor)]
