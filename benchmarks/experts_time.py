"""Time of one experts layer, against transformers' bf16 `grouped_mm` and against dequantizing whole stacks.

All arms hold the same weights. `whole_stack` is what bitsandbytes' parametrization does: at each use it dequantizes
all experts, hit or not, and then runs transformers' `grouped_mm`. The arms take turns in one process, so that a busy
moment of the machine falls on all of them; ratios are medians over the rounds.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import bitsandbytes.functional as bnb_functional
import torch
from bitsandbytes.nn.parametrize import replace_parameter_4bit_prequantized
from torch import Tensor, nn
from transformers import OlmoeConfig
from transformers.models.olmoe.modeling_olmoe import OlmoeExperts

from benchmarks import layers
from benchmarks.case import Case, OutputsDiffer, Result, Row
from benchmarks.layers import BLOCKSIZE, Dims, Inputs, Layer
from benchmarks.memory import fresh_process
from benchmarks.timing import milliseconds, time_row
from hf_qmoe import ExpertsNbit


ARMS = ("hf_qmoe", "bf16_grouped_mm", "whole_stack")
MODES = ("forward", "forward_backward")
_WARM_UP_ROUNDS = 2


@dataclass(frozen=True)
class Size:
    """What to run."""

    dims: Dims = field(default_factory=Dims)
    tokens: tuple[int, ...] = (1, 8, 64, 512)
    rounds: int = 11
    threads: int = field(default_factory=torch.get_num_threads)


def float_experts(dims: Dims, implementation: str, stacks: Mapping[str, Tensor]) -> OlmoeExperts:
    """transformers' own experts module of size `dims`, with frozen float `stacks` by parameter name."""
    config = OlmoeConfig(hidden_size=dims.hidden, intermediate_size=dims.intermediate, num_experts=dims.experts)
    config._experts_implementation = implementation
    with torch.device("meta"):
        module = OlmoeExperts(config)
    for name, weights in stacks.items():
        setattr(module, name, nn.Parameter(weights, requires_grad=False))
    return module


def _whole_stack(dims: Dims, packed: ExpertsNbit) -> OlmoeExperts:
    module = float_experts(dims, "grouped_mm", {})
    for name, stack in packed.stacks().items():
        setattr(module, name, nn.Parameter(stack.packed.view(-1, 1), requires_grad=False))
        assert stack.absmax is not None
        state = bnb_functional.QuantState(
            stack.absmax.flatten(),
            shape=torch.Size((stack.num_experts, stack.out_features, stack.in_features)),
            code=bnb_functional.get_4bit_type("nf4", device="cpu"),
            blocksize=BLOCKSIZE,
            quant_type="nf4",
            dtype=torch.bfloat16,
        )
        replace_parameter_4bit_prequantized(module, name, state.as_dict(), torch.device("cpu"))
    return module


def make_arms(dims: Dims) -> dict[str, Layer]:
    """The layers by arm name, all with the same weights."""
    packed = layers.ours(dims, seed=0)
    floats = {name: stack.dequantize(torch.bfloat16) for name, stack in packed.stacks().items()}
    return {
        "hf_qmoe": packed,
        "bf16_grouped_mm": float_experts(dims, "grouped_mm", floats),
        "whole_stack": _whole_stack(dims, packed),
    }


def step(layer: Layer, given: Inputs, mode: str) -> dict[str, Tensor]:
    """One call in `mode`; returns the output, and the gradients if there are any."""
    if mode == "forward":
        with torch.no_grad():
            return {"output": layer(given.hidden_states, given.top_k_index, given.top_k_weights)}
    hidden = given.hidden_states.detach().requires_grad_(True)
    weights = given.top_k_weights.detach().requires_grad_(True)
    output = layer(hidden, given.top_k_index, weights)
    output.backward(given.grad_output.to(output.dtype))
    assert hidden.grad is not None
    assert weights.grad is not None
    return {"output": output.detach(), "grad_hidden": hidden.grad, "grad_weights": weights.grad}


def measure(size: Size) -> Result:
    """Times all arms in turns; run it in a fresh process."""
    torch.set_num_threads(size.threads)
    arms = make_arms(size.dims)
    rows: list[Row] = []
    outputs: dict[str, dict[str, Any]] = {arm: {} for arm in arms}
    for tokens in size.tokens:
        given = layers.inputs(size.dims, tokens, seed=tokens)
        for mode in MODES:
            times: dict[str, list[float]] = {arm: [] for arm in arms}
            for turn in range(_WARM_UP_ROUNDS + size.rounds):
                for arm, layer in arms.items():
                    elapsed = milliseconds(partial(step, layer, given, mode))
                    if turn >= _WARM_UP_ROUNDS:
                        times[arm].append(elapsed)
            rows += _rows(size, tokens, mode, times)
        for arm, layer in arms.items():
            outputs[arm] |= {f"T{tokens}_{k}": v for k, v in step(layer, given, "forward_backward").items()}
    outputs["reference"] = _reference(size, arms["hf_qmoe"])
    return Result(rows, outputs)


def _reference(size: Size, packed: Layer) -> dict[str, Tensor]:
    """The model's own eager experts in float32 on the dequantized weights."""
    assert isinstance(packed, ExpertsNbit)
    floats = {name: stack.dequantize(torch.float32) for name, stack in packed.stacks().items()}
    reference = float_experts(size.dims, "eager", floats)
    outputs = {}
    for tokens in size.tokens:
        given = layers.inputs(size.dims, tokens, seed=tokens)
        exact = Inputs(given.hidden_states.float(), given.top_k_index, given.top_k_weights.float(), given.grad_output)
        outputs |= {f"T{tokens}_{k}": v for k, v in step(reference, exact, "forward_backward").items()}
    return outputs


def _rows(size: Size, tokens: int, mode: str, times: Mapping[str, list[float]]) -> list[Row]:
    compared = [(arm, "bf16_grouped_mm") for arm in times] + [("hf_qmoe", "whole_stack")]
    dims = size.dims
    config = {"T": tokens, "E": dims.experts, "H": dims.hidden, "I": dims.intermediate, "top_k": dims.top_k}
    return [time_row(arm, config, mode, times[arm], baseline, times[baseline]) for arm, baseline in compared]


def run(size: Size) -> Result:
    """`measure` in a process of its own."""
    result: Result = fresh_process(measure, size)
    return result


def error(values: Tensor, reference: Tensor) -> float:
    """Relative distance in the Frobenius norm."""
    return ((values - reference).norm() / reference.norm()).item()


def verify(outputs: dict[str, dict[str, Any]]) -> None:
    """No arm is further from float32 than transformers' `grouped_mm` is (5 % allowed, as all of them round to bf16).

    Each kind of output is compared over all T at once: a handful of numbers says little about rounding.
    """
    kinds = sorted({name.partition("_")[2] for name in outputs["reference"]})
    for kind in kinds:
        names = sorted(name for name in outputs["reference"] if name.partition("_")[2] == kind)
        flat = {arm: torch.cat([values[name].double().flatten() for name in names]) for arm, values in outputs.items()}
        errors = {arm: error(values, flat["reference"]) for arm, values in flat.items()}
        allowed = 1.05 * errors["bf16_grouped_mm"]
        if any(not e <= allowed for e in errors.values()):
            raise OutputsDiffer(f"{kind}: errors against float32 are {errors}, allowed is {allowed:.3g}")


CASE = Case("experts_time", run, verify, {"full": Size(), "toy": Size(Dims(4, 64, 64, 2), tokens=(1, 16), rounds=7)})
