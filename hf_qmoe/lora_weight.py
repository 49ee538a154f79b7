"""`LoraWeight`: a packed weight plus low-rank updates, which a product uses in factored form.

Code that was written for a float parameter reads one of these instead. Taking experts, transposing, casting and
slicing act on the base and the factors alike. A product ``x @ W`` computes ``x @ base`` and ``(x @ left) @ right``, so
the update is never multiplied out and nothing of the weight's size is saved for backward.

Any other operation, known to torch or not, sees an ordinary differentiable tensor. It is computed when the operation
runs, from the `LoraWeight` that autograd keeps; a dense gradient that reaches it goes on to the factors.
"""

import operator
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad
from torch.utils._pytree import tree_leaves, tree_map_only

from hf_qmoe.factors import LoraFactors, split_lora_A, split_lora_B


_ALL = slice(None)
_INDICES = (torch.int64, torch.int32, torch.int16, torch.int8)


class Term(NamedTuple):
    """A low-rank update ``scaling * left @ right`` of a weight ``[..., P, Q]``.

    `left` ``[..., P, R]`` and `right` ``[..., R, Q]``, float and differentiable, may have another dtype than the
    weight; `dropout` is applied to what the update, not the base, is multiplied with, `None` does nothing.
    """

    left: Tensor
    right: Tensor
    scaling: float
    dropout: nn.Module | None = None

    def swapped(self) -> "Term":
        """The update of the transposed weight."""
        return self._replace(left=self.right.mT, right=self.left.mT)

    def detached(self) -> "Term":
        """The same values, as constants."""
        return self._replace(left=self.left.detach(), right=self.right.detach())

    def dropped(self, x: Tensor) -> Tensor:
        """`x` behind `dropout`."""
        return x if self.dropout is None else self.dropout(x)


def _drops(dropout: nn.Module | None) -> bool:
    return dropout is not None and dropout.training and getattr(dropout, "p", 0) > 0


def _refuse_dropout(where: str) -> RuntimeError:
    return RuntimeError(
        f"lora_dropout cannot be applied: forward uses the weight in {where}, not in a product with its input; set "
        "lora_dropout=0"
    )


def _refuse_writing(where: str) -> RuntimeError:
    return RuntimeError(f"{where} would write to a packed weight with LoRA, which is a constant of the forward pass")


def _without_autocast(device: torch.device) -> AbstractContextManager[object]:
    available = torch.amp.is_autocast_available(device.type)
    return torch.autocast(device.type, enabled=False) if available else nullcontext()


def _dense(base: Tensor, terms: Sequence[Term]) -> Tensor:
    """The weight ``[..., P, Q]`` multiplied out, in the base's dtype, differentiable in the factors."""
    values, dtype = base, base.dtype
    with _without_autocast(base.device):
        for term in terms:
            values = ((term.scaling * term.left).to(dtype) @ term.right.to(dtype)).add_(values)
    return values


class _Join(torch.autograd.Function):
    """Makes a `LoraWeight` a function of its factors, for the operations that give a dense gradient of it."""

    @staticmethod
    def forward(ctx: Any, make: Callable[[], Tensor], terms: Sequence[Term], *factors: Tensor) -> Tensor:
        ctx.save_for_backward(*factors)
        ctx.constants = [
            (term.scaling, term.dropout) for term in terms
        ]  # tensors only where autograd's hooks see them
        return make()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        factors, grads = ctx.saved_tensors, []
        with _without_autocast(grad.device):
            for (scaling, dropout), left, right in zip(ctx.constants, factors[::2], factors[1::2], strict=True):
                if _drops(dropout):
                    raise _refuse_dropout("an operation that asks for its dense gradient")
                grads.append((scaling * (grad @ right.to(grad.dtype).mT)).to(left.dtype))
                grads.append((scaling * (left.to(grad.dtype).mT @ grad)).to(right.dtype))
        return None, None, *grads


