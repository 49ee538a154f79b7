"""`LoraWeight`: the tensor, and what may be done with it. `views` and `products` say how."""

import operator
from collections.abc import Callable, Sequence
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from hf_qmoe.lazy_weight import writes_to
from hf_qmoe.lora_weight.term import Join, Term, dense, drops, refuse_dropout, refuse_writing


_ALL = slice(None)
_INDICES = (torch.int64, torch.int32, torch.int16, torch.int8)
_T: Any = Tensor

#: Methods that reach for memory without passing through the dispatcher.
_BY_ADDRESS = {_T.numpy, _T.tolist, _T.__array__, _T.__dlpack__}
_WRITING = {_T.apply_, _T.map_, _T.map2_, _T.set_, _T.resize_, _T.share_memory_, _T.__setitem__, _T.data.__set__}

#: Handler of each function that keeps the factors apart, the keywords that it takes (`None` is any), and whether its
#: first argument must be the weight. A handler is called with the function and its arguments, and may return
#: `NotImplemented`.
_HANDLERS: dict[Any, tuple[Callable[..., Any], set[str] | None, bool]] = {}


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
            args = (dense(args[0]._constant, checked(args[0], func.__name__)), *args[1:])
        elif func in _WRITING and isinstance(args[0], LoraWeight):
            raise refuse_writing(f"Tensor.{func.__name__}")
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):  # autograd's own
            return LoraWeight(args[0]._constant, tuple(term.detached() for term in args[0]._terms))
        if writes_to(LoraWeight, func, args, kwargs):
            raise refuse_writing(str(func))
        unpacked = tree_map_only(LoraWeight, lambda w: dense(w._constant, checked(w, str(func))), (args, kwargs))
        return func(*unpacked[0], **unpacked[1])

    def _derived(
        self, base: Tensor, change: Callable[[Term], Term], part: Callable[[Any], Any] | None
    ) -> "LoraWeight":
        """A view with another base and changed terms; `part` does to an expert's matrix what was done to all."""
        weight = joined(base, tuple(map(change, self._terms)))
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
        return joined(base, tuple(t._replace(left=left[index], right=right[index]) for t, (left, right) in parts))

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


def checked(weight: LoraWeight, where: str) -> Sequence[Term]:
    """The terms, if they can be multiplied out."""
    if any(drops(term.dropout) for term in weight._terms):
        raise refuse_dropout(where)
    return weight._terms


def joined(base: Tensor, terms: tuple[Term, ...]) -> LoraWeight:
    if not torch.is_grad_enabled():
        terms = tuple(term.detached() for term in terms)
    factors = [factor for term in terms for factor in (term.left, term.right)]
    if not any(factor.requires_grad for factor in factors):
        return LoraWeight(base, terms)
    weight: LoraWeight = Join.apply(lambda: LoraWeight(base, terms), terms, *factors)  # type: ignore[no-untyped-call]
    return weight


# -- handlers -------------------------------------------------------------------------------------------------------


def handle(groups: dict[Callable[..., Any], list[Any]], weight_first: bool) -> None:
    """Makes each key of `groups` the handler of its functions."""
    for handler, funcs in groups.items():
        parameters = signature(handler).parameters
        takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        _HANDLERS.update(dict.fromkeys(funcs, (handler, None if takes_any else set(parameters), weight_first)))


def _handled(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What the handler of `func` gives, `NotImplemented` if there is none for these arguments."""
    handler, names, weight_first = _HANDLERS.get(func, (None, None, False))
    if handler is None or (names is not None and not kwargs.keys() <= names):
        return NotImplemented
    first = args[0] if args else kwargs.get("input")
    weights = [value for value in (*args, *kwargs.values()) if isinstance(value, LoraWeight)]
    if len(weights) != 1 or not isinstance(first, LoraWeight if weight_first else Tensor):
        return NotImplemented
    with torch._C.DisableTorchFunctionSubclass():
        if weights[0].is_leaf and weights[0].requires_grad:
            return NotImplemented  # somebody asked for its own gradient
    return handler(func, *args, **kwargs)
