"""What a benchmark case is: it runs, its outputs are verified, and only then do its rows count."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from benchmarks.verify import OutputsDiffer as OutputsDiffer
from benchmarks.verify import require_equal as require_equal


@dataclass(frozen=True)
class Row:
    """One measured number.

    Attributes:
        arm: what was measured.
        config: what it was measured at, e.g. ``{"depth": 4}``; JSON types.
        metric: name of the number, e.g. ``peak_rss_anon``.
        unit: ``bytes``, ``ms``, ``GB/s``, ``tokens/s`` or ``nats``.
        value: the number; a median where `repeats` > 1 and the unit is ``ms``, the maximum where it is ``bytes``, the
            mean where it is ``nats``.
        baseline: arm or quantity that `ratio` divides by; empty if there is none.
        ratio: `value` relative to `baseline`.
        target: highest `ratio` that is accepted; `None` for informative rows.
        repeats: measurements behind `value`.
        p20: 20th percentile of the repeats.
        p80: 80th percentile of the repeats.
    """

    arm: str
    config: dict[str, Any]
    metric: str
    unit: str
    value: float
    baseline: str = ""
    ratio: float | None = None
    target: float | None = None
    repeats: int = 1
    p20: float | None = None
    p80: float | None = None


@dataclass(frozen=True)
class Result:
    """Rows of one run, and what the arms computed: tensors or digests by arm and name.

    A case that verifies its arms before it times them leaves `outputs` empty. `notes` say what was left out, and why.
    """

    rows: list[Row]
    outputs: dict[str, dict[str, Any]]
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Case:
    """A benchmark.

    Attributes:
        name: also the name of its results file.
        run: measures at one of `sizes`.
        verify: raises `OutputsDiffer` unless the arms agree; `verified_in_run` where `run` has asked that already.
        sizes: arguments of `run` by name: ``full`` is what is recorded, ``toy`` what the tests use.
    """

    name: str
    run: Callable[[Any], Result]
    verify: Callable[[dict[str, dict[str, Any]]], None]
    sizes: dict[str, Any]


def verified_in_run(outputs: dict[str, dict[str, Any]]) -> None:
    """For cases whose `run` verifies its arms itself, before it times them."""