class LoraWeight(Tensor):
    """``base + sum of scaling * left @ right``, ``[..., P, Q]``, with dtype, device and strides of `base`.

    Made by `lora_weight`. It has no memory and cannot be written to.
    """

    _constant: Tensor
    _terms: tuple[Term, ...]
    _by_expert: "Callable[[int], LoraWeight] | None"
    _unbound: dict[bool, list[tuple[tuple[Tensor, ...], tuple[Tensor, ...]]]]

    @staticmethod
    def __new__(cls, base: Tensor, terms: tuple[Term, ...]) -> "LoraWeight":
        self: LoraWeight = torch.Tensor._make_wrapper_subclass(
            cls,
            base.shape,
            strides=base.stride(),
            storage_offset=base.storage_offset(),
            dtype=base.dtype,
            device=base.device,
        )
        self._constant, self._terms, self._by_expert, self._unbound = base, terms, None, {}
        return self

    def __init__(self, *_: Any) -> None:
        super().__init__()

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        ranks = [term.left.shape[-1] for term in self._terms]
        return f"LoraWeight({tuple(self.shape)}, {self.dtype}, device={self.device}, ranks={ranks})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("a LoraWeight stands for a packed parameter and cannot be pickled; save the module's state")

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = _handled(func, args, kwargs)
        if result is not NotImplemented:
            return result
        if func in _BY_ADDRESS:
            args = (_dense(args[0]._constant, _checked(args[0], func.__name__)), *args[1:])
        elif func in _WRITING and isinstance(args[0], LoraWeight):
            raise _refuse_writing(f"Tensor.{func.__name__}")
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):  # autograd's own
            return LoraWeight(args[0]._constant, tuple(term.detached() for term in args[0]._terms))
        for index, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                written = args[index] if index < len(args) else kwargs.get(argument.name)
                if any(isinstance(leaf, LoraWeight) for leaf in tree_leaves(written)):
                    raise _refuse_writing(str(func))
        dense = tree_map_only(LoraWeight, lambda w: _dense(w._constant, _checked(w, str(func))), (args, kwargs))
        return func(*dense[0], **dense[1])

    def _derived(
        self, base: Tensor, change: Callable[[Term], Term], part: Callable[[Any], Any] | None
    ) -> "LoraWeight":
        """A view with another base and changed terms; `part` does to an expert's matrix what was done to all."""
        weight = _joined(base, tuple(map(change, self._terms)))
        if part is not None and base.ndim > 2:
            weight._by_expert = lambda index: part(self._expert(index))
        return weight

    def _expert(self, index: int) -> "LoraWeight":
        """Entry `index` of dimension 0, which is not a row. All entries share one unbinding of the factors.

        Backward of a selection makes a zero gradient of the whole stack's size; backward of unbinding only stacks.
        """
        if self._by_expert is not None:
            return self._by_expert(index)
        base = self._constant[index]  # raises if out of range
        mode = torch.is_grad_enabled()
        if mode not in self._unbound:
            self._unbound[mode] = [(term.left.unbind(), term.right.unbind()) for term in self._terms]
        parts = zip(self._terms, self._unbound[mode], strict=True)
        return _joined(base, tuple(t._replace(left=left[index], right=right[index]) for t, (left, right) in parts))

    def _transposed(self) -> "LoraWeight":
        return self._derived(self._constant.mT, Term.swapped, lambda expert: expert.mT)

    def _cast(self, dtype: torch.dtype) -> "LoraWeight":
        return self._derived(self._constant.to(dtype), lambda term: term, lambda expert: expert.to(dtype))

    def _at(self, *key: Any) -> Any:
        """``self[key]``, if it indexes stacked matrices and slices their rows and columns."""
        base, used = self._constant, sum(k is not None and k is not Ellipsis for k in key)
        dots = next((i for i, k in enumerate(key) if k is Ellipsis), len(key))
        key = (*key[:dots], *[_ALL] * (base.ndim - used), *key[dots + 1 :])
        *stack, rows, columns = key if len(key) > 1 else (None, None)
        slices = isinstance(rows, slice) and isinstance(columns, slice)
        if not slices or used > base.ndim or not all(map(_is_index, stack)):
            return NotImplemented
        if stack and _is_int(stack[0]):
            return self._expert(operator.index(stack[0]))._at(*stack[1:], rows, columns)
        whole = all(isinstance(k, slice) and k == _ALL for k in stack)
        if whole and (rows, columns) == (_ALL, _ALL):
            return self

        def change(term: Term) -> Term:
            return term._replace(left=term.left[(*stack, rows, _ALL)], right=term.right[(*stack, _ALL, columns)])

        part = (lambda expert: expert[(..., rows, columns)]) if whole else None
        return self._derived(base[(*stack, rows, columns)], change, part)

    def _along(self, dim: int, index: Any) -> Any:
        """``self[index]`` along `dim`."""
        return self._at(*[_ALL] * (dim % self._constant.ndim), index, ...)


def _is_int(index: Any) -> bool:
    if isinstance(index, Tensor):
        return index.ndim == 0 and index.dtype in _INDICES
    return hasattr(index, "__index__") and not isinstance(index, bool)


def _is_index(index: Any) -> bool:
    """Whether `index` takes entries of one dimension, or makes one. Masks are left to torch."""
    if isinstance(index, list):
        return all(map(_is_int, index))
    return index is None or isinstance(index, slice) or _is_int(index) or getattr(index, "dtype", None) in _INDICES


