"""Counting live tensors is what these tests do most: objects that exist already are left out of collections."""

from tests.support.heap import small_heap  # noqa: F401
