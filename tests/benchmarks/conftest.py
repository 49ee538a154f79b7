"""Toy runs of the benchmark cases, in this process: starting a new one for each arm takes most of their time."""

from collections.abc import Callable
from typing import Any

import pytest

from benchmarks import decode, llama, load_memory, prequantized_load, quantize_disk, registry


SPAWNING = [module for module in vars(registry).values() if hasattr(module, "fresh_process")]


def _call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


@pytest.fixture(autouse=True)
def _in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in SPAWNING:
        monkeypatch.setattr(module, "fresh_process", _call)
    monkeypatch.setenv(llama.VARIABLE, "no such interpreter")
    for module in (decode, load_memory, prequantized_load, quantize_disk):
        monkeypatch.setattr(module, "disable_progress_bar", lambda: None)  # other tests keep theirs
