"""A fixture for modules whose tests count live tensors, or run trainers, which collect garbage at every run."""

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="module")
def small_heap() -> Iterator[None]:
    """Leaves objects that exist already out of garbage collections, or these would take most of the time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
