"""Toy runs of the benchmark cases, in this process: starting a new one for each arm takes most of their time."""

from collections.abc import Callable
from typing import Any

import pytest

from benchmarks import experts_time, linear_4bit, load_memory, training_memory


def _call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


@pytest.fixture(autouse=True)
def _in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (experts_time, linear_4bit, load_memory, training_memory):
        monkeypatch.setattr(module, "fresh_process", _call)
    monkeypatch.setattr(load_memory, "disable_progress_bar", lambda: None)  # other tests keep theirs
