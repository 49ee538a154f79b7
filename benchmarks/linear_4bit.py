"""Time and memory of a frozen 4-bit linear in training: `hf_qmoe.matmul_4bit` against `bitsandbytes.matmul_4bit`.

Ours saves the packed weight through autograd, so that checkpointing sees it; that must cost nothing in ordinary use.
Both arms multiply by the same packed weight and take turns in one process, each round in the other order; ratios of
times are medians over the rounds.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import bitsandbytes
import bitsandbytes.functional as bnb_functional
import torch
from bitsandbytes.functional import QuantState
from torch import Tensor

import hf_qmoe
from benchmarks.case import Case, Result, Row
from benchmarks.memory import fresh_process, peak_of_tensors
from benchmarks.timing import interleave
from benchmarks.verify import require_equal
from hf_qmoe.ops.torch_ops import release_scratch


Product = Callable[[Tensor, Tensor, QuantState], Tensor]
ARMS: Mapping[str, Product] = {"hf_qmoe": hf_qmoe.matmul_4bit, "bitsandbytes": bitsandbytes.matmul_4bit}
TARGET = 1.05


@dataclass(frozen=True)
class Size:
    """What to run; `shapes` are ``(N, K)``, and `arms` must hold ``bitsandbytes``, the baseline."""

    shapes: tuple[tuple[int, int], ...] = ((2048, 2048), (8192, 2048))
    tokens: tuple[int, ...] = (1, 64, 512)
    rounds: int = 21
    threads: int = field(default_factory=torch.get_num_threads)
    arms: Mapping[str, Product] = field(default_factory=lambda: dict(ARMS))


class _Problem(NamedTuple):
    """A packed weight, an input ``[T, K]`` and the gradient of the output ``[T, N]``."""

    packed: Tensor
    state: QuantState
    x: Tensor
    grad_output: Tensor

    def step(self, product: Product) -> dict[str, Tensor]:
        """Forward, and backward to the input."""
        x = self.x.detach().requires_grad_(True)
        output = product(x, self.packed, self.state)
        output.backward(self.grad_output)
        assert x.grad is not None
        return {"output": output.detach(), "grad": x.grad}

    def peak(self, product: Product, steps: int) -> int:
        """Highest sum of live bytes during `steps` steps. Our reused buffer is freed first, so that it counts."""
        release_scratch()

        def train() -> None:
            for _ in range(steps):
                self.step(product)

        return peak_of_tensors(train)


def _problem(weight: tuple[Tensor, QuantState], tokens: int) -> _Problem:
    generator = torch.Generator().manual_seed(tokens)
    rows, columns = weight[1].shape
    x, grad_output = (torch.randn(tokens, size, generator=generator).bfloat16() for size in (columns, rows))
    return _Problem(*weight, x, grad_output)


def _pack(rows: int, columns: int, nested: bool) -> tuple[Tensor, QuantState]:
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows)).mul_(columns**-0.5)
    return bnb_functional.quantize_4bit(weight.bfloat16(), quant_type="nf4", compress_statistics=nested)


def measure(size: Size) -> Result:
    """Measures all arms at each shape and T; run it in a fresh process."""
    torch.set_num_threads(size.threads)
    rows: list[Row] = []
    outputs: dict[str, dict[str, Any]] = {arm: {} for arm in size.arms}
    for shape in size.shapes:
        for nested in (False, True):
            weight = _pack(*shape, nested)
            for tokens in size.tokens:
                problem = _problem(weight, tokens)
                name = f"{shape[0]}x{shape[1]}_{'nested' if nested else 'plain'}_T{tokens}"
                config = {"T": tokens, "N": shape[0], "K": shape[1], "nested": nested}
                config |= {"dtype": "bfloat16", "quant_type": "nf4"}
                rows += _times(size, problem, config) + _peaks(size, problem, config)
                for arm, product in size.arms.items():
                    outputs[arm] |= {f"{name}_{k}": v for k, v in problem.step(product).items()}
    return Result(rows, outputs)


def _times(size: Size, problem: _Problem, config: dict[str, Any]) -> list[Row]:
    steps = {arm: partial(problem.step, product) for arm, product in size.arms.items()}
    return interleave(steps, size.rounds, alternate=True).rows(config, "forward_backward", "bitsandbytes")


def _peaks(size: Size, problem: _Problem, config: dict[str, Any]) -> list[Row]:
    rows = []
    for metric, steps in (("peak_tensors", 1), ("peak_tensors_two_steps", 2)):
        peaks = {arm: problem.peak(product, steps) for arm, product in size.arms.items()}
        for arm, peak in peaks.items():
            target = TARGET if steps == 1 and arm != "bitsandbytes" else None
            ratio = peak / peaks["bitsandbytes"]
            rows.append(Row(arm, config, metric, "bytes", peak, baseline="bitsandbytes", ratio=ratio, target=target))
    return rows


def run(size: Size) -> Result:
    """`measure` in a process of its own."""
    result: Result = fresh_process(measure, size)
    return result


def verify(outputs: dict[str, dict[str, Any]]) -> None:
    """Output and gradient of each arm equal those of bitsandbytes, bit for bit."""
    for arm, values in outputs.items():
        require_equal(values, outputs["bitsandbytes"], f"{arm} against bitsandbytes")


CASE = Case(
    "linear_4bit",
    run,
    verify,
    {"full": Size(), "toy": Size(((64, 64), (128, 64)), tokens=(1, 16), rounds=7)},
)
