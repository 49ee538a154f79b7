"""``hf-qmoe env``: what the package runs on."""

import os
import subprocess
import sys

import pytest
import torch
import transformers

from hf_qmoe import environment
from hf_qmoe.cli import main
from hf_qmoe.ops import native_library


def printed(capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    assert main(["env"]) == 0
    lines = capsys.readouterr().out.splitlines()
    return {name: value.strip() for name, value in (line.split("  ", 1) for line in lines)}


def test_versions_kernels_and_devices(capsys: pytest.CaptureFixture[str]) -> None:
    """Each fact on a line of its own."""
    facts = printed(capsys)
    assert facts["torch"] == torch.__version__
    assert facts["transformers"] == transformers.__version__
    assert facts["threads"] == str(torch.get_num_threads())
    if native_library.available():
        assert facts["CPU kernels"] == f"native, {native_library.instruction_set()}"
    assert (facts["accelerator"] == "none") == (not torch.accelerator.is_available())


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("off", "those of bitsandbytes, because HF_QMOE_CPU_KERNELS=off"),
        ("sse", "none: HF_QMOE_CPU_KERNELS='sse' is unknown; choose one of"),
    ],
)
def test_why_there_are_no_kernels(value: str, expected: str) -> None:
    """A reason, also where the environment asks for what does not exist: that is when one looks here."""
    command = [sys.executable, "-m", "hf_qmoe.cli", "env"]
    done = subprocess.run(
        command, env=os.environ | {"HF_QMOE_CPU_KERNELS": value}, capture_output=True, text=True, check=True
    )
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("CPU kernels")]
    assert expected in line


def test_devices_without_names(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """torch's module for MPS gives none."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device("mps"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    monkeypatch.setattr(torch, "get_device_module", lambda device: object())
    assert printed(capsys)["accelerator"] == "mps: 1 of them"


def test_a_package_that_is_missing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Optional packages need not be there."""
    monkeypatch.setattr(environment, "PACKAGES", ("no-such-package",))
    assert printed(capsys)["no-such-package"] == "not installed"
