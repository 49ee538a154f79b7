"""Adding an update to one packed parameter, and taking it back to the bit.

4-bit weights cannot hold an update: rounding it to their grid loses more than it is (at ``|dW| / |W|`` of 0.003 to
0.03 the error is 1.2 times the update itself). So the experts module becomes a float one, unless the caller asks to
pack the sum again, and then gets told what was lost. The packed tensors of before are kept; `Merge.undo` puts them
back.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from hf_qmoe.experts import ExpertsNbit
from hf_qmoe.lora.packed import PackedParameter, packed_names, packed_parameter
from hf_qmoe.packed import PackedStack
from hf_qmoe.packed_module import SUFFIXES, as_stored
from hf_qmoe.parametrize import attach_stack, packed_parametrizations, restore_parameter


#: Attribute of a module with un-quantized parameters: what it was.
_RECORD = "_qmoe_unquantized"


@dataclass
class _Record:
    """What an un-quantized module was: its class if it was `ExpertsNbit`, its stacks, and which of them are merged."""

    names: list[str]  # of its parameters in their order: of the float module, or of the packed ones
    packed: dict[str, PackedParameter]
    merged: set[str]
    packed_class: type[ExpertsNbit] | None
    details: dict[str, dict[str, Any]]  # further arguments of `attach_stack`
    float_dtype: torch.dtype | None  # of the model around it, if known
    compute_dtype: torch.dtype | None = None


class Merge:
    """Updates added to the parameter `name` of `module`.

    Args:
        module: `ExpertsNbit`, or a module with a parametrized packed weight.
        dtype: of the model around it, which the float parameter gets. `None` is the dtype of the products.
    """

    def __init__(self, module: nn.Module, name: str, dtype: torch.dtype | None = None) -> None:
        self._module, self._name, self._dtype = module, name, dtype
        self._before = _detached(_stack_of(module, name))
        if self._before.packed.is_meta:
            raise RuntimeError(
                f"{name} is offloaded, so nothing can be merged into it; bring it back with "
                "`accelerate.hooks.remove_hook_from_submodules(model)` first"
            )

    def add(self, delta: Callable[[int], Tensor], safe: bool, requantize: bool) -> float | None:
        """Adds ``delta(e)`` ``[out, in]`` to each expert; one expert at a time in full precision.

        Args:
            safe: first check that all sums are finite.
            requantize: keep the format. By default the module is un-quantized.

        Returns:
            with `requantize`, ``|kept - delta| / |delta|`` over the stack; else `None`.

        Raises:
            ValueError: sums that are not finite; nothing was changed.
            TypeError: an `ExpertsNbit` that was not made from a model's module has no float form.
        """
        parameter = packed_parameter(self._module, self._name)
        if requantize:
            if parameter is None:
                raise ValueError(f"{self._name} is un-quantized by an earlier merge; unmerge it first")
            stack, error = _requantized(parameter, delta, self._name)
            _set_stack(self._module, self._name, stack)
            return error
        if safe:
            self.check(delta, requantize)
        sources = self._weights()  # before the module has float values in their place, which are rounded
        _unquantize(self._module, self._name, self._dtype)
        for expert, (weight, target) in enumerate(zip(sources, self._targets(), strict=True)):
            target.copy_(weight + delta(expert).to(weight.dtype))
        return None

    def check(self, delta: Callable[[int], Tensor], requantize: bool) -> None:
        """Raises what `add` does where sums are not finite. Changes nothing."""
        parameter = packed_parameter(self._module, self._name)
        dtype = parameter.dtype if requantize and parameter is not None else self._float_dtype()
        for expert, weight in enumerate(self._weights()):
            _check_finite((weight + delta(expert).to(weight.dtype)).to(dtype), self._name, expert)

    def _float_dtype(self) -> torch.dtype:
        """The dtype that a merge gives the float parameter."""
        if packed_parameter(self._module, self._name) is None:
            dtype: torch.dtype = getattr(self._module, self._name).dtype
            return dtype
        return unquantized_dtype(self._module, self._name, self._dtype)

    def _weights(self) -> Iterator[Tensor]:
        """Experts ``[out, in]`` in at least float32."""
        record: _Record | None = self._module.__dict__.get(_RECORD)
        parameter = packed_parameter(self._module, self._name)
        if parameter is None and record is not None and self._name not in record.merged:
            parameter = record.packed[self._name]  # float since another parameter was merged
        precise = torch.promote_types(self._float_dtype(), torch.float32)
        if parameter is None:
            return (target.to(precise) for target in self._targets())
        stack = _on(parameter.stack, self._module)
        return (stack.dequantize_expert(expert, precise) for expert in range(stack.num_experts))

    def _targets(self) -> Iterable[Tensor]:
        """The float parameter's experts, as views ``[out, in]``."""
        weights: Tensor = getattr(self._module, self._name).detach()
        weights = weights[None] if weights.ndim == 2 else weights
        return weights.transpose(1, 2) if _is_transposed(self._module, self._name) else weights

    def undo(self) -> None:
        """Puts the packed tensors of before back, in the bits they had."""
        record: _Record | None = self._module.__dict__.get(_RECORD)
        if packed_parameter(self._module, self._name) is not None:
            _set_stack(self._module, self._name, _on(self._before, self._module))
            return
        assert record is not None
        record.merged.discard(self._name)
        record.packed[self._name] = record.packed[self._name]._replace(stack=self._before)
        if record.packed_class is None:
            _parametrize_again(self._module, record, self._name)
        elif not record.merged:
            _pack_again(self._module, record)
        else:
            for weight, target in zip(self._weights(), self._targets(), strict=True):
                target.copy_(weight)


