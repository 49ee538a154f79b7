"""The arms of the cases that measure one experts layer: ours, and what it competes with, all on the same weights."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec

import bitsandbytes.functional as bnb_functional
import torch
from bitsandbytes.nn.parametrize import replace_parameter_4bit_prequantized
from torch import Tensor, nn
from transformers import OlmoeConfig
from transformers.models.olmoe.modeling_olmoe import OlmoeExperts

from benchmarks import layers, ours, verify
from benchmarks.layers import BLOCKSIZE, Dims, Inputs, Layer
from hf_qmoe import ExpertsNbit


BASELINE = "bf16_grouped_mm"
_SCRATCH_BYTES = 2 << 30


def float_experts(dims: Dims, implementation: str, stacks: Mapping[str, Tensor]) -> OlmoeExperts:
    """transformers' own experts module of size `dims`, with frozen float `stacks` by parameter name."""
    config = OlmoeConfig(hidden_size=dims.hidden, intermediate_size=dims.intermediate, num_experts=dims.experts)
    config._experts_implementation = implementation
    with torch.device("meta"):
        module = OlmoeExperts(config)
    for name, weights in stacks.items():
        setattr(module, name, nn.Parameter(weights, requires_grad=False))
    return module


class Weights:
    """The weights that all arms hold: seeded nf4 bytes, and their bf16 values."""

    def __init__(self, dims: Dims, seed: int = 0) -> None:
        self.dims, self.seed = dims, seed

    @cached_property
    def packed(self) -> ExpertsNbit:
        """As our module holds them."""
        return layers.ours(self.dims, self.seed)

    @cached_property
    def bf16(self) -> dict[str, Tensor]:
        """``[E, N, K]`` by parameter name."""
        return self.floats(torch.bfloat16)

    def floats(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """New tensors ``[E, N, K]`` by parameter name."""
        return {name: stack.dequantize(dtype) for name, stack in self.packed.stacks().items()}

    def reference(self) -> OlmoeExperts:
        """The model's own eager experts in float32."""
        return float_experts(self.dims, "eager", self.floats(torch.float32))


def _ours(arm: str) -> Callable[[Weights], Layer]:
    def make(weights: Weights) -> Layer:
        module = layers.ours(weights.dims, weights.seed)  # in memory of its own: no arm finds it in the cache
        ours.select(module, arm)
        return module.eval()

    return make


def _bf16(implementation: str) -> Callable[[Weights], Layer]:
    return lambda weights: float_experts(weights.dims, implementation, weights.bf16)


def _whole_stack(weights: Weights) -> OlmoeExperts:
    """bitsandbytes' parametrization: each use dequantizes all experts, then transformers' `grouped_mm` runs."""
    module = float_experts(weights.dims, "grouped_mm", {})
    for name, stack in weights.packed.stacks().items():
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


def _experts4bit_qlora(weights: Weights) -> Layer:
    """The same bytes and scales in the module of that package, which loops over experts and dequantizes each."""
    from experts4bit_qlora import Experts4bit

    dims = weights.dims
    module = Experts4bit(dims.experts, dims.hidden, dims.intermediate, compute_dtype=torch.bfloat16)
    for name, stack in weights.packed.stacks().items():
        assert stack.absmax is not None
        setattr(module, name, nn.Parameter(stack.packed.view(dims.experts, -1), requires_grad=False))
        setattr(module, name.replace("_proj", "_absmax"), stack.absmax.view(dims.experts, -1))
    return module  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Arm:
    """One way to compute the layer.

    Attributes:
        make: the layer with the given weights.
        allowed_error: highest error against float32, relative to that of `BASELINE`. All round to bf16, so 5 % are
            chance; eager also adds a token's experts up in bf16.
        package: import name of what it needs.
        scratch_bytes: what a call with so many tokens allocates, where that is what limits it.
    """

    make: Callable[[Weights], Layer]
    allowed_error: float = 1.05
    package: str = "torch"
    scratch_bytes: Callable[[Dims, int], int] = lambda dims, tokens: 0


def _gathered_weights(dims: Dims, tokens: int) -> int:
    """bf16 weights of an expert for each routed row: `batched_mm` copies them."""
    return 2 * tokens * dims.top_k * dims.weights // dims.experts


ARMS: Mapping[str, Arm] = {
    **{arm: Arm(_ours(arm)) for arm in ours.VARIANTS},
    BASELINE: Arm(_bf16("grouped_mm")),
    "bf16_eager": Arm(_bf16("eager"), allowed_error=1.3),
    "bf16_batched_mm": Arm(_bf16("batched_mm"), scratch_bytes=_gathered_weights),
    "whole_stack": Arm(_whole_stack),
    "experts4bit_qlora": Arm(_experts4bit_qlora, package="experts4bit_qlora"),
}


def make_arms(weights: Weights, names: Mapping[str, Arm] | None = None) -> tuple[dict[str, Layer], list[str]]:
    """The layers by arm, and a note on each arm that cannot be had."""
    made, notes = {}, []
    for name, arm in (ARMS if names is None else names).items():
        if find_spec(arm.package) is None:
            notes.append(f"{name}: left out, the package {arm.package} is not installed")
        else:
            made[name] = arm.make(weights)
    return made, notes


def fitting(made: Mapping[str, Layer], dims: Dims, tokens: int) -> dict[str, Layer]:
    """Those arms whose call with so many tokens takes a sane amount of memory."""
    return {arm: layer for arm, layer in made.items() if ARMS[arm].scratch_bytes(dims, tokens) <= _SCRATCH_BYTES}


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


def check(weights: Weights, made: Mapping[str, Layer], tokens: Sequence[int]) -> None:
    """No output or gradient of an arm is further from float32 than its allowance over `grouped_mm`'s.

    Raises:
        OutputsDiffer: one is.
    """
    reference = weights.reference()
    exact: dict[str, Tensor] = {}
    outputs: dict[str, dict[str, Tensor]] = {arm: {} for arm in made}
    for count in tokens:
        given = layers.inputs(weights.dims, count, seed=count)
        exact |= _named(count, step(reference, layers.in_float32(given), "forward_backward"))
        exact[f"T{count}/output_without_grad"] = exact[f"T{count}/output"]
        for arm, layer in fitting(made, weights.dims, count).items():
            outputs[arm] |= _named(count, step(layer, given, "forward_backward"))
            # Without gradients it may be computed in another way.
            outputs[arm][f"T{count}/output_without_grad"] = step(layer, given, "forward")["output"]
    verify.require_as_close(outputs, exact, BASELINE, {arm: ARMS[arm].allowed_error for arm in made})


def _named(tokens: int, outputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"T{tokens}/{name}": value for name, value in outputs.items()}
