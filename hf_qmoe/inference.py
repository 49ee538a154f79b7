"""The experts layer where no gradient is asked for: products whose bits nobody needs, and the whole layer in one call.

``exact`` on a module says who needs them: `None`, the default, those who train (the module is in training mode, or a
gradient flows through the call); `True` everybody, `False` nobody. Where bits are not needed, products may come from
kernels that add in float32 and round less often (`hf_qmoe.ops.fused`).
"""

from collections.abc import Callable, Iterable
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional
from torch.nn.modules.module import _has_any_global_hook
from transformers.activations import ACT2FN
from transformers.integrations.moe import _default_apply_gate

from hf_qmoe.ops.fused import can_fuse, fused_experts
from hf_qmoe.ops.operands import Operands
from hf_qmoe.packed import PackedStack


class Experts(Protocol):
    """What this file has to know of a `hf_qmoe.experts.ExpertsNbit`."""

    has_gate: bool
    has_bias: bool
    has_post_expert_norm: bool
    is_concatenated: bool
    quant_type: str
    act_fn: Callable[[Tensor], Tensor]

    @property
    def stack_names(self) -> tuple[str, ...]:
        """Parameter names, first the up projection."""

    def stack(self, name: str) -> PackedStack:
        """The tensors of one projection."""


_ACTIVATIONS: dict[type[nn.Module], str] = {
    nn.SiLU: "silu",
    type(ACT2FN["silu"]): "silu",
    type(ACT2FN["gelu_pytorch_tanh"]): "gelu_tanh",
    nn.ReLU: "relu",
    type(ACT2FN["relu2"]): "relu2",
}
# Libraries of kernels put another function there.
_FORWARDS = {cls: cls.forward for cls in _ACTIVATIONS}

# What a module calls besides its `forward`.
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def needs_gradient(tensors: Iterable[Tensor]) -> bool:
    """Whether autograd has to see a call with these tensors, backward or forward (which does not mark a tensor)."""
    is_backward = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    return is_backward or forward_ad._current_level >= 0


def activation_name(function: Callable[[Tensor], Tensor]) -> str | None:
    """What the kernels call an activation; `None` for one that they do not have, or that has been changed."""
    if function is functional.silu:
        return "silu"
    if not isinstance(function, nn.Module):
        return None
    cls = type(function)
    if cls.forward is not _FORWARDS.get(cls) or "forward" in vars(function):
        return None
    has_hooks = any(map(vars(function).get, _HOOKS)) or _has_any_global_hook()
    return None if has_hooks else _ACTIVATIONS[cls]


def gate_name(experts: Experts, own_gate: Callable[..., Tensor]) -> str | None:
    """What the kernels call the gate of a module; `None` if the model has one of its own.

    Args:
        experts: the module.
        own_gate: `ExpertsNbit._apply_gate`.
    """
    if not experts.has_gate:
        return "none"
    gate = type(experts)._apply_gate  # type: ignore[attr-defined]
    if "_apply_gate" in experts.__dict__ or gate not in (own_gate, _default_apply_gate):
        return None
    return "concatenated" if experts.is_concatenated or gate is _default_apply_gate else "interleaved"


def forward_fused(
    experts: Experts,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    compute_dtype: torch.dtype,
    own_gate: Callable[..., Tensor],
) -> Tensor | None:
    """The layer in one call, if there are kernels for it; the arguments are those of `ExpertsNbit.forward`.

    Returns:
        ``[T, H]`` in the dtype of `hidden_states`, or `None` where it has to be computed step by step.
    """
    gate = None if experts.has_post_expert_norm else gate_name(experts, own_gate)
    activation = None if gate is None else activation_name(experts.act_fn)  # with a gate of its own there may be none
    if gate is None or activation is None:
        return None
    up, down = (_operands(experts.stack(name)) for name in experts.stack_names)
    x = hidden_states.to(compute_dtype)
    if not can_fuse(x, up, down):
        return None
    biases = [getattr(experts, f"{name}_bias") if experts.has_bias else None for name in experts.stack_names]
    out_dtype = compute_dtype if hidden_states.dtype == compute_dtype else torch.float32
    out: Tensor = fused_experts(
        *(x, top_k_index, top_k_weights, *up[:4], biases[0], *down[:4], biases[1]),
        *(experts.quant_type, gate, activation, out_dtype),
    )
    return out.to(hidden_states.dtype)


def _operands(stack: PackedStack) -> Operands:
    return Operands(stack.packed, stack.absmax, stack.nested_absmax, stack.nested_offset, stack.quant_type)
