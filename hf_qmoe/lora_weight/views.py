"""Operations that take parts of a `LoraWeight`, transpose or cast it: done to the base and the factors alike."""

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hf_qmoe.lora_weight.term import Term
from hf_qmoe.lora_weight.weight import LoraWeight, handle


_T: Any = Tensor
_ALL = slice(None)


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
handle(_VIEWS, weight_first=True)
