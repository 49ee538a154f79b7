"""Rows as text. `python benchmarks/table.py [CASE ...]` prints those of the newest recorded runs that have a ratio."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path


_ROOT = str(Path(__file__).resolve().parents[1])
if sys.path[0] == str(Path(__file__).resolve().parent):
    sys.path[0] = _ROOT  # modules here are to be found as `benchmarks.*` only

from benchmarks import results  # noqa: E402
from benchmarks.case import Row  # noqa: E402


def table(title: str, rows: Sequence[Row]) -> str:
    """Rows as text, their configs reduced to what varies."""
    keys = list(dict.fromkeys(key for row in rows for key in row.config))
    varying = [key for key in keys if len({str(row.config.get(key)) for row in rows}) > 1]
    header = ["arm", *varying, "metric", "value", "p20-p80", "ratio", "to", "target"]
    cells = [header]
    for row in rows:
        spread = "" if row.p20 is None or row.p80 is None else f"{row.p20:.2f}-{row.p80:.2f}"
        value = f"{row.value / 1e6:.1f} MB" if row.unit == "bytes" else f"{row.value:.2f} {row.unit}"
        target = "" if row.target is None else f"<= {row.target:g} {'met' if meets_target(row) else 'MISSED'}"
        ratio = "" if row.ratio is None else f"{row.ratio:.3f}"
        config = [str(row.config.get(key, "")) for key in varying]
        cells.append([row.arm, *config, row.metric, value, spread, ratio, row.baseline, target])
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells]
    return "\n".join([f"\n{title}", *lines])


def meets_target(row: Row) -> bool:
    """True for rows without a target."""
    return row.target is None or (row.ratio is not None and row.ratio <= row.target)


def ratios(path: Path) -> list[Row]:
    """The rows of the newest run that compare something with something else."""
    newest = [row for row, _ in results.current(path)]
    return [row for row in newest if row.ratio is not None and row.arm != row.baseline]


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a table for each results file; the exit status is 1 if a target is missed."""
    parser = argparse.ArgumentParser(description="Prints the newest recorded ratios, without running anything.")
    parser.add_argument("cases", nargs="*", metavar="CASE", help="all that are recorded if none is given")
    parser.add_argument("--results", type=Path, default=results.DIRECTORY, help="directory of the results files")
    parsed = parser.parse_args(arguments)
    missed = False
    for path in results.files(parsed.results, parsed.cases):
        rows = ratios(path)
        if rows:
            print(table(path.stem, rows))
        missed = missed or not all(map(meets_target, rows))
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
