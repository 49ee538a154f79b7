"""Where a number comes from: what is written beside every row."""

import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

import torch

import hf_qmoe


ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("torch", "transformers", "bitsandbytes", "peft")


def provenance() -> dict[str, str]:
    """Date, commit, versions, processor, threads, and how busy the machine was when the run began."""
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "commit": commit(),
        "hf_qmoe": hf_qmoe.__version__,
        **{package: metadata.version(package) for package in PACKAGES},
        "python": platform.python_version(),
        "cpu": cpu_model(),
        "cores": str(os.cpu_count()),
        "threads": str(torch.get_num_threads()),
        "load": f"{os.getloadavg()[0]:.1f}",
    }


def commit() -> str:
    """Short hash of the commit, with ``+changes`` if the package or the benchmarks differ from it."""
    try:
        head = _git("rev-parse", "--short", "HEAD")
        changed = _git("status", "--porcelain", "--", "hf_qmoe", "benchmarks/*.py")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{head}+changes" if changed else head


def _git(*arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], cwd=ROOT, check=True, capture_output=True, encoding="utf-8"
    ).stdout.strip()


def cpu_model() -> str:
    """Name of the processor, with the instruction set that torch's kernels use.

    Where machines are rented the name is that of the brand, so family and model follow it.
    """
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        name = _processor(cpuinfo.read_text(encoding="utf-8")) or name
    return f"{name} ({torch.backends.cpu.get_cpu_capability()})"


def _processor(cpuinfo: str) -> str:
    facts: dict[str, str] = {}
    for line in cpuinfo.splitlines():
        name, _, value = line.partition(":")
        facts.setdefault(name.strip(), value.strip())
    numbers = (f"{word} {facts[key]}" for word, key in (("family", "cpu family"), ("model", "model")) if key in facts)
    return ", ".join(filter(None, (facts.get("model name"), " ".join(numbers))))
