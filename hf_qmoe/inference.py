"""The experts layer where no gradient is asked for: products whose bits nobody needs, and the whole layer in one call.

``exact`` on a module says who needs them: `None`, the default, those who train (the module is in training mode, or a
gradient flows through the call); `True` everybody, `False` nobody. Where bits are not needed, products may come from
kernels that add in float32 and round less often (`hf_qmoe.ops.fused`).
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional
from torch.nn.modules.module import _has_any_global_hook
from transformers.activations import ACT2FN
from transformers.integrations.moe import _default_apply_gate

from hf_qmoe.ops.fused import PreparedExperts, can_fuse, fused_experts
from hf_qmoe.ops.native_product import LayerInputs, kernels_read, run_experts, takes
from hf_qmoe.ops.operands import Operands
from hf_qmoe.packed import PackedStack
from hf_qmoe.plain import are_numbers, is_plain, nobody_watches
from hf_qmoe.prepared import Call, Found, Known, State, Storages, known_of


class Experts(Protocol):
    """What this file has to know of a `hf_qmoe.experts.ExpertsNbit`."""

    training: bool
    exact: bool | None
    compute_dtype: torch.dtype | None
    has_gate: bool
    has_bias: bool
    has_post_expert_norm: bool
    is_concatenated: bool
    quant_type: str
    act_fn: Callable[[Tensor], Tensor]
    _modules: dict[str, Any]

    @property
    def stack_names(self) -> tuple[str, ...]:
        """Parameter names, first the up projection."""

    def _apply_gate(self, gate_up_out: Tensor) -> Tensor:
        """What comes between the projections."""

    def stack(self, name: str) -> PackedStack:
        """The tensors of one projection."""

    def stored_by_name(self) -> dict[str, Tensor]:
        """Those of all projections as they are stored."""


_ACTIVATIONS: dict[type[nn.Module], str] = {
    nn.SiLU: "silu",
    type(ACT2FN["silu"]): "silu",
    type(ACT2FN["gelu_pytorch_tanh"]): "gelu_tanh",
    nn.ReLU: "relu",
    type(ACT2FN["relu2"]): "relu2",
}
_GELU_TANH = type(ACT2FN["gelu_pytorch_tanh"])
# Libraries of kernels put another function there.
_FORWARDS = {cls: cls.forward for cls in _ACTIVATIONS}


def needs_gradient(tensors: Iterable[Tensor]) -> bool:
    """Whether autograd has to see a call with these tensors, backward or forward (which does not mark a tensor)."""
    is_backward = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    return is_backward or forward_ad._current_level >= 0


def activation_name(function: Callable[[Tensor], Tensor] | None) -> str | None:
    """What the kernels call an activation; `None` for one that they do not have, or that has been changed."""
    if function is functional.silu:
        return "silu"
    if not isinstance(function, nn.Module):
        return None
    cls = type(function)
    if cls.forward is not _FORWARDS.get(cls) or "forward" in vars(function):
        return None
    if cls is _GELU_TANH and not _is_gelu_tanh(function):
        return None
    return None if _is_heard(function) else _ACTIVATIONS[cls]


def _is_heard(module: nn.Module) -> bool:
    """Whether a call of it calls more than its `forward`."""
    get = module.__dict__.get
    hooks = get("_forward_hooks") or get("_forward_pre_hooks") or get("_backward_hooks") or get("_backward_pre_hooks")
    return bool(hooks or _has_any_global_hook())


def _is_gelu_tanh(module: nn.Module) -> bool:
    """Whether the function that transformers' module holds is still one of the two that it puts there."""
    act = vars(module).get("act")
    if isinstance(act, partial):
        return (act.func, act.args, act.keywords) == (functional.gelu, (), {"approximate": "tanh"})
    return getattr(act, "__func__", None) is _GELU_TANH._gelu_tanh_python


def gate_name(experts: Experts, own_gate: Callable[..., Tensor]) -> str | None:
    """What the kernels call the gate of a module; `None` if the model has one of its own.

    Args:
        experts: the module.
        own_gate: `ExpertsNbit._apply_gate`.
    """
    if not experts.has_gate:
        return "none"
    gate = type(experts)._apply_gate
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
    state = _state(experts)
    gate = None if experts.has_post_expert_norm else gate_name(experts, own_gate)
    activation = None if gate is None else activation_name(experts.act_fn)  # with a gate of its own there may be none
    if gate is None or activation is None:
        return None
    x = _cast(hidden_states, compute_dtype)
    inputs = x, top_k_index, top_k_weights
    names = experts.stack_names
    # Views: the memory stays while a kernel reads it, even if another thread assigns to the parameter.
    up_bias, down_bias = (getattr(experts, f"{name}_bias").detach() if experts.has_bias else None for name in names)
    given = LayerInputs(*inputs, up_bias, down_bias)
    out_dtype = compute_dtype if hidden_states.dtype == compute_dtype else torch.float32
    out: Tensor
    if nobody_watches() and is_plain(given) and (found := _prepared(experts, x, gate)):
        known, memory = found
        out = known.weights.run(given, activation, out_dtype)
        known.call = _call(experts, known, given, activation, state) if x is hidden_states else None
        del memory  # until here
        return _cast(out, hidden_states.dtype)
    up, down = (_operands(experts.stack(name)) for name in names)
    if not can_fuse(x, up, down):
        return None
    out = fused_experts(
        *(*inputs, *up[:4], up_bias, *down[:4], down_bias),
        *(experts.quant_type, gate, activation, out_dtype),
    )
    return _cast(out, hidden_states.dtype)


