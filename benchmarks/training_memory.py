"""Peak memory of forward and backward through stacked experts layers, against a plain implementation.

The plain layers dequantize each expert and let autograd keep it, so their peak grows by a layer's full-precision
weights with each layer; ours keep packed bytes and activations. Weights are frozen, as in QLoRA: gradients go to the
hidden states and the routing weights.
"""

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from benchmarks import layers
from benchmarks.case import Case, Result, Row
from benchmarks.layers import Dims, MakeLayer
from benchmarks.memory import PeakRss, fresh_process, peak_of_tensors, settle
from benchmarks.verify import require_equal
from hf_qmoe.ops.torch_ops import release_scratch


ARMS: Mapping[str, MakeLayer] = {
    "hf_qmoe": layers.ours,
    "parametrized": layers.ParametrizedLayer,
    "plain": layers.PlainLayer,
}
METRICS = ("peak_rss_anon", "peak_rss", "peak_tensors")
TARGETS = {"hf_qmoe": 0.08, "parametrized": 0.25}


@dataclass(frozen=True)
class Size:
    """What to run; `arms` must hold ``plain``, which the others are compared with. The highest of `passes` counts."""

    dims: Dims = field(default_factory=Dims)
    tokens: int = 512
    depths: tuple[int, ...] = (1, 2, 4)
    passes: int = 3
    threads: int = field(default_factory=torch.get_num_threads)
    arms: Mapping[str, MakeLayer] = field(default_factory=lambda: dict(ARMS))


class Stack:
    """Layers with residual connections, each with its own routing, and one forward and backward through them.

    With `exact`, inputs are in float32.
    """

    def __init__(self, make_layer: MakeLayer, dims: Dims, tokens: int, depth: int, exact: bool = False) -> None:
        self.layers = [make_layer(dims, seed) for seed in range(depth)]
        self.inputs = [layers.inputs(dims, tokens, 100 + seed) for seed in range(depth)]
        if exact:
            self.inputs = [layers.in_float32(given) for given in self.inputs]
        self.leaves = [self.inputs[0].hidden_states, *(i.top_k_weights for i in self.inputs)]
        for leaf in self.leaves:
            leaf.requires_grad_(True)

    def first(self, depth: int) -> "Stack":
        """The first `depth` of the layers, the same objects."""
        stack = copy(self)
        stack.layers, stack.inputs, stack.leaves = self.layers[:depth], self.inputs[:depth], self.leaves[: depth + 1]
        return stack

    def step(self) -> Tensor:
        """Output ``[T, H]``; gradients are left on the leaves."""
        for leaf in self.leaves:
            leaf.grad = None
        hidden = self.leaves[0]
        for layer, given in zip(self.layers, self.inputs, strict=True):
            hidden = hidden + layer(hidden, given.top_k_index, given.top_k_weights)
        hidden.backward(self.inputs[0].grad_output.to(hidden.dtype))
        return hidden.detach()

    def outputs(self) -> dict[str, Tensor]:
        """Output and all gradients."""
        outputs = {"output": self.step()}
        return outputs | {f"grad_{i}": leaf.grad for i, leaf in enumerate(self.leaves) if leaf.grad is not None}

    def rest(self) -> None:
        """Frees all that a step left behind; our reused buffer too, so that it counts."""
        for leaf in self.leaves:
            leaf.grad = None
        release_scratch()
        settle()


def measure(make_layer: MakeLayer, size: Size, depth: int) -> dict[str, Any]:
    """Peaks above the resting state (layers and inputs made, one warm-up step) and outputs of one arm."""
    torch.set_num_threads(size.threads)
    stack = Stack(make_layer, size.dims, size.tokens, depth)
    outputs = stack.outputs()
    anonymous, total = [], []
    for _ in range(size.passes):
        stack.rest()
        with PeakRss() as peak:
            stack.step()
        anonymous.append(peak.anonymous)
        total.append(peak.total)
    stack.rest()
    return {
        "peak_rss_anon": max(anonymous),
        "peak_rss": max(total),
        "peak_tensors": peak_of_tensors(stack.step),
        "outputs": outputs,
    }


def run(size: Size) -> Result:
    """Measures each arm at each depth in a process of its own."""
    rows, outputs = [], {arm: {} for arm in size.arms}  # type: ignore[var-annotated]
    measured: dict[tuple[str, int], dict[str, Any]] = {}
    for depth in size.depths:
        for arm, make_layer in size.arms.items():
            measured[arm, depth] = result = fresh_process(measure, make_layer, size, depth)
            outputs[arm] |= {f"depth_{depth}_{name}": value for name, value in result.pop("outputs").items()}
        for metric in METRICS:
            for arm in size.arms:
                value = measured[arm, depth][metric]
                rows.append(_row(size, depth, arm, metric, value, measured["plain", depth][metric]))
    return Result(rows + _growth(size, measured), outputs)


def _row(size: Size, depth: int, arm: str, metric: str, value: int, plain: int) -> Row:
    with_target = metric != "peak_rss" and depth == max(size.depths)
    repeats = 1 if metric == "peak_tensors" else size.passes
    return Row(
        arm,
        _config(size, depth),
        metric,
        "bytes",
        value,
        baseline="plain",
        ratio=value / plain if plain else None,  # a tiny run may fit into holes of the heap
        target=TARGETS.get(arm) if with_target else None,
        repeats=repeats,
    )


def _growth(size: Size, measured: Mapping[tuple[str, int], dict[str, Any]]) -> list[Row]:
    """What one more layer adds to the peak, relative to the bf16 bytes of its weights."""
    first, last = min(size.depths), max(size.depths)
    weights = 2 * size.dims.weights
    rows = []
    for arm in size.arms if first < last else ():
        growth = (measured[arm, last]["peak_tensors"] - measured[arm, first]["peak_tensors"]) / (last - first)
        config = _config(size, f"{first}-{last}")
        rows.append(
            Row(
                arm,
                config,
                "peak_tensors_per_layer",
                "bytes",
                growth,
                baseline="bf16 weights of a layer",
                ratio=growth / weights,
            )
        )
    return rows


def _config(size: Size, depth: int | str) -> dict[str, Any]:
    return {"depth": depth, **size.dims.config, "T": size.tokens, "dtype": "bfloat16", "quant_type": "nf4"}


def verify(outputs: dict[str, dict[str, Any]]) -> None:
    """Output and every gradient of each arm equal those of the plain layers, bit for bit."""
    for arm, values in outputs.items():
        require_equal(values, outputs["plain"], f"{arm} against plain")


CASE = Case(
    "training_memory",
    run,
    verify,
    {"full": Size(), "toy": Size(Dims(4, 64, 64, 2), tokens=16, depths=(1, 2), passes=1)},
)
