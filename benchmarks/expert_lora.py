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

from benchmarks import layers
from benchmarks.case import Case, OutputsDiffer, Result, Row
from benchmarks.experts_time import error, float_experts
from benchmarks.layers import Dims, Inputs
from benchmarks.memory import PeakRss, fresh_process, peak_of_tensors, settle
from benchmarks.timing import milliseconds, time_row
from hf_qmoe.ops.torch_ops import release_scratch


OLMOE, QWEN3_30B = Dims(), Dims(experts=128, hidden=2048, intermediate=768, top_k=8)
ARMS = ("hf_qmoe", "stock_peft")
TARGETS = ("experts.gate_up_proj", "experts.down_proj")

#: Highest ratio to stock PEFT, by tokens.
TIME_TARGETS = {64: 0.30, 512: 0.45, 2048: 0.80}
MEMORY_TARGETS = {64: 0.30, 512: 0.50, 2048: 0.80}
_WARM_UP_ROUNDS = 2


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
    if arm != "hf_qmoe":
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


def measure_times(size: Size, dims: Dims) -> Result:
    """Both arms in turns; run it in a fresh process."""
    torch.set_num_threads(size.threads)
    arms = {arm: make_arm(arm, dims, size.rank) for arm in ARMS}
    rows: list[Row] = []
    outputs: dict[str, dict[str, Any]] = {arm: {} for arm in (*ARMS, "reference")}
    for tokens in size.tokens:
        given = layers.inputs(dims, tokens, seed=tokens)
        times: dict[str, list[float]] = {arm: [] for arm in arms}
        for turn in range(_WARM_UP_ROUNDS + size.rounds):
            for arm, model in arms.items():
                elapsed = milliseconds(partial(step, model, given))
                if turn >= _WARM_UP_ROUNDS:
                    times[arm].append(elapsed)
        for arm in arms:
            row = time_row(arm, _config(size, dims, tokens), "step", times[arm], "stock_peft", times["stock_peft"])
            rows.append(_with_target(row, TIME_TARGETS, tokens))
        for arm, model in arms.items():
            outputs[arm] |= {f"E{dims.experts}_T{tokens}_{k}": v for k, v in step(model, given).items()}
    del arms
    reference = make_arm("reference", dims, size.rank, torch.float32)
    for tokens in size.tokens:
        given = layers.inputs(dims, tokens, seed=tokens)
        exact = Inputs(given.hidden_states.float(), given.top_k_index, given.top_k_weights.float(), given.grad_output)
        outputs["reference"] |= {f"E{dims.experts}_T{tokens}_{k}": v for k, v in step(reference, exact).items()}
    return Result(rows, outputs)


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
    outputs: dict[str, dict[str, Any]] = {arm: {} for arm in (*ARMS, "reference")}
    for dims in size.dims:
        timed: Result = fresh_process(measure_times, size, dims)
        rows += timed.rows
        for arm, values in timed.outputs.items():
            outputs[arm] |= values
        for tokens in size.tokens:
            peaks = {arm: fresh_process(measure_peaks, arm, size, dims, tokens) for arm in ARMS}
            rows += _memory_rows(size, dims, tokens, peaks)
    return Result(rows, outputs)


def _memory_rows(size: Size, dims: Dims, tokens: int, peaks: Mapping[str, Mapping[str, int]]) -> list[Row]:
    rows = []
    for metric in ("peak_rss_anon", "peak_tensors"):
        for arm in ARMS:
            value, stock = peaks[arm][metric], peaks["stock_peft"][metric]
            repeats = 1 if metric == "peak_tensors" else size.passes
            ratio = value / stock if stock else None  # a tiny run may fit into holes of the heap
            row = Row(
                arm, _config(size, dims, tokens), metric, "bytes", value, "stock_peft", ratio, None, repeats=repeats
            )
            rows.append(_with_target(row, MEMORY_TARGETS, tokens))
    return rows


def _with_target(row: Row, targets: Mapping[int, float], tokens: int) -> Row:
    if row.arm != "hf_qmoe" or tokens not in targets:
        return row
    return Row(**{**row.__dict__, "target": targets[tokens]})


def _config(size: Size, dims: Dims, tokens: int) -> dict[str, Any]:
    return {
        "T": tokens,
        "E": dims.experts,
        "H": dims.hidden,
        "I": dims.intermediate,
        "top_k": dims.top_k,
        "rank": size.rank,
        "dtype": "bfloat16",
        "quant_type": "nf4",
    }


def verify(outputs: dict[str, dict[str, Any]]) -> None:
    """No output or gradient is further from float32 than stock PEFT's, but for 10 %.

    Both round to bf16, at other places: here also ``x A^T`` between the two products, there ``W + B A``. Each kind is
    compared over all sizes at once: a handful of numbers says little about rounding.
    """
    kinds = sorted({name.split("_", 2)[2] for name in outputs["reference"]})
    for kind in kinds:
        names = sorted(name for name in outputs["reference"] if name.split("_", 2)[2] == kind)
        flat = {arm: torch.cat([values[n].double().flatten() for n in names]) for arm, values in outputs.items()}
        errors = {arm: error(flat[arm], flat["reference"]) for arm in ARMS}
        if not errors["hf_qmoe"] <= 1.1 * errors["stock_peft"]:
            raise OutputsDiffer(f"{kind}: errors against float32 are {errors}")


CASE = Case(
    "expert_lora",
    run,
    verify,
    {"full": Size(), "toy": Size((Dims(4, 256, 128, 2),), tokens=(16, 64), rank=4, rounds=3, passes=1)},
)
