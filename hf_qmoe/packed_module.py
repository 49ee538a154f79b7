"""`PackedModule`: a module whose weights are packed stacks, as state: names, dtypes, (de)serialization.

No computation. What a user may do to a module between construction and use - cast, move, copy, load a state dict -
must leave every packed byte and every scale as it was, or be refused.
"""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from hf_qmoe import metadata
from hf_qmoe.layout import by_expert, check_values, float_stack_shapes, is_transposed, stack_names
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


def _is_finite(tensor: Tensor) -> bool:
    """Whether all values are, in one pass and without temporaries: `torch.isfinite` makes several of its size."""
    return not tensor.numel() or all(math.isfinite(extreme) for extreme in torch.aminmax(tensor))


def pack_float_stacks(
    module: nn.Module, quant_type: str, blocksize: int, double_quant: bool
) -> dict[str, PackedStack]:
    """Packs the float stacks of `module` by name, one at a time, and takes each from it.

    On the meta device the stacks are empty and the module keeps its parameters.

    Raises:
        ValueError: a shape or format that cannot be packed, or weights that are not finite; nothing was changed.
    """
    if not any(p.is_meta for p in module.parameters()):
        check_values(module, quant_type)
    stacks = {
        name: PackedStack.empty(*shape, quant_type, blocksize, double_quant, getattr(module, name).device)
        for name, shape in float_stack_shapes(module).items()
    }
    transposed = is_transposed(module)
    for name, stack in stacks.items():
        weights = getattr(module, name)
        if weights.is_meta:
            continue
        for expert, weight in enumerate(by_expert(weights.detach(), stack.num_experts)):
            stack.quantize_expert_(expert, weight.t() if transposed else weight)
        setattr(module, name, None)  # one stack of full-precision weights at a time
    return stacks


