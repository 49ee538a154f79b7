"""How fast the machine reads memory: the floor under any product with few rows."""

import statistics

import torch

from benchmarks.case import Row
from benchmarks.timing import milliseconds


_BYTES = 1 << 30  # far beyond any cache
_ROWS = 64  # one sum for each, so that threads share the work without meeting


def read_bandwidth(size: int = _BYTES, repeats: int = 9) -> Row:
    """GB/s of summing rows of integers, on torch's threads (a sum of floats waits for its additions)."""
    data = torch.ones(_ROWS, size // 8 // _ROWS, dtype=torch.int64)
    times = [milliseconds(lambda: data.sum(dim=1)) for _ in range(repeats + 1)][1:]
    p20, *_, p80 = statistics.quantiles([data.nbytes / t / 1e6 for t in times], n=5)
    value = data.nbytes / statistics.median(times) / 1e6
    config = {"bytes": data.nbytes}
    return Row("machine", config, "read_bandwidth", "GB/s", value, repeats=repeats, p20=p20, p80=p80)