def _checked(weight: LoraWeight, where: str) -> Sequence[Term]:
    """The terms, if they can be multiplied out."""
    if any(_drops(term.dropout) for term in weight._terms):
        raise _refuse_dropout(where)
    return weight._terms


def _joined(base: Tensor, terms: tuple[Term, ...]) -> LoraWeight:
    if not torch.is_grad_enabled():
        terms = tuple(term.detached() for term in terms)
    factors = [factor for term in terms for factor in (term.left, term.right)]
    if not any(factor.requires_grad for factor in factors):
        return LoraWeight(base, terms)
    weight: LoraWeight = _Join.apply(lambda: LoraWeight(base, terms), terms, *factors)  # type: ignore[no-untyped-call]
    return weight


# -- views: handlers are called with the function and its arguments, and may return NotImplemented -------------------


def _transpose(func: Any, input: LoraWeight, dim0: int, dim1: int) -> Any:
    ndim = input._constant.ndim
    return input._transposed() if sorted((dim0 % ndim, dim1 % ndim)) == [ndim - 2, ndim - 1] else NotImplemented


def _transpose_all(func: Any, input: LoraWeight) -> Any:
    return input._transposed() if input._constant.ndim == 2 else NotImplemented


def _transpose_matrices(func: Any, input: LoraWeight) -> Any:
    return input._transposed()


def _permute(func: Any, input: LoraWeight, *args: Any, dims: Any = None) -> Any:
    dims, ndim = dims or (args[0] if len(args) == 1 else args), input._constant.ndim
    *stack, rows, columns = [dim % ndim for dim in dims]
    if stack != list(range(ndim - 2)):
        return NotImplemented
    return input._transposed() if rows > columns else input


def _get(func: Any, input: LoraWeight, key: Any) -> Any:
    return input._at(*key) if isinstance(key, tuple) else input._at(key)


def _select(func: Any, input: LoraWeight, dim: int, index: Any) -> Any:
    return input._along(dim, index)


def _unbind(func: Any, input: LoraWeight, dim: int = 0) -> Any:
    if dim % input._constant.ndim or input._constant.ndim < 3:
        return NotImplemented
    parts = tuple(input._expert(index) for index in range(input._constant.shape[0]))
    return iter(parts) if func is Tensor.__iter__ else parts


def _narrow(func: Any, input: LoraWeight, dim: int, start: Any, length: int) -> Any:
    func(torch.empty(input._constant.shape, device="meta"), dim, start, length)  # checks the range
    start = operator.index(start) % max(input._constant.shape[dim], 1)
    return input._along(dim, slice(start, start + length))


def _split(func: Any, input: LoraWeight, *args: Any, **kwargs: Any) -> Any:
    dim, stop, parts = kwargs.get("dim", args[1] if len(args) > 1 else 0), 0, []
    for piece in func(torch.empty(input._constant.shape, device="meta"), *args, **kwargs):
        start, stop = stop, stop + piece.shape[dim]
        parts.append(input._along(dim, slice(start, stop)))
    return tuple(parts)


def _shape(func: Any, input: LoraWeight, *args: Any, **kwargs: Any) -> Any:
    """Changes of shape that leave the matrices as they are."""
    base = input._constant
    viewed = func(torch.empty_strided(base.shape, base.stride(), dtype=base.dtype, device="meta"), *args, **kwargs)
    if viewed.dtype != base.dtype or viewed.ndim < 2 or viewed.shape[-2:] != base.shape[-2:]:
        return NotImplemented

    def reshaped(factor: Tensor) -> Tensor:
        to = (*viewed.shape[:-2], *factor.shape[-2:])
        return factor.expand(to) if func is Tensor.expand else factor.reshape(to)

    if viewed.shape == base.shape:
        return input
    change = lambda term: term._replace(left=reshaped(term.left), right=reshaped(term.right))  # noqa: E731
    return input._derived(func(base, *args, **kwargs), change, None)


def _cast(func: Any, input: LoraWeight, *args: Any, **kwargs: Any) -> Any:
    probe = torch.empty(0, dtype=input._constant.dtype, device=input._constant.device)
    cast = func(probe, *args, **kwargs)
    if cast is probe:
        return input
    if not isinstance(cast, Tensor):
        return cast  # the name of its type
    plain = cast.device == probe.device and cast.is_floating_point() and not {"copy", "memory_format"} & kwargs.keys()
    return input._cast(cast.dtype) if plain and cast.dtype != probe.dtype else NotImplemented


