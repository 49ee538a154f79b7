"""Each case at toy size: rows, provenance, verification of outputs with a fault injected, recording."""

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from bitsandbytes.functional import QuantState
from torch import Tensor, nn
from transformers import PreTrainedModel

from benchmarks import (
    arms,
    decode,
    expert_lora,
    experts_time,
    growth,
    layers,
    linear_4bit,
    load_memory,
    ours,
    prequantized_load,
    quantize_disk,
    results,
    run,
    training_memory,
)
from benchmarks.arms import Arm, Weights
from benchmarks.case import Case, Result, Row
from benchmarks.layers import Dims
from benchmarks.registry import CASES
from benchmarks.verify import OutputsDiffer
from hf_qmoe import ExpertsNbit, matmul_4bit
from hf_qmoe.ops import native_library


pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the memory cases read /proc")

ORIGIN = {
    *("date", "commit", "hf_qmoe", "torch", "transformers", "bitsandbytes", "peft"),
    *("python", "cpu", "cores", "threads", "load"),
}
ARMS = {
    "training_memory": {"hf_qmoe", "parametrized", "plain"},
    "load_memory": {"bf16", "nf4", "nf4_reload"},
    "prequantized_load": {"hf_qmoe", "read_file", "bf16", "bf16_fused"},
    "experts_time": {
        *("plain_read", "empty_call", *ours.VARIANTS),
        *("bf16_grouped_mm", "bf16_eager", "bf16_batched_mm", "whole_stack"),
        *(["hf_qmoe_kernel"] if native_library.available() else []),
        *(["experts4bit_qlora"] if find_spec("experts4bit_qlora") else []),
    },
    "growth": {"hf_qmoe", "bf16_grouped_mm", "plain", "stock_peft"},
    "decode": {*ours.VARIANTS, "hf_qmoe_and_linears", "bf16_grouped_mm", "bf16_eager", "bf16_batched_mm"},
    "quantize_disk": {"hf_qmoe", "bitsandbytes"},
    "convergence": {"hf_qmoe", "stock_peft"},
    "expert_lora": {"hf_qmoe", "stock_peft"},
    "streamed_memory": {"recycled", "private"},
    "linear_4bit": {"hf_qmoe", "bitsandbytes"},
    "cpu_kernels": {"native", "bitsandbytes"},
}


