"""Times of arms that take turns in one process, as rows."""

import statistics
import time
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

from benchmarks.case import Row


Steps = Mapping[str, Callable[[], Any]]
_WARM_UP_ROUNDS = 2


def milliseconds(function: Callable[[], Any]) -> float:
    """How long one call of `function` takes."""
    start = time.perf_counter()
    function()
    return (time.perf_counter() - start) * 1e3


def interleave(
    steps: Steps,
    rounds: int,
    *,
    alternate: bool = False,
    limit_ms: float = float("inf"),
    keep: Container[str] = (),
    clock: Callable[[Callable[[], Any]], float] = milliseconds,
) -> "Turns":
    """Times all `steps` in turns, so that a busy moment of the machine falls on all of them.

    Args:
        steps: what to call, by arm.
        rounds: calls of each that count, after two that do not.
        alternate: go through the arms backwards in every other round. An arm then follows itself, with its data still
            in the cache: for arms that work in memory of their own, leave it.
        limit_ms: arms whose second call takes longer are dropped, but for those in `keep`.
        clock: calls a step and says how long it took.
    """
    times: dict[str, list[float]] = {arm: [] for arm in steps}
    dropped: dict[str, float] = {}
    for turn in range(_WARM_UP_ROUNDS + rounds):
        order = list(times) if turn % 2 or not alternate else list(times)[::-1]
        for arm in order:
            elapsed = clock(steps[arm])
            if turn >= _WARM_UP_ROUNDS:
                times[arm].append(elapsed)
            elif turn == _WARM_UP_ROUNDS - 1 and elapsed > limit_ms and arm not in keep:
                dropped[arm] = elapsed
                del times[arm]
    return Turns(times, dropped)


class Turns:
    """Milliseconds by arm, round by round, and one call of each arm that was dropped because it is slow."""

    def __init__(self, times: dict[str, list[float]], dropped: dict[str, float]) -> None:
        self.times, self.dropped = times, dropped

    def rows(self, config: dict[str, Any], metric: str, baseline: str) -> list[Row]:
        """A row for each arm, compared with `baseline`; none if that was not timed."""
        if baseline not in self.times:
            return []
        return [time_row(arm, config, metric, t, baseline, self.times[baseline]) for arm, t in self.times.items()]


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
