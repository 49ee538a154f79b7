"""Runs benchmark cases: `python benchmarks/run.py [CASE ...]`, all of them if none is named.

A case runs, its outputs are verified, its rows are printed as ratios to its baseline and appended to
``benchmarks/results/<case>.csv``. The exit status is 1 if outputs differ (nothing is recorded then) or a target is
missed (which is recorded).
"""

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path


# Started as a script, this directory is the first on the path: its modules are to be found as `benchmarks.*` only.
_ROOT = str(Path(__file__).resolve().parents[1])
if sys.path[0] == str(Path(__file__).resolve().parent):
    sys.path[0] = _ROOT

from benchmarks import results  # noqa: E402
from benchmarks.case import Case, Row  # noqa: E402
from benchmarks.provenance import provenance  # noqa: E402
from benchmarks.registry import CASES  # noqa: E402
from benchmarks.table import meets_target, table  # noqa: E402
from benchmarks.verify import OutputsDiffer  # noqa: E402


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Names of cases, size, where to record."""
    parser = argparse.ArgumentParser(description="Runs benchmark cases and records their rows.")
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"one of {', '.join(CASES)}; all if none is given")
    parser.add_argument("--size", choices=("full", "toy"), default="full", help="toy runs are not recorded by default")
    parser.add_argument("--results", type=Path, help="directory of the results files, also for toy runs")
    parser.add_argument("--no-record", action="store_true", help="print only")
    parsed = parser.parse_args(arguments)
    unknown = [name for name in parsed.cases if name not in CASES]
    if unknown:
        parser.error(f"no case named {', '.join(unknown)}; there are {', '.join(CASES)}")
    if parsed.results is None and parsed.size == "full":
        parsed.results = results.DIRECTORY
    return parsed


def run_case(case: Case, size: str, directory: Path | None) -> list[Row]:
    """Runs, verifies, records and prints one case.

    Raises:
        OutputsDiffer: the arms do not agree; nothing is recorded.
    """
    origin = provenance()
    result = case.run(case.sizes[size])
    case.verify(result.outputs)
    if size != "full":  # targets are for the sizes that are recorded
        result = replace(result, rows=[replace(row, target=None) for row in result.rows])
    print(table(case.name, result.rows))
    for note in result.notes:
        print(f"  {note}")
    if directory is not None:
        results.append(directory / f"{case.name}.csv", result.rows, origin)
    return result.rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs what was asked for; returns the exit status."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler would announce itself in each process
    parsed = parse_arguments(arguments)
    directory = None if parsed.no_record else parsed.results
    status = 0
    for name in parsed.cases or CASES:
        try:
            rows = run_case(CASES[name], parsed.size, directory)
        except OutputsDiffer as error:
            print(f"\n{name}: outputs differ, nothing was recorded: {error}", file=sys.stderr)
            status = 1
            continue
        if not all(meets_target(row) for row in rows):
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
