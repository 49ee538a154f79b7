"""Counting live tensors is what these tests do most."""

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="module")
def _small_heap() -> Iterator[None]:
    """Leaves objects that exist already out of garbage collections, or counting tensors takes most of the time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
