"""Products with a `LoraWeight`: the base's, and each term's in factored form."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad

from hf_qmoe.lora_weight.term import Term
from hf_qmoe.lora_weight.weight import LoraWeight, handle


_T: Any = Tensor


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


_PRODUCTS: dict[Callable[..., Any], list[Any]] = {
    _linear: [linear],
    _product: [torch.matmul, _T.matmul, _T.__matmul__, _T.__rmatmul__]
    + [getattr(module, name) for name in ("mm", "bmm", "mv") for module in (torch, _T)],
    _add_product: [getattr(module, name) for name in ("addmm", "baddbmm", "addmv") for module in (torch, _T)],
    # Which of these there is depends on the version of torch.
    _grouped: [getattr(torch, "_grouped_mm", None), getattr(nn.functional, "grouped_mm", None)],
}
handle(_PRODUCTS, weight_first=False)
