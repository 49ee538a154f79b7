"""A stack of MoE layers around packed experts, run with each kind of activation checkpointing."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hf_qmoe.experts import ExpertsNbit


#: Arguments of `torch.utils.checkpoint.checkpoint`, or `None` for none of it.
CHECKPOINTING: dict[str, dict[str, bool] | None] = {
    "off": None,
    "non_reentrant": {"use_reentrant": False},
    "reentrant": {"use_reentrant": True},
}


class MoELayer(nn.Module):
    """A residual layer: a trainable norm and router before packed experts."""

    def __init__(self, experts: ExpertsNbit, hidden: int, top_k: int = 2) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(hidden, eps=1e-6)
        self.router = nn.Linear(hidden, experts.num_experts, bias=False)
        self.experts = experts
        self.top_k = top_k

    def route(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """Weights and indices ``[T, k]``."""
        probabilities = self.router(hidden_states).softmax(dim=-1, dtype=torch.float32)
        weights, index = probabilities.topk(self.top_k, dim=-1)
        return (weights / weights.sum(dim=-1, keepdim=True)).to(hidden_states.dtype), index

    def forward(self, hidden_states: Tensor) -> Tensor:
        normed = self.norm(hidden_states)
        weights, index = self.route(normed)
        return hidden_states + self.experts(normed, index, weights)


class Stack(nn.Module):
    """Layers one after another, each its own checkpointed region."""

    def __init__(self, layers: list[nn.Module], mode: str = "off") -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.mode = mode

    def forward(self, hidden_states: Tensor) -> Tensor:
        for layer in self.layers:
            hidden_states = run(layer, self.mode, hidden_states)
        return hidden_states


def run(function: Callable[..., Tensor], mode: str, *args: Tensor) -> Tensor:
    """Calls `function`, checkpointed as `mode` says."""
    switches = CHECKPOINTING[mode]
    return function(*args) if switches is None else checkpoint(function, *args, **switches)


def trainable_gradients(module: nn.Module) -> dict[str, Tensor]:
    """Copies of the gradients of all trainable parameters."""
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.requires_grad}


@contextmanager
def counted(module: nn.Module) -> Iterator[list[int]]:
    """Counts the forward calls of `module` in the one item of the list."""
    calls = [0]

    def count(*_: object) -> None:
        calls[0] += 1

    handle = module.register_forward_pre_hook(count)
    try:
        yield calls
    finally:
        handle.remove()
