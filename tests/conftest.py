"""Fixtures for all tests. Everything is offline and made here; devices are those that exist."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch


os.environ.setdefault("HF_HUB_OFFLINE", "1")

from hf_qmoe.lora import hooks
from tests.support.models import FAMILIES, save_tiny


def _devices() -> list[str]:
    """The CPU, and one accelerator if there is one."""
    accelerator = torch.accelerator.current_accelerator()
    return ["cpu"] if accelerator is None else ["cpu", accelerator.type]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Runs a test that takes `device` on each device of the machine."""
    if "device" in metafunc.fixturenames:
        metafunc.parametrize("device", _devices())


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def tiny_checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One bf16 checkpoint per family in its original layout; read only."""
    root = tmp_path_factory.mktemp("tiny")
    return {family: save_tiny(root / family, family) for family in FAMILIES}


@pytest.fixture
def warnings_logged() -> Iterator[list[str]]:
    """Messages of warnings that the package logs while the test runs."""
    import logging

    messages: list[str] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    handler = Collect(level=logging.WARNING)
    logger = logging.getLogger("transformers")
    logger.addHandler(handler)
    yield messages
    logger.removeHandler(handler)


@pytest.fixture
def stock_peft(monkeypatch: pytest.MonkeyPatch) -> None:
    """PEFT as it is where `hf_qmoe.lora` was not installed: each method that it wraps is PEFT's own again."""
    for cls, wrapped in hooks.HOOKED:
        for name in wrapped:
            method = vars(cls)[name]
            original = getattr(method, "__func__", method)._qmoe_original
            kind = type(method) if isinstance(method, staticmethod | classmethod) else lambda function: function
            monkeypatch.setattr(cls, name, kind(original))
