"""The experts layer where no gradient is asked for: products whose bits nobody needs, and the whole layer in one call.

``exact`` on a module says who needs them: `None`, the default, those who train (the module is in training mode, or a
gradient flows through the call); `True` everybody, `False` nobody. Where bits are not needed, products may come from
kernels that add in float32 and round less often (`hf_qmoe.ops.fused`).
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial, reduce
from operator import or_
from typing import Any, Protocol
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional
from torch.nn.modules.module import _has_any_global_hook
from transformers.activations import ACT2FN
from transformers.integrations.moe import _default_apply_gate

from hf_qmoe.ops.fused import PreparedExperts, can_fuse, fused_experts
from hf_qmoe.ops.native_product import takes
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

    def stored_tensors(self, name: str) -> list[Tensor | None]:
        """The same as they are stored."""


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
    if cls is _GELU_TANH and not _is_gelu_tanh(function):
        return None
    has_hooks = any(map(vars(function).get, _HOOKS)) or _has_any_global_hook()
    return None if has_hooks else _ACTIVATIONS[cls]


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
    x = _cast(hidden_states, compute_dtype)
    names = experts.stack_names
    # Views: the memory stays while a kernel reads it, even if another thread assigns to the parameter.
    up_bias, down_bias = (getattr(experts, f"{name}_bias").detach() if experts.has_bias else None for name in names)
    out_dtype = compute_dtype if hidden_states.dtype == compute_dtype else torch.float32
    out: Tensor
    if _is_plain(x, top_k_index, top_k_weights, up_bias, down_bias) and (found := _prepared(experts, x, gate)):
        prepared, memory = found
        out = prepared.run(x, top_k_index, top_k_weights, up_bias, down_bias, activation, out_dtype)
        del memory  # until here
        return _cast(out, hidden_states.dtype)
    up, down = (_operands(experts.stack(name)) for name in names)
    if not can_fuse(x, up, down):
        return None
    out = fused_experts(
        *(x, top_k_index, top_k_weights, *up[:4], up_bias, *down[:4], down_bias),
        *(experts.quant_type, gate, activation, out_dtype),
    )
    return _cast(out, hidden_states.dtype)


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    # A call that changes nothing is not free for one token.
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


# The module, for which memory something was prepared, and what; by the module's `id`: it need not have a hash.
_PREPARED: dict[int, tuple[ref[Experts], tuple[Any, ...], PreparedExperts]] = {}


def _keys(*names: str) -> int:
    """Dispatch keys as torch packs them."""
    sets = (torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, name)) for name in names)
    return reduce(or_, sets).raw_repr()


# What the dispatcher looks at where there is nothing special, without and with `torch.inference_mode`.
_PLAIN_THREAD = (_keys("BackendSelect", "ADInplaceOrView"), _keys("BackendSelect"))
_PLAIN_TENSOR = (_keys("CPU", "ADInplaceOrView", "AutogradCPU", "AutocastCPU"), _keys("CPU", "AutocastCPU"))


def _is_plain(*tensors: Tensor | None) -> bool:
    """Whether a kernel may read these tensors without the dispatcher: nobody watches the operators that are called
    (compiler, mode, transform, tracer, profiler), and `_are_numbers`.
    """
    if torch.compiler.is_compiling() or torch._C._autograd._profiler_enabled():
        return False
    return torch._C._dispatch_tls_local_include_set().raw_repr() in _PLAIN_THREAD and _are_numbers(tensors)


def _are_numbers(tensors: Iterable[Tensor | None]) -> bool:
    """Whether each is what the CPU's memory holds: no subclass, no batch of vmap, no lazy negation, no fake."""
    return all(t is None or torch._C._dispatch_keys(t).raw_repr() in _PLAIN_TENSOR for t in tensors)


def _prepared(
    experts: Experts, x: Tensor, gate: str
) -> tuple[PreparedExperts, list[torch.UntypedStorage | None]] | None:
    """The layer's weights as described at an earlier call, if they are still there; `None` if no kernel takes them.

    For one token, after other work has had the caches, the operator's way costs 0.4 ms to the kernel's 0.8.

    Returns:
        the description, and the memory of which it has addresses, to be kept while it is used.
    """
    stored = [tensor for name in experts.stack_names for tensor in experts.stored_tensors(name)]
    if not takes(x) or not _are_numbers(stored):
        return None
    memory, key = _memory(stored, gate, experts.quant_type)
    number = id(experts)
    known = _PREPARED.get(number)
    if known is not None and known[0]() is experts and known[1] == key:
        return known[2], memory
    up, down = (_operands(experts.stack(name)) for name in experts.stack_names)
    tensors = (*up[:4], *down[:4])
    if not can_fuse(x, up, down) or not all(t is None or t.is_contiguous() for t in tensors):
        return None
    prepared = PreparedExperts(up, down, gate)
    # Of these views: another thread may have replaced the parameters in between.
    memory, key = _memory(tensors, gate, experts.quant_type)
    _PREPARED[number] = ref(experts, lambda _: _PREPARED.pop(number, None)), key, prepared
    return prepared, memory


def _memory(tensors: Sequence[Tensor | None], *more: str) -> tuple[list[torch.UntypedStorage | None], tuple[Any, ...]]:
    """The storages of `tensors`, and what identifies the numbers that these read while the storages live."""
    storages = [None if t is None else t.untyped_storage() for t in tensors]
    places = (
        None if t is None or s is None else (s.data_ptr(), t.storage_offset(), t.element_size(), t.shape, t.stride())
        for t, s in zip(tensors, storages, strict=True)
    )
    return storages, (*more, *places)


def _operands(stack: PackedStack) -> Operands:
    return Operands(stack.packed, stack.absmax, stack.nested_absmax, stack.nested_offset, stack.quant_type)
