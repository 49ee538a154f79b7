"""Times of arms that take turns in one process, as rows."""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.case import Row


def milliseconds(function: Callable[[], Any]) -> float:
    """How long one call of `function` takes."""
    start = time.perf_counter()
    function()
    return (time.perf_counter() - start) * 1e3


def time_row(
    arm: str, config: dict[str, Any], metric: str, measured: Sequence[float], baseline: str, others: Sequence[float]
) -> Row:
    """Median and percentiles of `measured`, and the median of the ratios to `others`, the baseline's, turn by turn."""
    p20, *_, p80 = statistics.quantiles(measured, n=5)
    return Row(
        arm,
        config,
        metric,
        "ms",
        statistics.median(measured),
        baseline=baseline,
        ratio=statistics.median(a / b for a, b in zip(measured, others, strict=True)),
        repeats=len(measured),
        p20=p20,
        p80=p80,
    )