@pytest.mark.parametrize("name", CASES)
def test_toy_run_is_verified_and_recorded(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One row per arm at least, each with its complete provenance, and a table for the reader."""
    assert run.main([name, "--size", "toy", "--results", str(tmp_path)]) == 0
    recorded = results.read(tmp_path / f"{name}.csv")
    assert {row.arm for row, _ in recorded} == ARMS[name]
    for row, origin in recorded:
        assert set(origin) == ORIGIN
        assert all(origin.values())
        assert row.value >= 0 or row.metric == "rss_anon_after"  # in a process with a past, a load may free more
        assert row.repeats >= 1
        assert row.config
    table = capsys.readouterr().out
    assert name in table
    assert all(arm in table for arm in ARMS[name])


def _one_scale_off(dims: Dims, seed: int) -> ExpertsNbit:
    module = layers.ours(dims, seed)
    absmax = module.stack("down_proj").absmax
    assert absmax is not None
    absmax[0].mul_(1.5)
    return module


def _broken_training(monkeypatch: pytest.MonkeyPatch) -> Case:
    toy = training_memory.CASE.sizes["toy"]
    arms = {"hf_qmoe": _one_scale_off, "plain": layers.PlainLayer}
    return replace(training_memory.CASE, sizes={"toy": replace(toy, arms=arms, depths=(1,))})


def _broken_load(monkeypatch: pytest.MonkeyPatch) -> Case:
    load = load_memory._load

    def flip_a_bit(directory: Path, arm: str) -> PreTrainedModel:
        model = load(directory, arm)
        for module in model.modules():
            if isinstance(module, ExpertsNbit) and arm == "nf4_reload":
                module.gate_up_proj.data[0, 0, 0] ^= 1
        return model

    monkeypatch.setattr(load_memory, "_load", flip_a_bit)
    return load_memory.CASE


def _broken_reload(monkeypatch: pytest.MonkeyPatch) -> Case:
    load = prequantized_load._load

    def flip_a_bit(folder: Path, **quantization: Any) -> PreTrainedModel:
        model = load(folder, **quantization)
        if folder.parent.name == "packed":
            model.lm_head.weight.data.view(torch.uint8)[0, 0] ^= 1
        return model

    monkeypatch.setattr(prequantized_load, "_load", flip_a_bit)
    return prequantized_load.CASE


def _wrong_scales(module: nn.Module, arm: str) -> None:
    for experts in module.modules():
        if isinstance(experts, ExpertsNbit):
            absmax = experts.stack("down_proj").absmax
            assert absmax is not None
            absmax[0].mul_(1.5)


def _broken_variant(case: Case) -> Callable[[pytest.MonkeyPatch], Case]:
    """Our layer has a wrong scale, wherever the case makes it."""

    def broken(monkeypatch: pytest.MonkeyPatch) -> Case:
        monkeypatch.setattr(ours, "select", _wrong_scales)
        return case

    broken.__name__ = f"_broken_{case.name}"
    return broken


def _broken_competitor(monkeypatch: pytest.MonkeyPatch) -> Case:
    """Not only ours are verified."""
    broken = Arm(lambda weights: arms.ARMS["whole_stack"].make(Weights(weights.dims, weights.seed + 1)))
    monkeypatch.setitem(arms.ARMS, "bf16_eager", broken)  # type: ignore[arg-type]
    return experts_time.CASE


def _broken_files(monkeypatch: pytest.MonkeyPatch) -> Case:
    def measure(*args: Any) -> dict[str, Any]:
        kernels = os.environ["HF_QMOE_CPU_KERNELS"]
        return {"pack": 1.0, "written": 1, "digests": {"model.safetensors": f"packed with {kernels}"}}

    monkeypatch.setattr(quantize_disk, "measure", measure)
    return quantize_disk.CASE


def _one_gradient_off(x: Tensor, packed: Tensor, state: QuantState) -> Tensor:
    out = matmul_4bit(x, packed, state)
    return out + (out - out.detach()) * 0.01  # the output is right


def _broken_linear(monkeypatch: pytest.MonkeyPatch) -> Case:
    arms = linear_4bit.ARMS | {"hf_qmoe": _one_gradient_off}
    return replace(linear_4bit.CASE, sizes={"toy": replace(linear_4bit.CASE.sizes["toy"], arms=arms)})


@pytest.mark.parametrize(
    "broken",
    [
        *(_broken_training, _broken_load, _broken_reload, _broken_linear, _broken_competitor, _broken_files),
        *map(_broken_variant, (experts_time.CASE, expert_lora.CASE, growth.CASE, decode.CASE)),
    ],
)
def test_an_arm_that_computes_something_else_is_not_recorded(
    broken: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit status 1, a message that names the difference, no results file."""
    case = broken(monkeypatch)
    monkeypatch.setitem(run.CASES, case.name, case)
    assert run.main([case.name, "--size", "toy", "--results", str(tmp_path)]) == 1
    assert "outputs differ" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_an_arm_that_cannot_be_had_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The others are measured, and the run says which was left out."""
    monkeypatch.setattr(arms, "find_spec", lambda name: None if name == "experts4bit_qlora" else find_spec(name))
    assert run.main(["experts_time", "decode", "--size", "toy"]) == 0
    printed = capsys.readouterr().out
    assert "experts4bit_qlora: left out, the package experts4bit_qlora is not installed" in printed
    assert "llama_cpp: left out, there is no interpreter that has it" in printed


def test_slow_and_large_arms_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that take too long for a call, or too much memory; never ours or the baseline."""
    monkeypatch.setattr(arms, "_SCRATCH_BYTES", 1 << 19)
    size = replace(experts_time.CASE.sizes["toy"], limit_ms=0.0)
    result = experts_time.run(size)
    kernel = {"hf_qmoe_kernel"} if native_library.available() else set()
    kept = {"plain_read", "empty_call", "bf16_grouped_mm", *ours.VARIANTS}
    assert {row.arm for row in result.rows} == kept | kernel
    assert any("bf16_eager: left out of forward at E=4, T=1, a call takes 0.0 s" in note for note in result.notes)
    assert "bf16_batched_mm: left out of forward at E=4, T=16, it would copy gigabytes of weights" in result.notes


def test_verify_compares_bit_for_bit() -> None:
    """The smallest change of a gradient is found, and so is a missing output."""
    gradient = torch.tensor([1.0, 2.0])
    changed = torch.nextafter(gradient, torch.tensor(3.0))
    plain = {"output": gradient, "grad_0": gradient}
    training_memory.verify({"hf_qmoe": dict(plain), "plain": plain})
    with pytest.raises(OutputsDiffer, match="hf_qmoe against plain: grad_0 differs"):
        training_memory.verify({"hf_qmoe": plain | {"grad_0": changed}, "plain": plain})
    with pytest.raises(OutputsDiffer, match="one has"):
        training_memory.verify({"hf_qmoe": {"output": gradient}, "plain": plain})


def test_a_missed_target_is_told_by_the_exit_status(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It is recorded all the same."""
    row = Row("hf_qmoe", {"depth": 4}, "peak_tensors", "bytes", 30, "plain", ratio=0.3, target=0.25)
    missed = Case("missed", lambda size: results_of([row]), lambda outputs: None, {"full": None})
    monkeypatch.setitem(run.CASES, "missed", missed)
    assert run.main(["missed", "--results", str(tmp_path)]) == 1
    assert results.current(tmp_path / "missed.csv")[0][0] == row


def results_of(rows: list[Row]) -> Result:
    """A result without outputs."""
    return Result(rows, {})


def test_unknown_case_names_those_that_exist(capsys: pytest.CaptureFixture[str]) -> None:
    """argparse's exit status and message."""
    with pytest.raises(SystemExit, match="2"):
        run.main(["trainig_memory"])
    assert "training_memory, load_memory, quantize_disk" in capsys.readouterr().err


def test_importing_the_cases_leaves_the_environment_alone() -> None:
    """The demo lets waiting threads sleep; in a benchmark that would add a wake-up to each product of a token."""
    text = """
import os
before = dict(os.environ)
import benchmarks.registry
print(*(os.environ.items() - before.items()))
"""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OMP_")}
    ran = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True, env=environment)
    assert "OMP_" not in ran.stdout
