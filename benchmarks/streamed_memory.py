"""Peak memory of a checkpointed step whose packed weights are streamed from a mapped file into a few shared slots.

The peak must not grow by a layer's packed bytes with each layer, as it does where each layer has a buffer of its own
(`private`): only by what checkpointing keeps. The layers are those of ``examples/streamed_weights.py``.
"""

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hf_qmoe
from benchmarks.case import Case, Result, Row
from benchmarks.verify import require_equal
from examples.streamed_weights import (
    EXPERTS,
    TOP_K,
    Operator,
    PackedLinear,
    StreamedExperts,
    make_batch,
    make_weights,
    map_weights,
    packed_bytes,
    peak_of_step,
    step,
)


TARGET = 0.1
ARMS = ("recycled", "private")
OPERATORS: Mapping[str, Callable[[int], Operator]] = {
    "matmul_4bit": lambda hidden: PackedLinear(hf_qmoe.matmul_4bit, hidden),
    "ExpertsNbit": StreamedExperts,
}


@dataclass(frozen=True)
class Size:
    """What to run. Tokens are few: the activations that checkpointing keeps must not hide the weights."""

    hidden: int = 1024
    tokens: int = 16
    slots: int = 2
    depths: tuple[int, ...] = (4, 8, 16)
    operators: Mapping[str, Callable[[int], Operator]] = field(default_factory=lambda: dict(OPERATORS))


def run(size: Size) -> Result:
    """Measures both arms of each operator at each depth, in this process: the count does not depend on the heap."""
    rows, outputs = [], {arm: {} for arm in ARMS}  # type: ignore[var-annotated]
    batch = make_batch(size.tokens, size.hidden, seed=0)
    for name, make_operator in size.operators.items():
        operator = make_operator(size.hidden)
        with tempfile.TemporaryDirectory() as folder:
            weights = make_weights(operator, max(size.depths), seed=0)
            stored = map_weights(weights, Path(folder) / "packed.safetensors")
            peaks = {}
            for depth in size.depths:
                for arm in ARMS:
                    slots = size.slots if arm == "recycled" else depth
                    gradients = step(operator, stored[:depth], slots, batch)
                    outputs[arm] |= {f"{name}_depth_{depth}_grad_{i}": g for i, g in enumerate(gradients)}
                    peaks[arm, depth] = peak_of_step(operator, stored[:depth], slots, batch)
            rows += _rows(size, name, peaks, packed_bytes(stored[0]))
            del stored
    return Result(rows, outputs)


def _rows(size: Size, operator: str, peaks: Mapping[tuple[str, int], int], layer: int) -> list[Row]:
    """The peaks, and what one more layer adds to them relative to the packed bytes of a `layer`."""
    rows = []
    for depth in size.depths:
        for arm in ARMS:
            config = _config(size, operator, depth)
            peak, private = peaks[arm, depth], peaks["private", depth]
            rows.append(Row(arm, config, "peak_tensors", "bytes", peak, baseline="private", ratio=peak / private))
    first, last = min(size.depths), max(size.depths)
    for arm in ARMS:
        growth = (peaks[arm, last] - peaks[arm, first]) / (last - first)
        rows.append(
            Row(
                arm,
                _config(size, operator, f"{first}-{last}"),
                "peak_tensors_per_layer",
                "bytes",
                growth,
                baseline="packed bytes of a layer",
                ratio=growth / layer,
                target=TARGET if arm == "recycled" else None,
            )
        )
    return rows


def _config(size: Size, operator: str, depth: int | str) -> dict[str, Any]:
    config = {"operator": operator, "depth": depth, "slots": size.slots, "H": size.hidden, "T": size.tokens}
    if operator == "ExpertsNbit":
        config |= {"E": EXPERTS, "I": size.hidden // 2, "top_k": TOP_K}
    return config | {"dtype": "bfloat16", "quant_type": "nf4"}


def verify(outputs: dict[str, dict[str, Any]]) -> None:
    """Every gradient through recycled slots equals that of private ones, bit for bit."""
    require_equal(outputs["recycled"], outputs["private"], "recycled against private")


CASE = Case(
    "streamed_memory",
    run,
    verify,
    {"full": Size(), "toy": Size(hidden=128, tokens=2, slots=1, depths=(2, 4))},
)
