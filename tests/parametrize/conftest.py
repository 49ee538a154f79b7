"""Some of these tests count live tensors: objects that exist already are left out of collections."""

from tests.support.heap import small_heap  # noqa: F401
