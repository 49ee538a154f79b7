"""Time of one experts layer against everything else that computes it, first of all transformers' bf16 `grouped_mm`.

All arms hold the same weights (`benchmarks.arms`), are verified against float32, and take turns in one process, so
that a busy moment of the machine falls on all of them; ratios are medians over the rounds. At one token the experts
that were hit are read once and little else is done: the call, and the kernel within it, is compared with a loop that
reads as many bytes and does nothing else, and with a call of a module that does nothing; both take their turns with
them.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from benchmarks import arms, layers, ours
from benchmarks.arms import BASELINE, Weights, step
from benchmarks.bandwidth import PlainRead
from benchmarks.case import Case, Result, Row, verified_in_run
from benchmarks.empty_call import EmptyCall
from benchmarks.layers import OLMOE, QWEN3_30B, Dims, Layer
from benchmarks.memory import fresh_process
from benchmarks.timing import Turns, interleave
from hf_qmoe.ops import native_product


MODES = ("forward", "forward_backward")
PLAIN_READ = "plain_read"
EMPTY_CALL = "empty_call"
#: Highest time of the kernel for one token, relative to reading its packed bytes: three quarters of the bandwidth.
KERNEL_TARGET = 4 / 3
COMPETITORS = ("whole_stack", "experts4bit_qlora")  # other ways to use packed experts; ours is compared with each


@dataclass(frozen=True)
class Size:
    """What to run. From `many_tokens` on there are fewer rounds; an arm whose call takes longer than `limit_ms` is
    left out there, but for ours and the baseline.
    """

    dims: tuple[Dims, ...] = (OLMOE, QWEN3_30B)
    tokens: tuple[int, ...] = (1, 8, 64, 512, 2048)
    rounds: int = 15
    many_tokens: int = 512
    rounds_of_many: int = 7
    limit_ms: float = 2000.0
    bytes_read: int = 1 << 28
    threads: int = field(default_factory=torch.get_num_threads)


def measure(size: Size, dims: Dims) -> Result:
    """Verifies all arms, then times them in turns; run it in a fresh process."""
    torch.set_num_threads(size.threads)
    weights = Weights(dims)
    made, notes = arms.make_arms(weights)
    arms.check(weights, made, size.tokens)
    plain_read = PlainRead(size.bytes_read)
    rows: list[Row] = []
    for tokens in size.tokens:
        given = layers.inputs(dims, tokens, seed=tokens)
        config = {"T": tokens} | dims.config
        for mode in MODES:
            present = {
                arm: layer for arm, layer in made.items() if mode == "forward" or arm not in ours.INFERENCE_ONLY
            }
            fitting = arms.fitting(present, dims, tokens)
            steps = {arm: partial(step, layer, given, mode) for arm, layer in fitting.items()}
            reading: dict[str, Callable[[], Any]] = {}
            if (tokens, mode) == (1, "forward"):
                reading = {EMPTY_CALL: partial(step, EmptyCall(), given, mode), PLAIN_READ: plain_read}
                steps = _with_reading(steps, reading)
            rounds = size.rounds if tokens < size.many_tokens else size.rounds_of_many
            with kernel_times() as kernel:
                turns = interleave(steps, rounds, limit_ms=size.limit_ms, keep=(BASELINE, *reading, *ours.VARIANTS))
            if reading:
                rows += _read_rows(turns, kernel[-rounds:], plain_read.nbytes, weights, config)
            notes += left_out(present, turns, f"{mode} at E={dims.experts}, T={tokens}", size.limit_ms)
            timed = turns.rows(config, mode, BASELINE)
            rows += [ours.with_time_target(row, mode, tokens) for row in timed]
            for other in COMPETITORS:
                rows += [row for row in turns.rows(config, mode, other) if row.arm in ours.VARIANTS]
    return Result(rows, {}, notes)


def _with_reading(steps: Mapping[str, Any], reading: Mapping[str, Any]) -> dict[str, Any]:
    """The call that does nothing after an arm that unpacks all experts, which leaves nothing in the caches.

    The read at the end, so that our layer, the first, comes after it.
    """
    order: dict[str, Any] = {}
    for arm, function in steps.items():
        order[arm] = function
        if arm == "whole_stack":
            order[EMPTY_CALL] = reading[EMPTY_CALL]
    return {**order, PLAIN_READ: reading[PLAIN_READ]}


def left_out(made: Mapping[str, Layer], turns: Turns, where: str, limit_ms: float) -> list[str]:
    """A note for each arm that was not timed."""
    slow = [f"{arm}: left out of {where}, a call takes {t / 1e3:.1f} s" for arm, t in turns.dropped.items()]
    large = made.keys() - turns.times.keys() - turns.dropped.keys()
    return slow + [f"{arm}: left out of {where}, it would copy gigabytes of weights" for arm in sorted(large)]


@contextmanager
def kernel_times() -> Iterator[list[float]]:
    """Milliseconds that each call of the package's kernels for a whole layer takes within the block."""
    times: list[float] = []
    run = native_product._run

    def timed(name: str, *arguments: Any) -> bool:
        start = time.perf_counter()
        is_done = run(name, *arguments)
        if name == "hf_qmoe_experts":
            times.append((time.perf_counter() - start) * 1e3)
        return is_done

    native_product._run = timed
    try:
        yield times
    finally:
        native_product._run = run


def _read_rows(
    turns: Turns, kernel: list[float], bytes_read: int, weights: Weights, config: Mapping[str, Any]
) -> list[Row]:
    """What one token's packed bytes and scales take: a plain read of as many, our whole call, the kernel within it.

    And a call that reads nothing.
    """
    stored = sum(parameter.nbytes for parameter in weights.packed.parameters())
    share = stored * weights.dims.top_k / weights.dims.experts / bytes_read
    times = {
        PLAIN_READ: [t * share for t in turns.times.pop(PLAIN_READ)],
        ours.DEFAULT: turns.times[ours.DEFAULT],
        EMPTY_CALL: turns.times.pop(EMPTY_CALL),
    }
    if kernel:  # none on a machine without
        times["hf_qmoe_kernel"] = kernel
    rows = Turns(times, {}).rows(config, "read_packed", PLAIN_READ)
    return [replace(row, target=KERNEL_TARGET if row.arm == "hf_qmoe_kernel" else None) for row in rows]


def run(size: Size) -> Result:
    """`measure` in a process of its own for each size of layer."""
    rows: list[Row] = []
    notes: list[str] = []
    for dims in size.dims:
        result: Result = fresh_process(measure, size, dims)
        rows += result.rows
        notes += result.notes
    outputs: dict[str, dict[str, Any]] = {}
    return Result(rows, outputs, list(dict.fromkeys(notes)))


CASE = Case(
    "experts_time",
    run,
    verified_in_run,
    {
        "full": Size(),
        "toy": Size((Dims(4, 64, 64, 2),), tokens=(1, 16), rounds=7, bytes_read=1 << 20),
    },
)
