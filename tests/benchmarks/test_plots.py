"""Plots and tables from results files; nothing is measured but toy runs."""

from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks import plots, results, run, table
from benchmarks.case import Row


ORIGIN = {"date": "2026-01-01T00:00:00Z", "commit": "abc1234"}


def _row(case: str, arm: str, tokens: int, ratio: float) -> Row:
    config = {"T": tokens, "E": 64, "H": 2048, "I": 1024, "top_k": 8}
    metric = {"experts_time": "forward", "expert_lora": "step"}[case]
    target = 0.5 if arm == "hf_qmoe" else None
    return Row(arm, config, metric, "ms", 100 * ratio, "bf16_grouped_mm", ratio, target, 7, 90 * ratio, 110 * ratio)


def _record(folder: Path, case: str = "experts_time", arms: tuple[str, ...] = ("hf_qmoe", "bf16_grouped_mm")) -> Path:
    rows = [_row(case, arm, tokens, 0.4 if arm == "hf_qmoe" else 1.0) for arm in arms for tokens in (1, 8, 64)]
    path = folder / f"{case}.csv"
    results.append(path, rows, ORIGIN)
    return path


def test_a_plot_is_drawn_from_a_results_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is an SVG, the same each time, and what is not recorded is named."""
    _record(tmp_path)
    assert plots.main(["--results", str(tmp_path)]) == 0
    drawn = tmp_path / "plots" / "experts_time.svg"
    first = drawn.read_bytes()
    assert ElementTree.fromstring(first).tag.endswith("svg")
    assert plots.main(["experts_time", "--results", str(tmp_path)]) == 0
    assert drawn.read_bytes() == first
    assert "nothing is recorded of them: growth" in capsys.readouterr().out


@pytest.mark.parametrize("case", ["growth", "decode", "quantize_disk", "experts_time"])
def test_toy_runs_can_be_drawn(case: str, tmp_path: Path) -> None:
    """What the cases record is what the plots read."""
    assert run.main([case, "--size", "toy", "--results", str(tmp_path)]) == 0
    assert plots.draw(case, tmp_path / f"{case}.csv", tmp_path / "out").stat().st_size > 1000


@pytest.mark.parametrize("case", [case for case in plots.PLOTS if (results.DIRECTORY / f"{case}.csv").exists()])
def test_recorded_rows_can_be_drawn(case: str, tmp_path: Path) -> None:
    """All of them."""
    assert plots.draw(case, results.DIRECTORY / f"{case}.csv", tmp_path).stat().st_size > 1000


def test_arms_of_the_newest_run_alone_are_shown(tmp_path: Path) -> None:
    """An arm that is no longer measured is history."""
    path = _record(tmp_path, arms=("old_arm", "bf16_grouped_mm"))
    results.append(path, [_row("experts_time", "hf_qmoe", 1, 0.4)], ORIGIN | {"date": "2026-02-01T00:00:00Z"})
    assert {row.arm for row, _ in results.current(path)} == {"hf_qmoe"}


def test_the_ratio_table_shows_the_newest_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without the baseline's own; the exit status tells of a missed target."""
    path = _record(tmp_path)
    assert table.main(["--results", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "<= 0.5 met" in printed
    assert "1.000" not in printed
    results.append(path, [_row("experts_time", "hf_qmoe", 8, 0.6)], ORIGIN | {"date": "2026-02-01T00:00:00Z"})
    assert table.main(["--results", str(tmp_path)]) == 1
    assert "<= 0.5 MISSED" in capsys.readouterr().out
    with pytest.raises(FileNotFoundError, match=r"nothing is recorded in .*decode\.csv"):
        table.main(["decode", "--results", str(tmp_path)])
