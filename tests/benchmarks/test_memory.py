"""The two ways of measuring a peak, on allocations whose size is known."""

import os
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.memory import PeakRss, fresh_process, mapped_bytes, peak_of_tensors, status_bytes


MB = 1 << 20
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def test_peak_rss_sees_memory_that_is_gone_at_the_end() -> None:
    """64 MB that lived for a moment are in both figures; nothing is on exit."""
    with PeakRss() as peak:
        torch.ones(64 * MB, dtype=torch.uint8)
        for _ in range(20):  # let it be sampled
            torch.ones(64 * MB, dtype=torch.uint8)
    assert 63 * MB < peak.anonymous < 80 * MB
    assert 63 * MB < peak.total < 80 * MB
    assert peak.samples > 1


def test_peak_rss_ends_its_sampler_when_the_call_raises() -> None:
    """No process is left behind."""
    with pytest.raises(ZeroDivisionError), PeakRss() as peak:
        raise ZeroDivisionError
    assert peak._sampler.returncode == 0


def test_peak_of_tensors_is_exact() -> None:
    """10 and 5 MB at once, then 2 MB after 10 were freed; an operator's own temporaries count."""

    def allocate() -> None:
        a = torch.empty(10 * MB, dtype=torch.uint8)
        b = torch.empty(5 * MB, dtype=torch.uint8)
        del a
        c = torch.empty(2 * MB, dtype=torch.uint8)
        del b, c

    assert peak_of_tensors(allocate) == 15 * MB


@torch.library.custom_op("hf_qmoe_benchmarks::double_by_way_of", mutates_args=())
def _double_by_way_of(x: torch.Tensor) -> torch.Tensor:
    twice = x.repeat(2)
    return twice[: x.numel()] + x


def test_peak_of_tensors_looks_inside_operators_and_backward() -> None:
    """What an operator written in Python allocates, and what autograd keeps until backward."""
    x = torch.ones(MB, dtype=torch.uint8)
    assert peak_of_tensors(lambda: _double_by_way_of(x)) == 3 * MB

    leaf = torch.ones(MB, requires_grad=True)

    def keep_and_go_back() -> None:
        leaf.exp().exp().exp().backward(leaf.detach())  # exp keeps its result

    assert 12 * MB <= peak_of_tensors(keep_and_go_back) <= 24 * MB


def test_mapped_files_are_told_from_memory(tmp_path: Path) -> None:
    """A tensor read from safetensors is a mapping until it is copied."""
    file = tmp_path / "x.safetensors"
    save_file({"x": torch.ones(MB)}, file)
    mapped = load_file(file)["x"]
    assert mapped_bytes([mapped, mapped.clone(), torch.ones(7)]) == 4 * MB
    assert peak_of_tensors(lambda: load_file(file)) == pytest.approx(4 * MB, rel=0.01)
    assert peak_of_tensors(lambda: load_file(file)["x"].clone(), [file]) == 4 * MB


def test_fresh_process_is_another_interpreter() -> None:
    """Results and exceptions come back."""
    assert fresh_process(os.getpid) != os.getpid()
    with pytest.raises(ValueError, match="no field 'Rss'"):
        fresh_process(status_bytes, "Rss")
