"""From a bf16 checkpoint on disk to a packed one on disk: our CPU kernels against bitsandbytes' quantizer.

`from_pretrained(..., quantization_config=QMoEConfig())` and `save_pretrained`, of the demo's MoE, in a fresh process
each time; the arms take turns, so that both find the file in the page cache. ``bitsandbytes`` is the same code with
``HF_QMOE_CPU_KERNELS=off``: bitsandbytes packs. Both must write the same bytes. Python's imports are not timed.
"""

import hashlib
import os
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from benchmarks.case import Case, Result, Row
from benchmarks.convergence import MakeModel, demo_model, toy_model
from benchmarks.memory import fresh_process
from benchmarks.timing import milliseconds, time_row
from benchmarks.verify import require_equal
from hf_qmoe import QMoEConfig


BASELINE = "bitsandbytes"
KERNELS = {"hf_qmoe": "auto", BASELINE: "off"}
TARGET = 0.2


@dataclass(frozen=True)
class Size:
    """What to run."""

    make: MakeModel = demo_model
    rounds: int = 7
    threads: int = field(default_factory=torch.get_num_threads)


def measure(checkpoint: Path, threads: int) -> dict[str, Any]:
    """Milliseconds of packing the checkpoint, and digests of the files that it gave; run it in a fresh process."""
    disable_progress_bar()
    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory(prefix="hf_qmoe_bench_") as out:

        def pack() -> None:
            model = AutoModelForCausalLM.from_pretrained(
                checkpoint, dtype=torch.bfloat16, quantization_config=QMoEConfig()
            )
            model.save_pretrained(out)

        elapsed = milliseconds(pack)
        files = sorted(Path(out).glob("*.safetensors"))
        digests = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
        written = sum(file.stat().st_size for file in files)
    return {"pack": elapsed, "digests": digests, "written": written}


def run(size: Size) -> Result:
    """Makes the checkpoint, and packs it again and again."""
    times: dict[str, list[float]] = {arm: [] for arm in KERNELS}
    outputs: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="hf_qmoe_bench_") as directory:
        size.make(Path(directory))
        checkpoint = Path(directory) / "moe-bf16"
        read = sum(file.stat().st_size for file in checkpoint.glob("*.safetensors"))
        for turn in range(size.rounds):
            for arm in KERNELS:
                with patch.dict(os.environ, HF_QMOE_CPU_KERNELS=KERNELS[arm]):  # the new process has it from us
                    found = fresh_process(measure, checkpoint, size.threads)
                times[arm].append(found["pack"])
                outputs[f"{arm}_{turn}" if turn else arm] = found["digests"]
    config = {"model": "demo MoE" if size.make is demo_model else "toy", "read": read, "written": found["written"]}
    config |= {"quant_type": "nf4"}
    rows = [time_row(arm, config, "load_and_save", t, BASELINE, times[BASELINE]) for arm, t in times.items()]
    return Result([_with_target(row) for row in rows], outputs)


def _with_target(row: Row) -> Row:
    return row if row.arm == BASELINE else replace(row, target=TARGET)


def verify(outputs: dict[str, dict[str, Any]]) -> None:
    """Every run of every arm wrote the same files, byte for byte."""
    for arm, digests in outputs.items():
        require_equal(digests, outputs[BASELINE], f"{arm} against {BASELINE}")


CASE = Case("quantize_disk", run, verify, {"full": Size(), "toy": Size(toy_model, rounds=2)})
