"""`LazyWeight`: a packed weight that looks like a float tensor and is unpacked by the operation that reads it.

Code that was written for a float parameter (a loop over experts, ``bmm``, ``grouped_mm``) reads one of these instead.
Taking an expert, transposing or casting it only notes what to do; a product unpacks what it needs, uses it and forgets
it. Autograd saves the `LazyWeight`, which holds packed tensors, and backward unpacks again. So there is no cache to
release, no hook to balance and no dequantized weight between forward and backward, whatever the forward does.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_qmoe.packed import PackedStack


aten = torch.ops.aten

#: Operations that neither read nor change values: noted, and done when the weight is unpacked.
_NOTED = {
    aten.alias.default,
    aten.clone.default,
    aten.detach.default,
    aten.expand.default,
    aten.index.Tensor,
    aten.index_select.default,
    aten.permute.default,
    aten.select.int,
    aten.slice.Tensor,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.t.default,
    aten.transpose.int,
    aten.unsqueeze.default,
    aten.view.default,
    aten._reshape_alias.default,
    aten._to_copy.default,
    aten._unsafe_view.default,
}

#: Of these, views: a cast behind them can be done while unpacking.
_VIEWS = _NOTED - {aten.clone.default, aten.index.Tensor, aten.index_select.default, aten._to_copy.default}

#: Of these, ways to view a matrix with the rows of all experts as a stack of them.
_RESHAPES = {aten.view.default, aten._reshape_alias.default, aten._unsafe_view.default}

#: Products of their last two arguments, whose result never shares memory with the weight: it may lie in the reused
#: buffer.
_PRODUCTS = {
    aten.addmm.default,
    aten.addmv.default,
    aten.baddbmm.default,
    aten.bmm.default,
    aten.dot.default,
    aten.mm.default,
    aten.mv.default,
}


def _version(tensor: Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


@dataclass(frozen=True, eq=False)
class _Source:
    """What is unpacked: a stack, or some experts of one, in a dtype, as a tensor of some shape."""

    stack: PackedStack
    watched: PackedStack  # all experts: below autograd, where `narrow` runs, a view gets a version counter of its own
    versions: tuple[int | None, ...]
    dtype: torch.dtype
    shape: tuple[int, ...]
    transposed: bool

    @classmethod
    def of(cls, stack: PackedStack, dtype: torch.dtype, shape: tuple[int, ...], transposed: bool) -> "_Source":
        # Views: they keep the memory of now if someone assigns to `parameter.data`, and share its version counter.
        views: dict[str, Any] = {name: tensor.detach() for name, tensor in stack.tensors().items()}
        stack = replace(stack, **views)
        return cls(stack, stack, tuple(map(_version, views.values())), dtype, shape, transposed)

    @property
    def stack_shape(self) -> tuple[int, ...]:
        """Shape of the stack itself; never that of a transposed one, which cannot be viewed so."""
        return () if self.transposed else (self.stack.num_experts, self.stack.out_features, self.stack.in_features)

    @property
    def by_expert(self) -> bool:
        """Whether entries along dimension 0 are the stack's experts, so that they can be unpacked one by one."""
        return len(self.shape) == 3 and self.shape[0] == self.stack.num_experts

    def narrow(self, start: int, stop: int) -> "_Source":
        """The same of experts `start` to `stop`."""
        parts: dict[str, Any] = {name: tensor[start:stop] for name, tensor in self.stack.tensors().items()}
        return replace(self, stack=replace(self.stack, **parts), shape=(stop - start, *self.shape[1:]))

    def geometry(self) -> Tensor:
        """A tensor without memory that has the shape, strides and dtype of `unpack`."""
        if not self.transposed:
            return torch.empty(self.shape, dtype=self.dtype, device="meta")
        experts, rows, columns = self.shape
        return torch.empty(experts, columns, rows, dtype=self.dtype, device="meta").transpose(1, 2)

    def unpack(self, may_reuse: bool) -> Tensor:
        """The values; with `may_reuse`, a single expert comes in a buffer that the next product reuses."""
        self._check()
        if may_reuse and self.stack.num_experts == 1:
            values = self.stack.dequantize_expert(0, self.dtype, reuse=True)[None]
        else:
            values = self.stack.dequantize(self.dtype)
        return values.transpose(1, 2) if self.transposed else values.view(self.shape)

    def _check(self) -> None:
        for (name, tensor), version in zip(self.watched.tensors().items(), self.versions, strict=True):
            if version is not None and tensor._version != version:
                raise RuntimeError(
                    "a packed weight needed for gradient computation has been modified by an inplace operation: "
                    f"{name} of the {self.stack.quant_type} weight {list(self.shape)} is at version "
                    f"{tensor._version}, expected {version}. Do not overwrite packed weights between forward and "
                    "backward, or re-materialise them inside a checkpointed region."
                )


