"""Training LoRA on one experts layer: packed in nf4, against stock PEFT on transformers' bf16 experts.

Stock PEFT builds ``W + scaling * B A`` for the whole stack in each forward, and so does backward; here factors are
applied to the routed rows. Both arms hold the same weights and the same adapters of rank 16 on both projections, in
float32 as PEFT makes them. One step is forward and backward to hidden states, routing weights and all factors.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from benchmarks import layers, ours, verify
from benchmarks.arms import float_experts
from benchmarks.case import Case, Result, Row, verified_in_run
from benchmarks.layers import OLMOE, QWEN3_30B, Dims, Inputs
from benchmarks.memory import PeakRss, fresh_process, peak_of_tensors, settle
from benchmarks.timing import interleave
from hf_qmoe.ops.torch_ops import release_scratch


BASELINE = "stock_peft"
ARMS = (ours.DEFAULT, BASELINE)
#: Highest error against float32 relative to stock PEFT's: both round to bf16, at other places; here also ``x A^T``
#: between the two products, there ``W + B A``.
ALLOWED_ERROR = 1.1
TARGETS = ("experts.gate_up_proj", "experts.down_proj")

#: Highest ratio to stock PEFT, by tokens.
TIME_TARGETS = {64: 0.18, 512: 0.30, 2048: 0.80}
MEMORY_TARGETS = {64: 0.30, 512: 0.50, 2048: 0.80}


@dataclass(frozen=True)
class Size:
    """What to run."""

    dims: tuple[Dims, ...] = (OLMOE, QWEN3_30B)
    tokens: tuple[int, ...] = (64, 512, 2048)
    rank: int = 16
    rounds: int = 9
    passes: int = 3
    threads: int = field(default_factory=torch.get_num_threads)


class Block(nn.Module):
    """Holds an experts module under the name that targets match."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.experts = experts

    def forward(self, given: Inputs) -> Tensor:
        """``[T, H]``."""
        out: Tensor = self.experts(given.hidden_states, given.top_k_index, given.top_k_weights)
        return out


def make_arm(arm: str, dims: Dims, rank: int, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """An adapted layer with seeded weights and factors; `dtype` is that of the float one."""
    packed = layers.ours(dims, seed=0)
    experts: nn.Module = packed
    if arm == ours.DEFAULT:
        ours.select(packed, arm)
    else:
        floats = {name: stack.dequantize(dtype) for name, stack in packed.stacks().items()}
        experts = float_experts(dims, "eager" if dtype == torch.float32 else "grouped_mm", floats)
    packed.compute_dtype = torch.bfloat16
    config = LoraConfig(r=rank, lora_alpha=rank, target_modules=[], target_parameters=list(TARGETS))
    model = get_peft_model(Block(experts), config)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            width = parameter.shape[1] if "lora_A" in name else rank
            parameter.data.normal_(std=width**-0.5, generator=generator)
    return model


def step(model: nn.Module, given: Inputs) -> dict[str, Tensor]:
    """Forward and backward; output and all gradients."""
    hidden = given.hidden_states.detach().requires_grad_(True)
    weights = given.top_k_weights.detach().requires_grad_(True)
    output = model(Inputs(hidden, given.top_k_index, weights, given.grad_output))
    output.backward(given.grad_output.to(output.dtype))
    assert hidden.grad is not None
    assert weights.grad is not None
    results = {"output": output.detach(), "grad_hidden": hidden.grad, "grad_weights": weights.grad}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            results[f"grad_{name}"], parameter.grad = parameter.grad, None
    return results


def measure_times(size: Size, dims: Dims) -> list[Row]:
    """Verifies both arms, then times them in turns; run it in a fresh process."""
    torch.set_num_threads(size.threads)
    arms = {arm: make_arm(arm, dims, size.rank) for arm in ARMS}
    check(size, dims, arms)
    rows: list[Row] = []
    for tokens in size.tokens:
        given = layers.inputs(dims, tokens, seed=tokens)
        turns = interleave({arm: partial(step, model, given) for arm, model in arms.items()}, size.rounds)
        timed = turns.rows(_config(size, dims, tokens), "step", BASELINE)
        rows += [_with_target(row, TIME_TARGETS, tokens) for row in timed]
    return rows


def check(size: Size, dims: Dims, arms: Mapping[str, nn.Module]) -> None:
    """No output or gradient is further from float32 than stock PEFT's, but for 10 %."""
    models = {**arms, "reference": make_arm("reference", dims, size.rank, torch.float32)}
    outputs: dict[str, dict[str, Tensor]] = {arm: {} for arm in models}
    for tokens in size.tokens:
        given = layers.inputs(dims, tokens, seed=tokens)
        for arm, model in models.items():
            found = step(model, layers.in_float32(given) if arm == "reference" else given)
            outputs[arm] |= {f"T{tokens}/{name}": value for name, value in found.items()}
    reference = outputs.pop("reference")
    verify.require_as_close(outputs, reference, BASELINE, dict.fromkeys(ARMS, ALLOWED_ERROR))


def measure_peaks(arm: str, size: Size, dims: Dims, tokens: int) -> dict[str, int]:
    """Peaks of one arm above its resting state: layer and inputs made, one warm-up step."""
    torch.set_num_threads(size.threads)
    model, given = make_arm(arm, dims, size.rank), layers.inputs(dims, tokens, seed=tokens)
    step(model, given)
    anonymous = []
    for _ in range(size.passes):
        release_scratch()
        settle()
        with PeakRss() as peak:
            step(model, given)
        anonymous.append(peak.anonymous)
    release_scratch()
    return {"peak_rss_anon": max(anonymous), "peak_tensors": peak_of_tensors(lambda: step(model, given))}


def run(size: Size) -> Result:
    """Times of all arms in one process for each size of layer; peaks of each arm in a process of its own."""
    rows: list[Row] = []
    for dims in size.dims:
        rows += fresh_process(measure_times, size, dims)
        for tokens in size.tokens:
            peaks = {arm: fresh_process(measure_peaks, arm, size, dims, tokens) for arm in ARMS}
            rows += _memory_rows(size, dims, tokens, peaks)
    return Result(rows, {})


def _memory_rows(size: Size, dims: Dims, tokens: int, peaks: Mapping[str, Mapping[str, int]]) -> list[Row]:
    rows = []
    for metric in ("peak_rss_anon", "peak_tensors"):
        for arm in ARMS:
            value, stock = peaks[arm][metric], peaks[BASELINE][metric]
            repeats = 1 if metric == "peak_tensors" else size.passes
            ratio = value / stock if stock else None  # a tiny run may fit into holes of the heap
            row = Row(arm, _config(size, dims, tokens), metric, "bytes", value, BASELINE, ratio, None, repeats=repeats)
            rows.append(_with_target(row, MEMORY_TARGETS, tokens))
    return rows


def _with_target(row: Row, targets: Mapping[int, float], tokens: int) -> Row:
    if row.arm != ours.DEFAULT or tokens not in targets:
        return row
    return Row(**{**row.__dict__, "target": targets[tokens]})


def _config(size: Size, dims: Dims, tokens: int) -> dict[str, Any]:
    return {"T": tokens} | dims.config | {"rank": size.rank, "dtype": "bfloat16", "quant_type": "nf4"}


CASE = Case(
    "expert_lora",
    run,
    verified_in_run,
    {"full": Size(), "toy": Size((Dims(4, 256, 128, 2),), tokens=(16, 64), rank=4, rounds=3, passes=1)},
)
