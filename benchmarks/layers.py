"""Experts layers for the cases: our module, and a plain one that autograd differentiates by itself.

Both are filled with the same random bytes: quantizing 800 MB of weights per layer would take longer than measuring.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import bitsandbytes.functional as bnb_functional
import torch
from bitsandbytes.functional import QuantState
from torch import Tensor, nn
from torch.nn import functional

from hf_qmoe import ExpertsNbit, parametrize_experts_prequantized


BLOCKSIZE = 64


@dataclass(frozen=True)
class Dims:
    """Sizes of a layer: E, H, I and the experts per token; the defaults are OLMoE's."""

    experts: int = 64
    hidden: int = 2048
    intermediate: int = 1024
    top_k: int = 8

    @property
    def stacks(self) -> dict[str, tuple[int, int]]:
        """``(N, K)`` of each projection."""
        return {
            "gate_up_proj": (2 * self.intermediate, self.hidden),
            "down_proj": (self.hidden, self.intermediate),
        }

    @property
    def weights(self) -> int:
        """Logical weights of a layer."""
        return sum(self.experts * rows * columns for rows, columns in self.stacks.values())

    @property
    def config(self) -> dict[str, int]:
        """What rows record of it."""
        return {"E": self.experts, "H": self.hidden, "I": self.intermediate, "top_k": self.top_k}


OLMOE, QWEN3_30B = Dims(), Dims(experts=128, hidden=2048, intermediate=768, top_k=8)


class Layer(Protocol):
    """Called as transformers calls its experts modules."""

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """``[T, H]``, ``[T, k]``, ``[T, k]`` to ``[T, H]``."""


MakeLayer = Callable[[Dims, int], Layer]


def _fill(packed: Tensor, absmax: Tensor, generator: torch.Generator, columns: int) -> None:
    """Random codes, and scales that keep the activations' size (a random nf4 code has a deviation of 0.56)."""
    packed.random_(0, 256, generator=generator)
    absmax.uniform_(0.9, 1.1, generator=generator).mul_(columns**-0.5 / 0.56)


def ours(dims: Dims, seed: int) -> ExpertsNbit:
    """`ExpertsNbit` in nf4."""
    module = ExpertsNbit(dims.experts, dims.hidden, dims.intermediate)
    generator = torch.Generator().manual_seed(seed)
    for name, (_, columns) in dims.stacks.items():
        stack = module.stack(name)
        assert stack.absmax is not None
        _fill(stack.packed, stack.absmax, generator, columns)
    return module


class PlainLayer:
    """The same steps without our operators: bitsandbytes dequantizes an expert, `F.linear` keeps it for backward."""

    def __init__(self, dims: Dims, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        code = bnb_functional.get_4bit_type("nf4", device="cpu")
        self.weights: dict[str, list[tuple[Tensor, QuantState]]] = {}
        for name, (rows, columns) in dims.stacks.items():
            packed = torch.empty(dims.experts, rows, columns // 2, dtype=torch.uint8)
            absmax = torch.empty(dims.experts, rows * columns // BLOCKSIZE)
            _fill(packed, absmax, generator, columns)
            self.weights[name] = [
                (
                    packed[expert].view(-1, 1),
                    QuantState(
                        absmax[expert],
                        shape=torch.Size((rows, columns)),
                        code=code,
                        blocksize=BLOCKSIZE,
                        quant_type="nf4",
                        dtype=torch.bfloat16,
                    ),
                )
                for expert in range(dims.experts)
            ]

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """As `ExpertsNbit.forward`."""
        tokens, top_k = top_k_index.shape
        order = top_k_index.flatten().argsort(stable=True)
        counts = top_k_index.flatten().bincount(minlength=len(self.weights["down_proj"])).tolist()
        rows = hidden_states.unsqueeze(1).expand(-1, top_k, -1).reshape(tokens * top_k, -1).index_select(0, order)
        gate, up = self._project(rows, "gate_up_proj", counts).chunk(2, dim=-1)
        rows = self._project(functional.silu(gate) * up, "down_proj", counts)
        per_token = rows.index_select(0, order.argsort()).view(tokens, top_k, -1)
        return (per_token * top_k_weights.float().unsqueeze(-1)).sum(dim=1).to(hidden_states.dtype)

    def _project(self, rows: Tensor, name: str, counts: list[int]) -> Tensor:
        parts = [
            functional.linear(part, bnb_functional.dequantize_4bit(*weight))
            for part, weight in zip(rows.split(counts), self.weights[name], strict=True)
            if part.shape[0]
        ]
        return torch.cat(parts)


class ParametrizedLayer(PlainLayer):
    """The plain forward over parametrized weights: it reads an expert and multiplies, knowing of nothing."""

    def __init__(self, dims: Dims, seed: int) -> None:
        super().__init__(dims, seed)
        self.experts = nn.Module()
        for name, (rows, columns) in dims.stacks.items():
            parts = self.weights[name]
            packed = torch.stack([part.view(rows, -1) for part, _ in parts])
            state = QuantState(
                torch.cat([state.absmax for _, state in parts]),
                shape=torch.Size((dims.experts, rows, columns)),
                code=parts[0][1].code,
                blocksize=BLOCKSIZE,
                quant_type="nf4",
                dtype=torch.bfloat16,
            )
            self.experts.register_parameter(name, nn.Parameter(packed, requires_grad=False))
            parametrize_experts_prequantized(self.experts, name, state)
        self.weights = {"down_proj": [None] * dims.experts}  # type: ignore[list-item]  # only its length is read

    def _project(self, rows: Tensor, name: str, counts: list[int]) -> Tensor:
        weights = getattr(self.experts, name)
        parts = rows.split(counts)
        return torch.cat([functional.linear(p, weights[e]) for e, p in enumerate(parts) if p.shape[0]])


@dataclass(frozen=True)
class Inputs:
    """Hidden states ``[T, H]``, routing ``[T, k]`` and the gradient of the output ``[T, H]``."""

    hidden_states: Tensor
    top_k_index: Tensor
    top_k_weights: Tensor
    grad_output: Tensor


def inputs(dims: Dims, tokens: int, seed: int) -> Inputs:
    """Random bf16 inputs; each token goes to `top_k` different experts."""
    generator = torch.Generator().manual_seed(seed)
    scores, top_k_index = torch.rand(tokens, dims.experts, generator=generator).topk(dims.top_k)
    return Inputs(
        torch.randn(tokens, dims.hidden, generator=generator).bfloat16(),
        top_k_index,
        (scores / scores.sum(dim=-1, keepdim=True)).bfloat16(),
        torch.randn(tokens, dims.hidden, generator=generator).bfloat16(),
    )


def in_float32(given: Inputs) -> Inputs:
    """The same inputs for a reference."""
    return Inputs(given.hidden_states.float(), given.top_k_index, given.top_k_weights.float(), given.grad_output)
