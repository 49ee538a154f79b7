"""What a benchmark case is: it runs, its outputs are verified, and only then do its rows count."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


class OutputsDiffer(AssertionError):
    """The arms of a case do not compute the same thing, so their numbers must not be compared."""


@dataclass(frozen=True)
class Row:
    """One measured number.

    Attributes:
        arm: what was measured.
        config: what it was measured at, e.g. ``{"depth": 4}``; JSON types.
        metric: name of the number, e.g. ``peak_rss_anon``.
        unit: ``bytes``, ``ms``, ``GB/s`` or ``nats``.
        value: the number; a median where `repeats` > 1 and the unit is ``ms``, the maximum where it is ``bytes``.
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
    """Rows of one run, and what the arms computed: tensors or digests by arm and name."""

    rows: list[Row]
    outputs: dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Case:
    """A benchmark.

    Attributes:
        name: also the name of its results file.
        run: measures at one of `sizes`.
        verify: raises `OutputsDiffer` unless the arms agree.
        sizes: arguments of `run` by name: ``full`` is what is recorded, ``toy`` what the tests use.
    """

    name: str
    run: Callable[[Any], Result]
    verify: Callable[[dict[str, dict[str, Any]]], None]
    sizes: dict[str, Any]


def require_equal(arm: dict[str, Any], other: dict[str, Any], what: str) -> None:
    """Raises `OutputsDiffer` unless both hold the same names and equal values; tensors are compared bit for bit."""
    if arm.keys() != other.keys():
        raise OutputsDiffer(f"{what}: one has {sorted(arm)}, the other {sorted(other)}")
    for name, value in arm.items():
        expected = other[name]
        if isinstance(value, Tensor):
            if not torch.equal(value, expected):
                difference = (value.double() - expected.double()).abs().max().item()
                raise OutputsDiffer(f"{what}: {name} differs by up to {difference:.3g}")
        elif value != expected:
            raise OutputsDiffer(f"{what}: {name} is {value!r} and {expected!r}")
