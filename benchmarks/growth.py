"""How time and memory grow with tokens, experts, depth and LoRA rank: the lines that `benchmarks/plots.py` draws.

Four axes, each measured in a process of its own. At every point the arms are verified against float32, take turns
being timed, and then the peak of their live tensors is counted. Steps are forward and backward to hidden states and
routing weights (and to the factors, along the rank). Informative: there is no target.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks import arms, expert_lora, layers, ours, verify
from benchmarks.arms import ARMS, BASELINE, Arm, Weights, float_experts, step
from benchmarks.case import Case, Result, Row, verified_in_run
from benchmarks.layers import OLMOE, Dims, Layer
from benchmarks.memory import fresh_process, peak_of_tensors
from benchmarks.timing import Steps, interleave
from benchmarks.training_memory import Stack
from hf_qmoe.ops.torch_ops import release_scratch


STEP = "forward_backward"


@dataclass(frozen=True)
class Size:
    """What to run: points along each axis, and what is held fixed on the others."""

    dims: Dims = OLMOE
    tokens: tuple[int, ...] = (1, 4, 16, 64, 256, 1024)
    experts: tuple[int, ...] = (8, 16, 32, 64, 128)
    depths: tuple[int, ...] = (1, 2, 4, 6)  # activations of layers without norms soon overflow
    ranks: tuple[int, ...] = (4, 16, 64, 256)
    fixed_tokens: int = 64
    fixed_experts: int = 16  # along depth and rank: the deepest stack has to fit in bf16
    rounds: int = 7
    threads: int = field(default_factory=torch.get_num_threads)

    @property
    def small(self) -> Dims:
        """The layer that depth and rank are varied of."""
        return replace(self.dims, experts=self.fixed_experts)


def _measure(steps: Steps, held: Mapping[str, int], config: dict[str, Any], baseline: str, rounds: int) -> list[Row]:
    """Times of all arms, peaks of their tensors above the resting state, and what they hold at rest."""
    rows = interleave(steps, rounds).rows(config, STEP, baseline)
    peaks = {}
    for arm, function in steps.items():
        release_scratch()  # our buffer counts
        peaks[arm] = peak_of_tensors(function)
    for metric, found in (("peak_tensors", peaks), ("weights", held)):
        for arm, value in found.items():
            rows.append(Row(arm, config, metric, "bytes", value, baseline, value / found[baseline]))
    return rows


def _held(layer: Any) -> int:
    """Bytes of parameters and buffers."""
    assert isinstance(layer, nn.Module)
    return sum(tensor.nbytes for tensor in (*layer.parameters(), *layer.buffers()))


def _one_layer(size: Size, axis: str, dims: Dims, tokens: tuple[int, ...]) -> list[Row]:
    weights = Weights(dims)
    chosen: dict[str, Arm] = {arm: ARMS[arm] for arm in (ours.DEFAULT, BASELINE)}
    made, _ = arms.make_arms(weights, chosen)
    arms.check(weights, made, tokens)
    rows = []
    for count in tokens:
        given = layers.inputs(dims, count, seed=count)
        steps = {arm: partial(step, layer, given, STEP) for arm, layer in made.items()}
        held = {arm: _held(layer) for arm, layer in made.items()}
        rows += _measure(steps, held, {"axis": axis, "T": count} | dims.config, BASELINE, size.rounds)
    return rows


def along_tokens(size: Size) -> list[Row]:
    """One layer, more and more tokens."""
    return _one_layer(size, "T", size.dims, size.tokens)


def along_experts(size: Size) -> list[Row]:
    """One layer with more and more experts, of which each token visits as many."""
    rows = []
    for experts in size.experts:
        rows += _one_layer(size, "E", replace(size.dims, experts=experts), (size.fixed_tokens,))
    return rows


def _ours(dims: Dims, seed: int) -> Layer:
    module = layers.ours(dims, seed)
    ours.select(module, ours.DEFAULT)
    return module


def _grouped_mm(dims: Dims, seed: int) -> Layer:
    module: Layer = float_experts(dims, "grouped_mm", Weights(dims, seed).bf16)
    return module


def _float32(dims: Dims, seed: int) -> Layer:
    """A reference that holds its weights during a call only: many layers in float32 would not fit."""
    weights = Weights(dims, seed)

    def experts(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        out: Tensor = weights.reference()(hidden_states, top_k_index, top_k_weights)
        return out

    return lambda *given: checkpoint(experts, *given, use_reentrant=False)


def along_depth(size: Size) -> list[Row]:
    """More and more layers; ``plain`` dequantizes each expert and lets autograd keep it.

    Verified is the deepest stack, for the others are its first layers.
    """
    dims, tokens, deepest = size.small, size.fixed_tokens, max(size.depths)
    makers = {ours.DEFAULT: _ours, BASELINE: _grouped_mm, "plain": layers.PlainLayer}
    stacks = {arm: Stack(make, dims, tokens, deepest) for arm, make in makers.items()}
    exact = _of_stack(Stack(_float32, dims, tokens, deepest, exact=True))
    outputs = {arm: _of_stack(stack) for arm, stack in stacks.items()}
    # What differs in one layer grows in the next ones: the errors of two arms are only alike.
    verify.require_as_close(outputs, exact, BASELINE, dict.fromkeys(outputs, 1.25))
    packed = _held(stacks[ours.DEFAULT].layers[0])  # ``plain`` holds the same bytes
    rows = []
    for depth in size.depths:
        first = {arm: stack.first(depth) for arm, stack in stacks.items()}
        held = {arm: depth * (packed if arm == "plain" else _held(stack.layers[0])) for arm, stack in first.items()}
        config = {"axis": "depth", "depth": depth, "T": tokens} | dims.config
        rows += _measure({arm: stack.step for arm, stack in first.items()}, held, config, BASELINE, size.rounds)
    return rows


def _of_stack(stack: Stack) -> dict[str, Tensor]:
    """Gradients to routing weights are one kind: each is a handful of numbers."""
    found = stack.outputs()
    weights = torch.cat([value.float().flatten() for name, value in found.items() if name not in ("output", "grad_0")])
    return {"all/output": found["output"], "all/grad_hidden": found["grad_0"], "all/grad_weights": weights}


def along_rank(size: Size) -> list[Row]:
    """LoRA of more and more rank on one layer, against stock PEFT's on bf16."""
    rows = []
    for rank in size.ranks:
        at = expert_lora.Size((size.small,), (size.fixed_tokens,), rank)
        models = {arm: expert_lora.make_arm(arm, size.small, rank) for arm in expert_lora.ARMS}
        expert_lora.check(at, size.small, models)
        given = layers.inputs(size.small, size.fixed_tokens, seed=size.fixed_tokens)
        steps = {arm: partial(expert_lora.step, model, given) for arm, model in models.items()}
        held = {arm: _held(model) for arm, model in models.items()}
        config = {"axis": "rank", "rank": rank, "T": size.fixed_tokens} | size.small.config
        rows += _measure(steps, held, config, expert_lora.BASELINE, size.rounds)
    return rows


AXES: Mapping[str, Callable[[Size], list[Row]]] = {
    "T": along_tokens,
    "E": along_experts,
    "depth": along_depth,
    "rank": along_rank,
}


def measure(axis: str, size: Size) -> list[Row]:
    """One axis; run it in a fresh process."""
    torch.set_num_threads(size.threads)
    return AXES[axis](size)


def run(size: Size) -> Result:
    """Each axis in a process of its own."""
    rows: list[Row] = []
    for axis in AXES:
        rows += fresh_process(measure, axis, size)
    return Result(rows, {})


CASE = Case(
    "growth",
    run,
    verified_in_run,
    {
        "full": Size(),
        "toy": Size(
            Dims(4, 256, 128, 2),
            tokens=(16, 64),
            experts=(4, 8),
            depths=(1, 2),
            ranks=(4, 8),
            fixed_tokens=128,
            fixed_experts=4,
            rounds=3,
        ),
    },
)