def _contiguous(func: Any, input: LoraWeight) -> Any:
    if input._constant.is_contiguous():
        return input
    return input._derived(input._constant.contiguous(), lambda term: term, lambda expert: expert.contiguous())


def _detach(func: Any, input: LoraWeight) -> Any:
    return input._derived(input._constant, Term.detached, lambda expert: expert.detach())


# -- products -------------------------------------------------------------------------------------------------------


def _plus(out: Tensor, weight: LoraWeight, product: Callable[[Term], Tensor], alpha: float = 1) -> Tensor:
    """`out`, the base's product, plus that of each term. `out` is new, so it is added to in place."""
    for term in weight._terms:
        out = out.add_(product(term), alpha=alpha * term.scaling)
    return out


def _from_left(x: Tensor, term: Term) -> Tensor:
    """``x @ left @ right``."""
    if x.ndim == 1:
        return _from_left(x[None], term).squeeze(-2)
    x = term.dropped(x)
    return x @ term.left.to(x.dtype) @ term.right.to(x.dtype)


def _from_right(x: Tensor, term: Term) -> Tensor:
    """``left @ right @ x``."""
    if x.ndim == 1:
        return _from_right(x[:, None], term).squeeze(-1)
    x = term.dropped(x)
    return term.left.to(x.dtype) @ (term.right.to(x.dtype) @ x)


def _linear(func: Any, input: Any, weight: Any, bias: Any = None) -> Any:
    if not isinstance(weight, LoraWeight):
        return NotImplemented
    return _plus(linear(input, weight._constant, bias), weight, lambda term: _from_left(input, term.swapped()))


def _product(func: Any, input: Any, *others: Any, **named: Any) -> Any:
    if len(others) + len(named) != 1:  # `out`
        return NotImplemented
    (other,) = (*others, *named.values())
    if func is Tensor.__rmatmul__:
        func, input, other = torch.matmul, other, input
    if isinstance(input, LoraWeight):
        return _plus(func(input._constant, other), input, lambda term: _from_right(other, term))
    return _plus(func(input, other._constant), other, lambda term: _from_left(input, term))


def _add_product(func: Any, input: Any, first: Any, second: Any, *, beta: float = 1, alpha: float = 1) -> Any:
    scales = {"beta": beta, "alpha": alpha}
    if isinstance(first, LoraWeight):
        out = func(input, first._constant, second, **scales)
        return _plus(out, first, lambda term: _from_right(second, term), alpha)
    if isinstance(second, LoraWeight):
        out = func(input, first, second._constant, **scales)
        return _plus(out, second, lambda term: _from_left(first, term), alpha)
    return NotImplemented


def _grouped(
    func: Any, input: Any, weight: Any, offs: Tensor | None = None, bias: Any = None, out_dtype: Any = None
) -> Any:
    """``x [T, P]`` times ``[E, P, Q]`` by groups of rows."""
    if not isinstance(weight, LoraWeight) or offs is None:
        return NotImplemented

    def product(term: Term) -> Any:
        x = term.dropped(input)
        return func(func(x, _aligned(term.left, x), offs=offs), _aligned(term.right.mT, x).mT, offs=offs)

    return _plus(func(input, weight._constant, offs=offs, bias=bias, out_dtype=out_dtype), weight, product)