class PackedModule(nn.Module):
    """Holds `PackedStack`s as integer parameters (``requires_grad=False``) and their metadata as a buffer."""

    _quant_types: tuple[str, ...] | None = None
    has_gate: bool
    is_transposed: bool
    quant_type: str
    compute_dtype: torch.dtype | None
    num_experts: int
    quant_metadata: Tensor
    _description: dict[str, Any]

    def _set_stacks(self, stacks: dict[str, PackedStack], compute_dtype: torch.dtype | None) -> None:
        quant_type = next(iter(stacks.values())).quant_type
        self._check_quant_type(quant_type)
        self.quant_type, self.compute_dtype = quant_type, compute_dtype
        for name, stack in stacks.items():
            for field, tensor in stack.tensors().items():
                self.register_parameter(name + SUFFIXES[field], nn.Parameter(as_stored(tensor), requires_grad=False))
        device = next(iter(stacks.values())).packed.device
        self._description = metadata.describe(stacks)
        self.register_buffer("quant_metadata", metadata.encode(self._description).to(device))

    def _forget_stacks(self) -> None:
        """Undoes `_set_stacks`, but for the parameters that bear the stacks' own names."""
        for name in self.stored_names:
            if name not in self.stack_names:
                delattr(self, name)
        del self.quant_type, self.compute_dtype, self._description

    @classmethod
    def _check_quant_type(cls, quant_type: str) -> None:
        get_format(quant_type)
        if cls._quant_types is not None and quant_type not in cls._quant_types:
            raise ValueError(
                f"{cls.__name__} holds {' or '.join(cls._quant_types)}, got {quant_type!r}; use ExpertsNbit"
            )

    @property
    def stack_names(self) -> tuple[str, ...]:
        """Parameter names of the two stacks, first the up projection."""
        return stack_names(self.has_gate)

    @property
    def packs_transposed(self) -> bool:
        """Whether the float layout is ``[E, in, out]``; packed bytes are ``[E, out, in]`` either way."""
        return is_transposed(self)

    def num_experts_of(self, name: str) -> int:
        """E of the stack `name`, as the module was built."""
        return self.num_experts

    def stack(self, name: str) -> PackedStack:
        """The tensors of one projection (``gate_up_proj``, ``up_proj`` or ``down_proj``) as one value."""
        stored = zip(SUFFIXES, self.stored_tensors(name), strict=True)
        # Views: what autograd saves of them stays what it was when someone assigns to `parameter.data`.
        tensors: dict[str, Any] = {field: None if t is None else as_used(t.detach()) for field, t in stored}
        return PackedStack(quant_type=self.quant_type, **tensors)

    def stored_tensors(self, name: str) -> list[Tensor | None]:
        """The parameters of one projection as they are stored, in the order of the fields of `PackedStack`."""
        # Asking a module for an attribute that it does not have takes it microseconds. FSDP1 puts plain tensors there.
        own, others = self._parameters, self.__dict__
        keys = [name + suffix for suffix in SUFFIXES.values()]
        return [others.get(key) if (parameter := own.get(key)) is None else parameter for key in keys]

    def stored_by_name(self) -> dict[str, Tensor]:
        """Those of all projections that are there, by name, in that order."""
        return {
            name + suffix: tensor
            for name in self.stack_names
            for suffix, tensor in zip(SUFFIXES.values(), self.stored_tensors(name), strict=True)
            if tensor is not None
        }

    def stacks(self) -> dict[str, PackedStack]:
        """All stacks by parameter name."""
        return {name: self.stack(name) for name in self.stack_names}

    @property
    def description(self) -> dict[str, Any]:
        """What ``quant_metadata`` says, as it was when the module was built."""
        return self._description

    @property
    def stored_names(self) -> tuple[str, ...]:
        """Names of all tensors that hold packed weights: bytes, scales, metadata."""
        names = (name + suffix for name in self.stack_names for suffix in SUFFIXES.values())
        return *(name for name in names if getattr(self, name, None) is not None), "quant_metadata"

    def float_shape(self, name: str) -> tuple[int, ...]:
        """Shape of the float parameter that `name` stands for, in the model's own layout."""
        facts = self._description["stacks"][name]  # the tensor may be partitioned, and empty
        features = (facts["out_features"], facts["in_features"])
        return self.num_experts_of(name), *(features[::-1] if self.packs_transposed else features)

    def check_stored(self, names: Iterable[str]) -> None:
        """Checks tensors that a loader has put in place, against what this module was built for.

        Args:
            names: of `stored_names`, those that were loaded.

        Raises:
            ValueError: metadata, dtypes or shapes differ, or scales are not finite.
        """
        loaded = {name: getattr(self, name) for name in names}
        problem = self._problem(loaded)
        if problem:
            raise ValueError(problem)
        for name, tensor in loaded.items():
            if tensor.dtype == torch.int32 and not _is_finite(as_used(tensor)):
                raise ValueError(f"{name} holds scales that are not finite")

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
        own = {name: state_dict.get(prefix + name) for name in self.stored_names}
        problem = self._problem(own)
        if problem:
            error_msgs.append(f"{prefix.rstrip('.') or type(self).__name__}: {problem}")
            return
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, *messages)

    def _problem(self, tensors: dict[str, Any]) -> str | None:
        """Says why stored `tensors`, by name, cannot be this module's; `None` if they can. Missing ones can."""
        stored = tensors.get("quant_metadata")
        if isinstance(stored, Tensor):
            problem = metadata.problem(stored, self._description)
            if problem:
                return problem
        for name, expected in self._expected_tensors().items():
            tensor = tensors.get(name)
            if not isinstance(tensor, Tensor) or (tensor.dtype, tensor.shape) == (expected.dtype, expected.shape):
                continue
            hint = ""
            if tensor.is_floating_point():
                hint = (
                    "; pack float weights with `ExpertsNbit.from_float` or `from_pretrained(..., "
                    "quantization_config=QMoEConfig())`"
                )
            return (
                f"{name} is {tensor.dtype} {tuple(tensor.shape)}, expected {expected.dtype} {tuple(expected.shape)}"
                f"{hint}"
            )
        return None

    def _expected_tensors(self) -> dict[str, Tensor]:
        """Stored tensors on the meta device, as the construction gives them."""
        expected = {}
        for name, facts in self._description["stacks"].items():
            template = PackedStack.empty(
                self.num_experts_of(name),
                facts["out_features"],
                facts["in_features"],
                self.quant_type,
                facts["blocksize"],
                self._description["double_quant"],
                "meta",
            )
            for field, tensor in template.tensors().items():
                expected[name + SUFFIXES[field]] = as_stored(tensor)
        return expected

    def extra_repr(self) -> str:
        """Shapes and format, as they print in the model."""
        facts = self._description["stacks"]
        shapes = ", ".join(
            f"{name}=[{self.num_experts_of(name)}, {facts[name]['out_features']}, {facts[name]['in_features']}]"
            for name in self.stack_names
        )
        blocksize, double_quant = facts[self.stack_names[0]]["blocksize"], self._description["double_quant"]
        return f"{shapes}, quant_type={self.quant_type}, blocksize={blocksize}, double_quant={double_quant}"


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
    state_dict.setdefault(prefix + "quant_metadata", metadata.encode(module.description))
