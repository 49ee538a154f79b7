"""Results files: one CSV per case, rows appended, each with the provenance of its run."""

import csv
import json
from collections.abc import Iterable
from dataclasses import asdict, fields
from pathlib import Path

from benchmarks.case import Row
from benchmarks.provenance import provenance


DIRECTORY = Path(__file__).with_name("results")
ROW_COLUMNS = tuple(f.name for f in fields(Row))


def append(path: Path, rows: Iterable[Row], origin: dict[str, str] | None = None) -> None:
    """Adds `rows` to a results file, which is made if it does not exist.

    Raises:
        ValueError: the file has other columns.
    """
    origin = origin or provenance()
    columns = [*ROW_COLUMNS, *origin]
    is_new = not path.exists()
    if not is_new:
        with path.open(newline="", encoding="utf-8") as stream:
            present = next(csv.reader(stream), [])
        if present != columns:
            raise ValueError(f"{path} has the columns {present}, not {columns}; move it away to start a new one")
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, columns, lineterminator="\n")
        if is_new:
            writer.writeheader()
        for row in rows:
            values = asdict(row) | {"config": json.dumps(row.config)}
            writer.writerow({k: _text(v) for k, v in (values | origin).items()})


def _text(value: object) -> str:
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() else f"{value:.4g}"
    return "" if value is None else str(value)


def read(path: Path) -> list[tuple[Row, dict[str, str]]]:
    """Rows of a results file with their provenance, oldest first."""
    with path.open(newline="", encoding="utf-8") as stream:
        return [_parse(record) for record in csv.DictReader(stream)]


def _parse(record: dict[str, str]) -> tuple[Row, dict[str, str]]:
    def number(name: str) -> float | None:
        return float(record[name]) if record[name] else None

    row = Row(
        record["arm"],
        json.loads(record["config"]),
        record["metric"],
        record["unit"],
        float(record["value"]),
        record["baseline"],
        number("ratio"),
        number("target"),
        int(record["repeats"]),
        number("p20"),
        number("p80"),
    )
    return row, {name: value for name, value in record.items() if name not in ROW_COLUMNS}


def current(path: Path) -> list[tuple[Row, dict[str, str]]]:
    """The rows of the newest run: a run measures all of its case, older ones are history."""
    return _newest(read(path))


def current_by_processor(path: Path) -> dict[str, list[Row]]:
    """The rows of the newest run on each processor."""
    rows = read(path)
    processors = dict.fromkeys(origin["cpu"] for _, origin in rows)
    return {cpu: [r for r, _ in _newest((r, o) for r, o in rows if o["cpu"] == cpu)] for cpu in processors}


def _newest(rows: Iterable[tuple[Row, dict[str, str]]]) -> list[tuple[Row, dict[str, str]]]:
    rows = list(rows)
    newest = max((origin["date"] for _, origin in rows), default="")
    return [(row, origin) for row, origin in rows if origin["date"] == newest]


def files(directory: Path, cases: Iterable[str] = ()) -> list[Path]:
    """The results files in `directory`, or those of `cases`.

    Raises:
        FileNotFoundError: a case of which nothing is recorded.
    """
    chosen = [directory / f"{case}.csv" for case in cases]
    for path in chosen:
        if not path.exists():
            raise FileNotFoundError(f"nothing is recorded in {path}")
    return chosen or sorted(directory.glob("*.csv"))
