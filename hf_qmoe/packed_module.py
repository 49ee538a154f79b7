"""`PackedModule`: a module whose weights are packed stacks, as state: names, dtypes, (de)serialization.

No computation. What a user may do to a module between construction and use - cast, move, copy, load a state dict -
must leave every packed byte and every scale as it was, or be refused.
"""

from typing import Any

import torch
from torch import Tensor, nn

from hf_qmoe import metadata
from hf_qmoe.layout import stack_names
from hf_qmoe.ops.formats import get_format
from hf_qmoe.packed import PackedStack


#: Suffixes that the tensors of a `PackedStack` add to the name of the parameter they replace.
SUFFIXES = {
    "packed": "",
    "absmax": "_absmax",
    "nested_absmax": "_nested_absmax",
    "nested_offset": "_nested_offset",
}


def as_stored(tensor: Tensor) -> Tensor:
    """A stack's tensor as it is kept on a module and on disk: float32 scales as their bits, int32.

    Everything that casts a model aims at its float parameters: ``.half()``, ``.to(dtype)``, a mixed-precision policy
    of FSDP2 or DeepSpeed, a loader's ``dtype``. Scales would lose bits in silence; integers are left alone.
    """
    return tensor.view(torch.int32) if tensor.dtype == torch.float32 else tensor


def as_used(tensor: Tensor) -> Tensor:
    """Inverse of `as_stored`. A view: it shares memory and version counter with the parameter."""
    return tensor.view(torch.float32) if tensor.dtype == torch.int32 else tensor


class PackedModule(nn.Module):
    """Holds two `PackedStack`s as integer parameters (``requires_grad=False``) and their metadata as a buffer."""

    _quant_types: tuple[str, ...] | None = None
    has_gate: bool
    is_transposed: bool
    quant_type: str
    compute_dtype: torch.dtype | None
    quant_metadata: Tensor

    def _set_stacks(self, stacks: dict[str, PackedStack], compute_dtype: torch.dtype | None) -> None:
        quant_type = next(iter(stacks.values())).quant_type
        self._check_quant_type(quant_type)
        self.quant_type, self.compute_dtype = quant_type, compute_dtype
        for name, stack in stacks.items():
            for field, tensor in stack.tensors().items():
                self.register_parameter(name + SUFFIXES[field], nn.Parameter(as_stored(tensor), requires_grad=False))
        device = next(iter(stacks.values())).packed.device
        self.register_buffer("quant_metadata", metadata.encode(metadata.describe(stacks)).to(device))

    @classmethod
    def _check_quant_type(cls, quant_type: str) -> None:
        get_format(quant_type)
        if cls._quant_types is not None and quant_type not in cls._quant_types:
            raise ValueError(
                f"{cls.__name__} holds {' or '.join(cls._quant_types)}, got {quant_type!r}; use ExpertsNbit"
            )

    @property
    def stack_names(self) -> tuple[str, str]:
        """Parameter names of the two stacks, first the up projection."""
        return stack_names(self.has_gate)

    def stack(self, name: str) -> PackedStack:
        """The tensors of one projection (``gate_up_proj``, ``up_proj`` or ``down_proj``) as one value."""
        stored = {field: getattr(self, name + suffix, None) for field, suffix in SUFFIXES.items()}
        tensors: dict[str, Any] = {f: None if tensor is None else as_used(tensor) for f, tensor in stored.items()}
        return PackedStack(quant_type=self.quant_type, **tensors)

    def stacks(self) -> dict[str, PackedStack]:
        """Both stacks by parameter name."""
        return {name: self.stack(name) for name in self.stack_names}

    def float_shape(self, name: str) -> tuple[int, int, int]:
        """Shape of the float parameter that `name` stands for, in the model's own layout."""
        stack = self.stack(name)
        if self.is_transposed:
            return stack.num_experts, stack.in_features, stack.out_features
        return stack.num_experts, stack.out_features, stack.in_features

    def check_stored(self) -> None:
        """Raises `ValueError` unless the tensors have their stored dtypes and ``quant_metadata`` describes them."""
        for name in self.stack_names:
            for suffix in SUFFIXES.values():
                tensor = getattr(self, name + suffix, None)
                if tensor is not None and tensor.is_floating_point():
                    raise ValueError(f"{name}{suffix} is {tensor.dtype}, packed tensors are integers")
        problem = metadata.mismatch(metadata.decode(self.quant_metadata), metadata.describe(self.stacks()))
        if problem:
            raise ValueError(problem)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: Any, strict: bool, *messages: list[str]
    ) -> None:
        error_msgs = messages[-1]
        _rename_published_layout(self, state_dict, prefix)
        for name in self.stack_names:
            for suffix in SUFFIXES.values():
                value = state_dict.get(prefix + name + suffix)
                if suffix and isinstance(value, Tensor):
                    state_dict[prefix + name + suffix] = as_stored(value)
        problem = self._unreadable(state_dict, prefix)
        if problem:
            error_msgs.append(f"{prefix.rstrip('.') or type(self).__name__}: {problem}")
            return
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, *messages)

    def _unreadable(self, state_dict: dict[str, Any], prefix: str) -> str | None:
        for name in self.stack_names:
            value = state_dict.get(prefix + name)
            if isinstance(value, Tensor) and value.dtype != torch.uint8:
                return (
                    f"{name} is {value.dtype}, not packed bytes; pack float weights with `ExpertsNbit.from_float` "
                    "or `from_pretrained(..., quantization_config=QMoEConfig())`"
                )
        stored = state_dict.get(prefix + "quant_metadata")
        if not isinstance(stored, Tensor):
            return None  # reported as a missing key
        try:
            return metadata.mismatch(metadata.decode(stored), metadata.describe(self.stacks()))
        except ValueError as error:
            return str(error)

    def extra_repr(self) -> str:
        """Shapes and format, as they print in the model."""
        shapes = ", ".join(
            f"{name}=[{s.num_experts}, {s.out_features}, {s.in_features}]" for name, s in self.stacks().items()
        )
        first = self.stack(self.stack_names[0])
        return (
            f"{shapes}, quant_type={self.quant_type}, blocksize={first.blocksize}, double_quant={first.double_quant}"
        )


def _rename_published_layout(module: PackedModule, state_dict: dict[str, Any], prefix: str) -> None:
    """Accepts the layout of the published ``Experts4bit``: packed ``[E, bytes]``, ``gate_up_absmax``, ``down_absmax``.

    That layout names no format, so the module's own is taken.
    """
    published = {name: prefix + name.removesuffix("_proj") + "_absmax" for name in module.stack_names}
    if not all(key in state_dict and prefix + name in state_dict for name, key in published.items()):
        return
    for name, key in published.items():
        stack = module.stack(name)
        packed, absmax = state_dict[prefix + name], state_dict.pop(key)
        if stack.absmax is not None and packed.numel() == stack.packed.numel():
            state_dict[prefix + name] = packed.reshape(stack.packed.shape)
            state_dict[f"{prefix}{name}_absmax"] = absmax.reshape(stack.absmax.shape)
    state_dict.setdefault(prefix + "quant_metadata", module.quant_metadata)