def unquantized_modules(model: nn.Module) -> list[str]:
    """Paths of the modules that a merge has turned into float ones."""
    return [path for path, module in model.named_modules() if _RECORD in module.__dict__]


def forget_packed(module: nn.Module) -> None:
    """Makes a merge final: the module's other packed parameters become float too, the stacks of before are freed."""
    record: _Record = module.__dict__.pop(_RECORD)
    for name in packed_names(module):
        restore_parameter(module, name, unquantized_dtype(module, name, record.float_dtype))
        module.get_parameter(name).requires_grad_(False)
    _order(module._parameters, record.names)


def _stack_of(module: nn.Module, name: str) -> PackedStack:
    parameter = packed_parameter(module, name)
    if parameter is not None:
        return parameter.stack
    record: _Record = module.__dict__[_RECORD]
    return record.packed[name].stack


def _is_transposed(module: nn.Module, name: str) -> bool:
    record: _Record = module.__dict__[_RECORD]
    if record.packed_class is not None:
        return bool(module.is_transposed)
    return bool(record.details[name]["transposed"])


def _check_finite(values: Tensor, name: str, expert: int) -> None:
    if not torch.isfinite(values).all():
        raise ValueError(
            f"NaNs detected in the merged weights: {name}, expert {expert}. The adapter seems to be broken, or its "
            f"sum with the weights is too large for {values.dtype}; nothing of this parameter was changed"
        )


def _requantized(parameter: PackedParameter, delta: Callable[[int], Tensor], name: str) -> tuple[PackedStack, float]:
    """The stack of the sums, and the relative error of the update in it."""
    before, dtype = parameter.stack, torch.promote_types(parameter.dtype, torch.float32)
    copies: dict[str, Any] = {field: tensor.clone() for field, tensor in before.tensors().items()}
    stack = replace(before, **copies)
    lost = total = 0.0
    for expert in range(stack.num_experts):
        weight, update = before.dequantize_expert(expert, dtype), delta(expert).to(dtype)
        _check_finite((weight + update).to(parameter.dtype), name, expert)
        stack.quantize_expert_(expert, weight + update)
        kept = stack.dequantize_expert(expert, dtype) - weight
        lost += (kept - update).double().square().sum().item()
        total += update.double().square().sum().item()
    return stack, (lost / total) ** 0.5 if total else 0.0