def forward_again(
    experts: Experts, hidden_states: Tensor, top_k_index: Tensor | None, top_k_weights: Tensor | None
) -> Tensor | None:
    """The layer in the way of the last `forward_fused`, if only numbers have changed since; else `None`.

    For one token, after other work has had the caches, checking all anew costs 0.3 ms to the kernel's 1.
    """
    known = known_of(experts) if nobody_watches() else None
    call = None if known is None else known.call
    if call is None or call.state != _state(experts) or top_k_index is None or top_k_weights is None:
        return None
    memory = call.found.again(experts, hidden_states, top_k_index, top_k_weights)
    if memory is None:
        return None
    out = torch.empty_like(hidden_states)
    is_done = run_experts(call.layer, out, hidden_states, top_k_index, top_k_weights)
    del memory  # until here
    return out if is_done else None


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


def _prepared(experts: Experts, x: Tensor, gate: str) -> tuple[Known, Storages] | None:
    """The layer's weights as described at an earlier call, if they are still there; `None` if no kernel takes them.

    Returns:
        what is known, and the memory of which it has addresses, to be kept while it is used.
    """
    if not takes(x):
        return None
    known, kind = known_of(experts), (gate, experts.quant_type)
    memory = None if known is None or known.kind != kind else known.found.again(experts)
    if known is not None and memory is not None:
        return known, memory
    stored = experts.stored_by_name()
    up, down = (_operands(experts.stack(name)) for name in experts.stack_names)
    tensors = [tensor for tensor in (*up[:4], *down[:4]) if tensor is not None]
    if not can_fuse(x, up, down) or not are_numbers(tensors) or not all(t.is_contiguous() for t in tensors):
        return None
    found = Found(stored)
    if found.addresses != [tensor.data_ptr() for tensor in tensors]:  # another thread has replaced one since
        return None
    return Known(experts, kind, found, PreparedExperts(up, down, gate)), [t.untyped_storage() for t in tensors]


def _call(experts: Experts, known: Known, given: LayerInputs, activation: str, state: State) -> Call | None:
    """What makes a call like this one repeatable; `None` if kernels do not read its tensors as they are.

    Or if another thread changes the module meanwhile: what is found has to be what was used.
    """
    if torch.is_grad_enabled() or torch._C._is_any_autocast_enabled():
        return None  # `state` does not have the parameters that may need a gradient, nor autocast's dtype
    inputs, biases = given[:3], given[3:]
    training, exact, compute_dtype, *_, name = state
    if exact or (training and exact is None) or compute_dtype not in (None, given.x.dtype) or name != activation:
        return None
    if not kernels_read(*inputs) or not all(bias is None or _is_ready(bias) for bias in biases):
        return None
    bias_names = [f"{name}_bias" for name in experts.stack_names] if experts.has_bias else []
    found = Found(experts.stored_by_name() | {name: getattr(experts, name) for name in bias_names}, inputs)
    described = known.found.addresses + [bias.data_ptr() for bias in biases if bias is not None]
    if found.addresses != described:
        return None
    return Call(found, state, known.weights.describe(given, activation, given.x.dtype))


def _is_ready(bias: Tensor) -> bool:
    return bias.dtype == torch.float32 and bias.is_contiguous()


def _state(experts: Experts) -> State:
    """What the way of a call depends on, besides tensors."""
    return (
        *(experts.training, experts.exact, experts.compute_dtype, experts.quant_type),
        *(experts.has_gate, experts.has_bias, experts.has_post_expert_norm, experts.is_concatenated),
        *(type(experts)._apply_gate, "_apply_gate" in experts.__dict__, "parametrizations" in experts._modules),
        *(torch.is_grad_enabled(), forward_ad._current_level),
        activation_name(getattr(experts, "act_fn", None)),
    )


def _operands(stack: PackedStack) -> Operands:
    return Operands(stack.packed, stack.absmax, stack.nested_absmax, stack.nested_offset, stack.quant_type)