def _aligned(factor: Tensor, x: Tensor) -> Tensor:
    """`factor` ``[E, P, R]`` as the grouped product wants it: rows that start at multiples of 16 bytes."""
    return pad(factor.to(x.dtype), (0, -factor.shape[-1] % (16 // x.element_size()))).contiguous()


# -- what is handled ------------------------------------------------------------------------------------------------

_T: Any = Tensor
_VIEWS: dict[Callable[..., Any], list[Any]] = {
    _transpose: [torch.transpose, _T.transpose, torch.swapaxes, _T.swapaxes, torch.swapdims, _T.swapdims],
    _transpose_all: [torch.t, _T.t, _T.T.__get__],
    _transpose_matrices: [_T.mT.__get__],
    _permute: [torch.permute, _T.permute],
    _get: [_T.__getitem__],
    _select: [torch.select, _T.select, torch.index_select, _T.index_select],
    _unbind: [torch.unbind, _T.unbind, _T.__iter__],
    _narrow: [torch.narrow, _T.narrow],
    _split: [torch.split, _T.split, torch.chunk, _T.chunk, torch.tensor_split, _T.tensor_split],
    _shape: [_T.view, torch.reshape, _T.reshape, _T.expand, torch.unsqueeze, _T.unsqueeze, torch.squeeze, _T.squeeze],
    _cast: [_T.to, _T.type, _T.type_as, _T.float, _T.bfloat16, _T.half, _T.double],
    _contiguous: [_T.contiguous],
    _detach: [torch.detach, _T.detach, _T.data.__get__],
}
_PRODUCTS: dict[Callable[..., Any], list[Any]] = {
    _linear: [linear],
    _product: [torch.matmul, _T.matmul, _T.__matmul__, _T.__rmatmul__]
    + [getattr(module, name) for name in ("mm", "bmm", "mv") for module in (torch, _T)],
    _add_product: [getattr(module, name) for name in ("addmm", "baddbmm", "addmv") for module in (torch, _T)],
    # Which of these there is depends on the version of torch.
    _grouped: [getattr(torch, "_grouped_mm", None), getattr(nn.functional, "grouped_mm", None)],
}


def _handlers(groups: dict[Callable[..., Any], list[Any]]) -> dict[Any, tuple[Callable[..., Any], set[str] | None]]:
    """Handler of each function, with the keywords that it takes; `None` is any."""
    found: dict[Any, tuple[Callable[..., Any], set[str] | None]] = {}
    for handler, funcs in groups.items():
        parameters = signature(handler).parameters
        takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        found |= dict.fromkeys(funcs, (handler, None if takes_any else set(parameters)))
    return found


def _handled(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What the handler of `func` gives, `NotImplemented` if there is none for these arguments."""
    handler, names = _HANDLERS.get(func, (None, None))
    if handler is None or (names is not None and not kwargs.keys() <= names):
        return NotImplemented
    first = args[0] if args else kwargs.get("input")
    weights = [value for value in (*args, *kwargs.values()) if isinstance(value, LoraWeight)]
    if len(weights) != 1 or not isinstance(first, LoraWeight if handler in _VIEWS else Tensor):
        return NotImplemented
    with torch._C.DisableTorchFunctionSubclass():
        if weights[0].is_leaf and weights[0].requires_grad:
            return NotImplemented  # somebody asked for its own gradient
    return handler(func, *args, **kwargs)


_HANDLERS = _handlers(_VIEWS) | _handlers(_PRODUCTS)
#: Methods that reach for memory without passing through the dispatcher.
_BY_ADDRESS = {_T.numpy, _T.tolist, _T.__array__, _T.__dlpack__}
_WRITING = {_T.apply_, _T.map_, _T.map2_, _T.set_, _T.resize_, _T.share_memory_, _T.__setitem__, _T.data.__set__}


def lora_weight(base: Tensor, terms: Sequence[Term]) -> Tensor:
    """The weight ``base + sum of scaling * left @ right``, as a tensor that products use in factored form.

    Make one per forward pass and use it for all experts: parts of one share the unbinding of the factors.

    Args:
        base: ``[E, P, Q]`` or ``[P, Q]``, float, without gradient: a `LazyWeight` or an ordinary tensor.
        terms: factors ``[E, P, R]`` and ``[E, R, Q]``, or ``[P, R]`` and ``[R, Q]``.

    Returns:
        A `LoraWeight`; `base` itself if there are no terms; an ordinary tensor while torch.compile traces.

    Raises:
        ValueError: factors that do not fit `base`, or a `base` that requires a gradient.
    """
    if base.requires_grad:
        raise ValueError("the weight under LoRA requires a gradient; freeze it")
    for left, right, *_ in terms:
        expected = (*base.shape[:-1], left.shape[-1]), (*base.shape[:-2], left.shape[-1], base.shape[-1])
        if (tuple(left.shape), tuple(right.shape)) != expected:
            raise ValueError(f"factors {list(left.shape)} and {list(right.shape)} do not fit {list(base.shape)}")
    if torch.compiler.is_compiling() or not terms:
        return _dense(base, terms)
    return _joined(base, tuple(terms))


def terms_of(factors: LoraFactors, num_experts: int, ndim: int, swapped: bool) -> Term:
    """PEFT's factors as those of a parameter with `ndim` dimensions.

    Args:
        factors: ``lora_A`` ``[E * R, in]`` and ``lora_B`` ``[out, R * E]``.
        num_experts: E; 1 if `ndim` is 2.
        ndim: 3, or 2 for a parameter ``[out, in]``.
        swapped: a parameter with three dimensions is ``[E, out, in]``, not ``[E, in, out]``.

    Returns:
        `Term` with views of the factors, of the parameter's orientation.
    """
    term = Term(
        split_lora_B(factors.lora_B, num_experts),
        split_lora_A(factors.lora_A, num_experts),
        factors.scaling,
        factors.dropout,
    )
    if ndim == 2:
        return term._replace(left=factors.lora_B, right=factors.lora_A)
    return term if swapped else term.swapped()