class _Step(NamedTuple):
    """A noted operation: ``function(values, *args, **kwargs)``."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def _tensors(value: Any) -> list[Tensor]:
    """Tensors in the arguments of an operation."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list | tuple):
        return []
    return [tensor for item in value for tensor in _tensors(item)]


def _replace(value: Any, kind: type[Tensor], function: Callable[[Any], Tensor]) -> Any:
    """The arguments of an operation with tensors of `kind` replaced. pytree does the same at ten times the cost."""
    if isinstance(value, kind):
        return function(value)
    if isinstance(value, dict):
        return {name: _replace(item, kind, function) for name, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)([_replace(item, kind, function) for item in value])
    return value


class LazyWeight(Tensor):
    """A constant float tensor, unpacked when read. It requires no gradient and cannot be written to.

    Made by `lazy_weight`. It has no memory: ``data_ptr()`` is 0, and a kernel that takes addresses cannot read it
    (`unpack` gives an ordinary tensor).
    """

    _source: _Source
    _steps: tuple[_Step, ...]
    _geometry: Tensor

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, source: _Source, steps: tuple[_Step, ...], geometry: Tensor) -> "LazyWeight":
        self: LazyWeight = torch.Tensor._make_wrapper_subclass(
            cls,
            geometry.shape,
            strides=geometry.stride(),
            storage_offset=geometry.storage_offset(),
            dtype=geometry.dtype,
            device=source.stack.packed.device,
        )
        self._source, self._steps, self._geometry = source, steps, geometry
        return self

    def __init__(self, *_: Any) -> None:
        super().__init__()

    def data_ptr(self) -> int:
        """0: there is no memory behind it."""
        return 0

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        stack = self._source.stack
        return f"LazyWeight({tuple(self.shape)}, {self.dtype}, device={self.device}, quant_type={stack.quant_type})"

    @property
    def data(self) -> Tensor:
        """Another handle on the same weight."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        raise _read_only("assigning to `.data`")

    def __copy__(self) -> "LazyWeight":
        return self

    def __deepcopy__(self, memo: Any) -> "LazyWeight":
        return self  # a constant; its operands' version counters must stay those of the parameters

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("a LazyWeight stands for a packed parameter and cannot be pickled; save the module's state")

    def unpack(self, may_reuse: bool = False) -> Tensor:
        """The values, as an ordinary tensor that nothing else refers to.

        Args:
            may_reuse: put them into the buffer that the next product of this thread reuses, if that is possible.

        Raises:
            RuntimeError: packed bytes or scales were overwritten since this tensor was made.
        """
        values = self._source.unpack(may_reuse)
        for function, args, kwargs in self._steps:
            values = function(values, *args, **kwargs)
        return values

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if args and isinstance(args[0], LazyWeight):
            # A view of a tensor made outside of inference mode is, like the tensor, no inference tensor.
            with torch.inference_mode(torch.is_inference_mode_enabled() and args[0].is_inference()):
                noted = args[0]._note(func, args[1:], kwargs)
            if noted is not None:
                return noted
        weights = [t for t in _tensors((args, kwargs)) if isinstance(t, LazyWeight)]
        if writes_to(LazyWeight, func, args, kwargs):
            raise _read_only(str(func))
        if func not in _PRODUCTS or len(weights) != 1:
            args, kwargs = _replace((args, kwargs), LazyWeight, LazyWeight.unpack)
            return func(*args, **kwargs)
        # The other factor may be of another dtype: a float32 bias or norm on the way promotes what was bfloat16.
        other = next(t for t in reversed(args[-2:]) if not isinstance(t, LazyWeight))
        dtype = other.dtype if other.is_floating_point() else weights[0].dtype
        args = _replace(args, LazyWeight, lambda w: w.unpack(may_reuse=True).to(dtype))
        return func(*args, **kwargs)

    def _note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What `func` gives as another `LazyWeight` (or several); `None` if it has to be computed."""
        if func in (aten.unbind.int, aten.split.Tensor, aten.split_with_sizes.default):
            return self._parts(func, args, kwargs)
        if func not in _NOTED or any(isinstance(t, LazyWeight) for t in _tensors(args)):
            return None
        if func is aten._to_copy.default:
            if any(not self._is_cast_only(name, value) for name, value in kwargs.items()):
                return None
            kwargs = {"dtype": kwargs.get("dtype") or self.dtype}
        if func is aten.clone.default and kwargs.get("memory_format") is not torch.contiguous_format:
            return None  # a copy that was asked for may be written to
        if any(t.dtype in (torch.bool, torch.uint8) for t in _tensors(args)):
            return None  # a mask: the shape depends on its values
        geometry = func(self._geometry, *_replace(args, Tensor, lambda t: t.to("meta")), **kwargs)
        if func is aten.index.Tensor and 1 in geometry.shape and (1 in self.shape or args[0][0] is None):
            return None  # torch lays this out in another way where there is memory
        if func is aten._to_copy.default and self._can_unpack_in(geometry):
            return LazyWeight(replace(self._source, dtype=geometry.dtype), self._steps, geometry)
        source = self._source
        if not self._steps and func in _RESHAPES and tuple(geometry.shape) == source.stack_shape:
            return LazyWeight(replace(source, shape=source.stack_shape), (), geometry)
        if not self._steps and source.by_expert and func in (aten.select.int, aten.slice.Tensor):
            narrowed = _experts(source, func, args)
            if narrowed is not None:
                source, args = narrowed
        # An index is copied: a float weight would have been read by now, so it may be overwritten.
        args = _replace(args, Tensor, torch.clone)
        return LazyWeight(source, (*self._steps, _Step(func, args, kwargs)), geometry)

    def _is_cast_only(self, name: str, value: Any) -> bool:
        """Whether an argument of ``_to_copy`` leaves the tensor where and as it is, but for its dtype."""
        if name == "device":
            return value is None or value == self.device
        stays = {"layout": (None, torch.strided), "memory_format": (None, torch.preserve_format)}
        return name in ("dtype", "non_blocking") or value in stays.get(name, (None, False))

    def _can_unpack_in(self, cast: Tensor) -> bool:
        """Whether unpacking in its dtype gives bits and strides of `cast`: only from float32 down, and if dense."""
        narrower = self._source.dtype == torch.float32 and cast.dtype in (torch.bfloat16, torch.float16)
        views_only = all(step.function in _VIEWS for step in self._steps)
        return narrower and views_only and cast.stride() == self.stride()

    def _parts(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        pieces = func(self._geometry, *args, **kwargs)
        if func is aten.unbind.int:
            dim = args[0] if args else kwargs.get("dim", 0)
            return type(pieces)(aten.select.int(self, dim, i) for i in range(len(pieces)))
        dim = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % self.ndim
        parts, start = [], 0
        for piece in pieces:
            stop = start + piece.shape[dim]
            parts.append(aten.slice.Tensor(self, dim, start, stop))
            start = stop
        return type(pieces)(parts)


def _experts(source: _Source, func: Any, args: tuple[Any, ...]) -> tuple[_Source, tuple[Any, ...]] | None:
    """`source` with only the experts that ``func(values, *args)`` takes, and the arguments for what is left."""
    dim, *rest = args or (0,)
    if dim not in (0, -3):
        return None
    if func is aten.select.int:
        index = rest[0] % source.shape[0]
        return source.narrow(index, index + 1), (0, 0)
    start, stop, step = slice(*(*rest, None, None)[:2], *rest[2:3]).indices(source.shape[0])
    return (source.narrow(start, stop), (0, 0, stop - start)) if step == 1 and start < stop else None


def writes_to(kind: type[Tensor], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the operation `func` would write to a tensor of `kind` among its arguments."""
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            if any(isinstance(tensor, kind) for tensor in _tensors(value)):
                return True
    return False


def _read_only(what: str) -> RuntimeError:
    return RuntimeError(
        f"{what} would write to a packed weight, which is a constant; `weight.unpack()` gives a tensor to write to"
    )


def _unpacking(name: str) -> Callable[..., Any]:
    method = getattr(Tensor, name)

    @wraps(method)
    def call(self: LazyWeight, *args: Any, **kwargs: Any) -> Any:
        return method(self.unpack(), *args, **kwargs)

    return call


def _refusing(name: str) -> Callable[..., Any]:
    @wraps(getattr(Tensor, name))
    def call(self: LazyWeight, *args: Any, **kwargs: Any) -> Any:
        raise _read_only(f"Tensor.{name}")

    return call


# Methods that reach for memory without passing through the dispatcher: torch would crash, or do nothing in silence.
for _name in ("__array__", "__dlpack__", "__format__", "numpy", "tolist"):
    setattr(LazyWeight, _name, _unpacking(_name))
for _name in ("apply_", "map_", "map2_", "set_", "resize_", "share_memory_"):
    setattr(LazyWeight, _name, _refusing(_name))


def lazy_weight(
    stack: PackedStack, dtype: torch.dtype, shape: tuple[int, ...] | None = None, transposed: bool = False
) -> LazyWeight:
    """The weight that `stack` stands for, as a tensor.

    Args:
        stack: packed ``[E, N, K]``.
        dtype: of the values, float.
        shape: of the result, if it is not that of the stack.
        transposed: ``[E, K, N]`` instead.
    """
    if shape is None:
        shape = (stack.num_experts, stack.out_features, stack.in_features)
        shape = (shape[0], shape[2], shape[1]) if transposed else shape
    source = _Source.of(stack, dtype, tuple(shape), transposed)
    return LazyWeight(source, (), source.geometry())
