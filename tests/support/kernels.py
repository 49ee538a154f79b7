"""The native CPU kernels, one instruction set after the other."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from hf_qmoe.ops import native_library


@contextmanager
def instruction_set(name: str) -> Iterator[str]:
    """Uses `name` within; skips the test where there are no kernels, or the processor does not have it."""
    before = native_library.instruction_set()
    if before is None:
        pytest.skip(str(native_library.why_not()))
    try:
        native_library.use_instruction_set(name)
    except ValueError as error:
        pytest.skip(str(error))
    try:
        yield name
    finally:
        native_library.use_instruction_set(before)
