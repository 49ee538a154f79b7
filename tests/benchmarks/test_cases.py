"""Each case at toy size: rows, provenance, verification of outputs with a fault injected, recording."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from bitsandbytes.functional import QuantState
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks import experts_time, layers, linear_4bit, load_memory, results, run, training_memory
from benchmarks.case import Case, OutputsDiffer, Result, Row
from benchmarks.layers import Dims, Layer
from benchmarks.registry import CASES
from hf_qmoe import ExpertsNbit, matmul_4bit


pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the memory cases read /proc")

ORIGIN = {
    *("date", "commit", "hf_qmoe", "torch", "transformers", "bitsandbytes", "peft"),
    *("python", "cpu", "cores", "threads", "load"),
}
ARMS = {
    "training_memory": {"hf_qmoe", "parametrized", "plain"},
    "load_memory": {"bf16", "nf4", "nf4_reload"},
    "experts_time": {"hf_qmoe", "bf16_grouped_mm", "whole_stack"},
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


def _broken_time(monkeypatch: pytest.MonkeyPatch) -> Case:
    make_arms = experts_time.make_arms

    def with_a_fault(dims: Dims) -> dict[str, Layer]:
        return make_arms(dims) | {"hf_qmoe": _one_scale_off(dims, 0)}

    def reference(size: experts_time.Size, packed: Layer) -> Any:
        return whole(size, layers.ours(size.dims, 0))

    whole = experts_time._reference
    monkeypatch.setattr(experts_time, "make_arms", with_a_fault)
    monkeypatch.setattr(experts_time, "_reference", reference)
    return experts_time.CASE


def _one_gradient_off(x: Tensor, packed: Tensor, state: QuantState) -> Tensor:
    out = matmul_4bit(x, packed, state)
    return out + (out - out.detach()) * 0.01  # the output is right


def _broken_linear(monkeypatch: pytest.MonkeyPatch) -> Case:
    arms = linear_4bit.ARMS | {"hf_qmoe": _one_gradient_off}
    return replace(linear_4bit.CASE, sizes={"toy": replace(linear_4bit.CASE.sizes["toy"], arms=arms)})


@pytest.mark.parametrize("broken", [_broken_training, _broken_load, _broken_time, _broken_linear])
def test_an_arm_that_computes_something_else_is_not_recorded(
    broken: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit status 1, a message that names the difference, no results file."""
    case = broken(monkeypatch)
    monkeypatch.setitem(run.CASES, case.name, case)
    assert run.main([case.name, "--size", "toy", "--results", str(tmp_path)]) == 1
    assert "outputs differ" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


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
    assert results.latest(tmp_path / "missed.csv")[0][0] == row


def results_of(rows: list[Row]) -> Result:
    """A result without outputs."""
    return Result(rows, {})


def test_unknown_case_names_those_that_exist(capsys: pytest.CaptureFixture[str]) -> None:
    """argparse's exit status and message."""
    with pytest.raises(SystemExit, match="2"):
        run.main(["trainig_memory"])
    assert "training_memory, load_memory, experts_time" in capsys.readouterr().err