def _unquantize(module: nn.Module, name: str, dtype: torch.dtype | None) -> None:
    """Makes the parameter (of `ExpertsNbit`: the module) float, and notes what it was."""
    record: _Record | None = module.__dict__.get(_RECORD)
    if isinstance(module, ExpertsNbit):
        packed = {n: p for n in module.stack_names if (p := packed_parameter(module, n)) is not None}
        plain_class, compute_dtype = module.plain_class, module.compute_dtype
        module.to_experts(unquantized_dtype(module, name, dtype))
        record = _Record(list(module._parameters), packed, {name}, plain_class, {}, dtype, compute_dtype)
        module.__dict__[_RECORD] = record
        for own_name in packed:
            module.get_parameter(own_name).requires_grad_(False)
        return
    if record is None:
        record = module.__dict__[_RECORD] = _Record(packed_names(module), {}, set(), None, {}, dtype)
    record.merged.add(name)
    for own_name, parametrization, _ in list(packed_parametrizations(module)):
        if own_name == name:
            record.packed[name] = packed_parameter(module, name)  # type: ignore[assignment]
            record.details[name] = {
                "fixed_dtype": parametrization.fixed_dtype,
                "transposed": parametrization.transposed,
            }
            restore_parameter(module, name, unquantized_dtype(module, name, dtype))
            module.get_parameter(name).requires_grad_(False)


def unquantized_dtype(module: nn.Module, name: str, dtype: torch.dtype | None) -> torch.dtype:
    """The dtype of a packed parameter's float form in a model of `dtype` (`None`: unknown).

    It is the model's, since float experts take no other input; but where that of the packed form follows casts of the
    module, as a float parameter's does, it stays.
    """
    for own_name, parametrization, _ in packed_parametrizations(module):
        if own_name == name and not parametrization.fixed_dtype:
            return parametrization.dtype
    parameter = packed_parameter(module, name)
    assert parameter is not None
    return dtype or parameter.dtype


def _pack_again(module: nn.Module, record: _Record) -> None:
    """Makes a float module the `ExpertsNbit` that it was."""
    stacks = {n: _on(p.stack, module) for n, p in record.packed.items()}
    del module.__dict__[_RECORD]
    assert record.packed_class is not None
    _order(module._parameters, record.names)  # PEFT's forward on another, float parameter has changed it
    record.packed_class.from_stacks(module, stacks, record.compute_dtype)


def _parametrize_again(module: nn.Module, record: _Record, name: str) -> None:
    """Makes a float parameter the parametrized one that it was."""
    shape, dtype, stack = record.packed.pop(name)
    details = record.details.pop(name)
    if not details["fixed_dtype"]:  # the module may have been cast since
        dtype = getattr(module, name).dtype
    attach_stack(module, name, _on(stack, module), shape, dtype, **details)
    chains: Any = module.parametrizations
    _order(chains._modules, record.names)
    if not record.merged:
        del module.__dict__[_RECORD]


def _detached(stack: PackedStack) -> PackedStack:
    """The stack without the module's own parameters, whose data may be exchanged."""
    tensors: dict[str, Any] = {field: tensor.detach() for field, tensor in stack.tensors().items()}
    return replace(stack, **tensors)


def _set_stack(module: nn.Module, name: str, stack: PackedStack) -> None:
    """Puts another stack of the same format and shape in the place of a packed one."""
    if isinstance(module, ExpertsNbit):
        for field, tensor in stack.tensors().items():
            getattr(module, name + SUFFIXES[field]).data = as_stored(tensor)
        return
    for own_name, parametrization, packed in packed_parametrizations(module):
        if own_name == name:
            stored = parametrization.state_dict(keep_vars=True) | {"packed": packed}
            for field, tensor in stack.tensors().items():
                stored[field].data = as_stored(tensor)


def _on(stack: PackedStack, module: nn.Module) -> PackedStack:
    """The stack on the device the module is on now."""
    device = next(module.parameters()).device
    moved: dict[str, Any] = {field: tensor.to(device) for field, tensor in stack.tensors().items()}
    return replace(stack, **moved)


def _order(entries: dict[str, Any], names: list[str]) -> None:
    """Brings those of `names` that are there into their order: wrappers nest in the order of parameters."""
    present = [name for name in names if name in entries]
    keys = iter(present)
    ordered = {key: entries[key] for key in [next(keys) if key in present else key for key in entries]}
    entries.clear()
    entries.update(ordered)
