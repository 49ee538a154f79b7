"""`LoraWeight` against the dense weight it stands for: values, gradients, memory, dropout, checkpointing."""

import pickle
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from hf_qmoe.factors import LoraFactors
from hf_qmoe.lazy_weight import LazyWeight, lazy_weight
from hf_qmoe.lora_weight import LoraWeight, Term, lora_weight, terms_of
from hf_qmoe.packed import PackedStack
from tests.support.oracle import dtype_name, recorded_saves


EXPERTS, ROWS, COLUMNS, TOKENS, RANKS = 3, 64, 128, 5, (4, 3)
SCALINGS = (2.0, -0.5)
INDEX, MASK = torch.tensor([2, 0, 1, 2]), torch.tensor([True, False, True])
OFFSETS = torch.tensor([2, 2, TOKENS], dtype=torch.int32)


class Case(NamedTuple):
    """A `LoraWeight`, the dense weight it stands for, and the factors that either is made of."""

    weight: Tensor
    dense: Tensor
    factors: list[Tensor]
    dense_factors: list[Tensor]


def case(
    ndim: int = 3,
    lazy: bool = True,
    dtype: torch.dtype = torch.float64,
    factor_dtype: torch.dtype | None = None,
    dropout: nn.Module | None = None,
    terms: int = 2,
) -> Case:
    """A random weight ``[E, P, Q]`` or ``[P, Q]``; the dense one is multiplied out in float64 if that is `dtype`."""
    generator = torch.Generator().manual_seed(0)
    values = 0.2 * torch.randn(EXPERTS if ndim == 3 else 1, ROWS, COLUMNS, generator=generator)
    stack = PackedStack.from_float(values, "nf4", 64, False)
    shape = (EXPERTS, ROWS, COLUMNS)[-ndim:]
    plain = stack.dequantize(torch.float32).to(dtype).view(shape)
    base = lazy_weight(stack, torch.float32, shape).to(dtype) if lazy else plain.clone()
    factors: list[list[Tensor]] = [[], []]
    for rank in RANKS[:terms]:
        for size in ((*shape[:-1], rank), (*shape[:-2], rank, shape[-1])):
            factor = (0.3 * torch.randn(size, generator=generator, dtype=torch.float64)).to(factor_dtype or dtype)
            for made in factors:
                made.append(factor.clone().requires_grad_())
    ours, theirs = factors
    weight = lora_weight(base, [Term(*ours[2 * i : 2 * i + 2], SCALINGS[i], dropout) for i in range(terms)])
    dense = plain
    for i in range(terms):
        dense = dense + (SCALINGS[i] * theirs[2 * i] @ theirs[2 * i + 1]).to(dtype)
    return Case(weight, dense, ours, theirs)


def inputs(*sizes: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """A trainable input, the same at each call."""
    generator = torch.Generator().manual_seed(sum(sizes))
    return torch.randn(sizes, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()


def results(function: Callable[[Tensor], Any], weight: Tensor, leaves: list[Tensor]) -> list[Tensor | None]:
    """Float outputs of ``function(weight)`` and gradients of a nonlinear function of them."""
    outputs = [out for out in tree_leaves(function(weight)) if isinstance(out, Tensor)]
    total = sum((out.double() + 1).pow(2).sum() for out in outputs)
    grads = torch.autograd.grad(total, leaves, allow_unused=True)
    return [*(out.detach() for out in outputs), *grads]


def assert_agrees(
    function: Callable[[Tensor, Tensor], Any], made: Case, *sizes: int, tolerance: float = 1e-10
) -> None:
    """``function(weight, x)`` gives the outputs and gradients of x and all factors that the dense weight gives."""
    found = []
    for weight, factors in ((made.weight, made.factors), (made.dense, made.dense_factors)):
        x = inputs(*sizes, dtype=made.dense.dtype)
        found.append(results(lambda w, x=x: function(w, x), weight, [x, *factors]))
    assert len(found[0]) == len(found[1])
    for actual, expected in zip(*found, strict=True):
        if expected is None:
            assert actual is None
            continue
        assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype)
        error = (values(actual).double() - expected.double()).abs().max() if expected.numel() else 0
        assert error <= tolerance * (1 + (expected.double().abs().max() if expected.numel() else 0))


def values(tensor: Tensor) -> Tensor:
    """An ordinary tensor with the values of `tensor`."""
    return tensor + 0 if isinstance(tensor, LoraWeight) else tensor


by_base = pytest.mark.parametrize("lazy", [True, False], ids=["packed", "plain"])

#: Views of ``[E, P, Q]`` that are noted.
VIEWS: dict[str, Callable[[Tensor], Any]] = {
    "int": lambda w: w[1],
    "negative": lambda w: w[-1],
    "numpy-int": lambda w: w[np.int64(1)],
    "0-dim": lambda w: w[torch.tensor(1)],
    "select": lambda w: w.select(0, 1),
    "slice": lambda w: w[1:],
    "empty-slice": lambda w: w[2:2],
    "step": lambda w: w[::2],
    "index": lambda w: w[INDEX],
    "int32-index": lambda w: w[INDEX.int()],
    "index-matrix": lambda w: w[INDEX.view(2, 2)],
    "list": lambda w: w[[2, 0]],
    "index_select": lambda w: w.index_select(0, INDEX),
    "torch.index_select": lambda w: torch.index_select(w, 0, index=INDEX),
    "index-and-rows": lambda w: w[INDEX, 4:20:3, :9],
    "rows": lambda w: w[:, 4:20:3],
    "columns": lambda w: w[..., :7],
    "expert-columns": lambda w: w[2, :, 5:-5],
    "expert-ellipsis": lambda w: w[1, ...],
    "all": lambda w: w[:],
    "none": lambda w: (w[None], w[:, None], w[None, 1], w[1][None]),
    "unbind": lambda w: w.unbind(),
    "torch.unbind": lambda w: torch.unbind(w, dim=0),
    "iteration": lambda w: list(w),
    "narrow": lambda w: (w.narrow(0, 1, 2), w.narrow(-1, -3, 2), torch.narrow(w, 1, torch.tensor(3), 5)),
    "chunk": lambda w: (*w.chunk(2, -1), *w[1].chunk(2), *w.chunk(2, dim=0)),
    "split": lambda w: (*w.split([5, ROWS - 5], 1), *torch.split(w, 20, dim=2)),
    "tensor_split": lambda w: w.tensor_split(3, -1),
    "transpose": lambda w: (
        w.transpose(1, 2),
        w.transpose(-1, -2),
        torch.swapaxes(w, 2, 1),
        w.transpose(dim0=1, dim1=2),
    ),
    "mT": lambda w: w.mT,
    "mT-twice": lambda w: w.mT.mT,
    "mT-expert": lambda w: w.mT[1],
    "T": lambda w: (w[0].T, w[0].t(), torch.t(w[2])),
    "permute": lambda w: (w.permute(0, 2, 1), torch.permute(w, (0, 1, 2)), w.permute(dims=(0, -1, 1))),
    "contiguous": lambda w: (w.contiguous(), w.mT.contiguous(), w[1].T.contiguous()),
    "same-view": lambda w: (w.view(w.shape), w.reshape(EXPERTS, ROWS, -1), w.mT.view(EXPERTS, COLUMNS, ROWS)),
    "stacked-view": lambda w: w[INDEX].view(2, 2, ROWS, COLUMNS),
    "unsqueeze": lambda w: (w.unsqueeze(0), w[1].unsqueeze(0), w.unsqueeze(1)),
    "squeeze": lambda w: (w[:1].squeeze(), w[1:2].squeeze(0)),
    "expand": lambda w: (w[None].expand(2, -1, -1, -1), w[0].expand(4, -1, -1)),
    "float": lambda w: w.float(),
    "cast-expert": lambda w: (w.float()[1], w.to(torch.float32)[2], w[1].type(torch.float32)),
    "cast-there-and-back": lambda w: w.float().mT.double(),
    "type_as": lambda w: w.type_as(torch.zeros(1)),
    "to-device": lambda w: (w.to(w.device), w.to(w.device, torch.float32)[1], w.to("cpu", non_blocking=True)),
}

#: Products of ``[E, P, Q]`` and a trainable ``[E, T, P]``.
PRODUCTS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "bmm": lambda w, x: (torch.bmm(x, w), x.bmm(w), torch.bmm(x, mat2=w)),
    "matmul": lambda w, x: x @ w,
    "torch.matmul": lambda w, x: (torch.matmul(x, w), x.matmul(w), torch.matmul(input=x, other=w)),
    "__rmatmul__": lambda w, x: w.__rmatmul__(x),
    "from-left": lambda w, x: (w.mT @ x.mT, torch.bmm(w.mT, x.mT)),
    "broadcast": lambda w, x: (x[:, None] @ w[None], x[0] @ w, x @ w[1], x[0] @ w[INDEX]),
    "loop": lambda w, x: torch.stack([x[e] @ w[e] for e in range(EXPERTS)]),
    "transposed-loop": lambda w, x: torch.stack([F.linear(x[e], w.mT[e]) for e in range(EXPERTS)]),
    "iteration": lambda w, x: [x[e] @ expert for e, expert in enumerate(w)],
    "one-expert": lambda w, x: x[0] @ w[1],
    "linear": lambda w, x: torch.stack([F.linear(x[e], w[e].T) for e in range(EXPERTS)]),
    "linear-bias": lambda w, x: F.linear(x[1], weight=w[1].T, bias=x[0, 0, :1].expand(w.shape[2])),
    "linear-3d": lambda w, x: F.linear(x, w[1].T),
    "linear-1d": lambda w, x: F.linear(x[0, 0], w[1].T),
    "selected": lambda w, x: (torch.bmm(x[INDEX], w[INDEX]), w[INDEX].mT @ x[INDEX, 0, :, None]),
    "mm": lambda w, x: (torch.mm(x[0], w[1]), w[1].T.mm(x[0].T)),
    "mv": lambda w, x: (torch.mv(w[1].T, x[0, 0]), w[1].T @ x[0, 0], x[0, 0] @ w[1]),
    "stacked-mv": lambda w, x: (w.mT @ x[0, 0], x[0, 0] @ w),
    "addmm": lambda w, x: torch.addmm(x[0, :, :1], x[1], w[1], beta=0.5, alpha=3),
    "addmm-left": lambda w, x: x[0, :, 0].addmm(w[1].T, x[0].T, alpha=3),
    "baddbmm": lambda w, x: torch.baddbmm(x[..., :1], x, w, beta=2, alpha=0.5),
    "addmv": lambda w, x: torch.addmv(x[0, 0, :1], w[1].T, x[0, 1]),
    "chunks": lambda w, x: [x @ part for part in w.chunk(2, -1)],
    "expert-chunks": lambda w, x: [x[1] @ part for part in w[1].chunk(2, -1)],
    "narrow": lambda w, x: x[..., :9] @ w[:, :9],
}

#: What multiplies the weight out.
DENSE: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "arithmetic": lambda w, x: (2 * w - 1) / (w.square() + 3),
    "norm": lambda w, x: (w.norm(), w.sum((1, 2)), w.abs().amax(-1)),
    "einsum": lambda w, x: torch.einsum("etp,epq->etq", x, w),
    "einsum-2": lambda w, x: torch.einsum("epq,etp->teq", w, x),
    "row": lambda w, x: (w[1, 2], w[:, 3], w[..., 1], w[1, 2, 3], w[0][1]),
    "mask": lambda w, x: (w[MASK], w[w.detach() > 0], w[0][torch.ones(ROWS, dtype=torch.bool)]),
    "bool-list": lambda w, x: w[[True, False, True]],
    "inner-index": lambda w, x: (w[:, INDEX], w[INDEX, INDEX], w.index_select(2, INDEX), w[0][INDEX]),
    "rows-of-one": lambda w, x: list(w[1]),
    "clone": lambda w, x: w.clone().mul_(2),
    "flatten": lambda w, x: (w.flatten(), w.reshape(-1, COLUMNS), w.view(EXPERTS, -1), w.mT.reshape(EXPERTS, -1)),
    "other-permutation": lambda w, x: (w.permute(2, 0, 1), w.transpose(0, 1), w.movedim(0, -1)),
    "cat": lambda w, x: (torch.cat([w, w[:1]]), torch.stack(list(w))),
    "both": lambda w, x: (w[0] @ w[1].T, F.linear(w[0], w[2]), torch.addmm(w[0][:, :1], w[0], w[1].T)),
    "bias": lambda w, x: F.linear(x[0], torch.ones_like(x[0]), w[1, 0, :TOKENS]),
    "softmax": lambda w, x: w.softmax(-1),
    "where": lambda w, x: torch.where(w > 0, w, 0.0),
    "copied-into": lambda w, x: torch.zeros(w.shape, dtype=w.dtype).copy_(w),
    "added-into": lambda w, x: torch.ones_like(x[0, :1, :1]).expand(w.shape).clone().add_(w),
    "addbmm": lambda w, x: torch.addbmm(x[0, :, :1], x, w),
    "tensordot": lambda w, x: torch.tensordot(x[0], w[1], dims=1),
    "multi_dot": lambda w, x: torch.linalg.multi_dot([x[0], w[1]]),
    "conv": lambda w, x: F.conv1d(x[:1].mT, w[1].T[..., None]),
    "embedding": lambda w, x: F.embedding(INDEX, w[1]),
    "cast-copy": lambda w, x: w.to(torch.float64, copy=True),
    "bits": lambda w, x: w.detach().view(torch.int64).shape and w.sum(),
}


class Foreign(torch.autograd.Function):
    """A product by code that autograd does not see into."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad @ weight.mT, x.mT @ grad


DENSE["autograd.Function"] = lambda w, x: Foreign.apply(x, w)


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
@by_base
def test_views(view: Callable[[Tensor], Any], lazy: bool) -> None:
    """A view has the shape, strides and dtype of the dense one; what is computed from it has its gradients."""
    made = case(lazy=lazy)
    parts, expected = tree_leaves(view(made.weight)), tree_leaves(view(made.dense))
    for part, plain in zip(parts, expected, strict=True):
        assert type(part) is LoraWeight
        facts = [(w.shape, w.dtype, w.ndim, w.size(), w.stride(), w.device, w.requires_grad) for w in (part, plain)]
        assert facts[0] == facts[1]
        assert not part.is_leaf
    tolerance = 1e-10
    if view in [VIEWS[n] for n in ("float", "cast-expert", "cast-there-and-back", "type_as", "to-device")]:
        tolerance = 1e-5
    assert_agrees(lambda w, x: [values(part) for part in tree_leaves(view(w))], made, 1, tolerance=tolerance)


@pytest.mark.parametrize("product", PRODUCTS.values(), ids=PRODUCTS)
@pytest.mark.parametrize("transposed", [False, True])
@by_base
def test_products(product: Callable[[Tensor, Tensor], Any], transposed: bool, lazy: bool) -> None:
    """Products, in either orientation, with two terms."""
    made = case(lazy=lazy)
    if transposed:
        made = made._replace(weight=made.weight.mT, dense=made.dense.mT)
    assert_agrees(product, made, EXPERTS, TOKENS, made.dense.shape[1])


#: Products for which torch copies a plain weight, by an index or to fold dimensions.
COPYING = ("broadcast", "selected", "stacked-mv")


@pytest.mark.parametrize("product", [pytest.param(p, id=name) for name, p in PRODUCTS.items() if name not in COPYING])
def test_products_do_not_multiply_out(product: Callable[[Tensor, Tensor], Any]) -> None:
    """No float tensor of an expert's size is made, in forward or backward, and none is saved.

    Of a plain base, because unpacking makes one.
    """
    made = case(lazy=False, terms=1)
    x = inputs(EXPERTS, TOKENS, ROWS)
    base = made.weight._constant.untyped_storage().data_ptr()
    mode = recorded_shapes()
    with mode, recorded_saves() as saved:
        out = product(made.weight, x)
    assert all(t.untyped_storage().data_ptr() == base or t.numel() < ROWS * COLUMNS for t in saved)
    with mode:
        torch.autograd.backward([part.square().sum() for part in tree_leaves(out)])
    assert mode.largest < ROWS * COLUMNS


@pytest.mark.parametrize("product", PRODUCTS.values(), ids=PRODUCTS)
def test_products_save_the_packed_weight(product: Callable[[Tensor, Tensor], Any]) -> None:
    """Of a packed base, nothing but the `LazyWeight` is saved."""
    made = case()
    with recorded_saves() as saved:
        product(made.weight, inputs(EXPERTS, TOKENS, ROWS))
    assert any(type(tensor) is LazyWeight for tensor in saved)
    assert all(t.numel() < ROWS * COLUMNS for t in saved if type(t) is not LazyWeight)


class recorded_shapes(TorchDispatchMode):
    """Size of the largest float tensor with memory of its own that an operation gave inside the block."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if type(t) is Tensor}
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if type(tensor) is Tensor and not tensor.is_meta and tensor.untyped_storage()._cdata not in given:
                self.largest = max(self.largest, tensor.numel())
        return out


def test_the_measure_sees_a_dense_weight() -> None:
    """The control: an operation that multiplies out is seen."""
    made = case(lazy=False)
    with recorded_shapes() as mode:
        (made.weight * 2).sum()
    assert mode.largest == made.dense.numel()


@pytest.mark.parametrize("operation", DENSE.values(), ids=DENSE)
@by_base
def test_other_operations(operation: Callable[[Tensor, Tensor], Any], lazy: bool) -> None:
    """Everything else gives what the dense weight gives, and its gradients."""
    assert_agrees(operation, case(lazy=lazy), EXPERTS, TOKENS, ROWS)


def test_other_operations_save_the_packed_weight() -> None:
    """An operation that multiplies out keeps no dense weight for backward if it reads the weight directly."""
    made = case()
    with recorded_saves() as saved:
        Foreign.apply(inputs(EXPERTS, TOKENS, ROWS), made.weight)
        torch.addbmm(torch.zeros(()).double(), inputs(EXPERTS, TOKENS, ROWS), made.weight)
    assert sum(type(tensor) is LoraWeight for tensor in saved) >= 2
    assert all(t.numel() < ROWS * COLUMNS for t in saved if type(t) is not LoraWeight)


#: Functions of a matrix ``[P, Q]`` and ``[E, T, P]``.
MATRIX: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "linear": lambda w, x: F.linear(x, w.T),
    "linear-own": lambda w, x: F.linear(x[0] @ w, w),
    "matmul": lambda w, x: (x @ w, x[0] @ w, w.mT @ x.mT, x[0, 0] @ w),
    "split": lambda w, x: [x[0] @ part for part in w.split(20, 1)],
    "rows": lambda w, x: x[..., 3:8] @ w[3:8],
    "expert-of-one": lambda w, x: torch.bmm(x, w[None].expand(EXPERTS, -1, -1)),
    "dense": lambda w, x: (w.exp(), w[3], w[INDEX], list(w.T), w.unbind()),
}


@pytest.mark.parametrize("function", MATRIX.values(), ids=MATRIX)
@by_base
def test_a_matrix(function: Callable[[Tensor, Tensor], Any], lazy: bool) -> None:
    """A weight with two dimensions."""
    assert_agrees(function, case(2, lazy), EXPERTS, TOKENS, ROWS)


def _random_step(weight: Tensor, draw: Callable[[int], int]) -> Callable[[Tensor], Tensor]:
    """Some view, index or cast that `weight`'s shape and strides allow; ``draw(n)`` is a number below `n`."""
    dim = draw(weight.ndim)
    size = weight.shape[dim]
    start, step = draw(size), 1 + draw(2)
    index = torch.tensor([draw(size) for _ in range(1 + draw(3))])
    key = (slice(None),) * dim
    choices: list[Callable[[Tensor], Tensor]] = [
        lambda w: w[(*key, slice(start, None, step))],
        lambda w: w[(*key, index)],
        lambda w: w[(..., *[slice(None)] * (w.ndim - dim - 1))],
        lambda w: w[(*key, None)],
        lambda w: w.index_select(dim, index),
        lambda w: w.transpose(0, dim),
        lambda w: w.mT,
        lambda w: w.unsqueeze(dim),
        lambda w: w.squeeze(),
        lambda w: w.chunk(2, dim)[-1],
        lambda w: w.narrow(dim, start, size - start),
        lambda w: w.contiguous(),
        lambda w: w.reshape(1, *w.shape),
        lambda w: w.permute(*range(1, w.ndim), 0),
        lambda w: w.expand(2, *w.shape),
        lambda w: w.unbind(dim)[start],
        lambda w: list(w)[-1],
    ]
    if weight.ndim > 2:
        choices += [lambda w: w.select(dim, start), lambda w: w[0], lambda w: w[(*key, start - size)]]
    return choices[draw(len(choices))]


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_random_chains(data: st.DataObject) -> None:
    """Any chain of views and indices ends in the dense weight's shape, values, product and gradients."""
    made = case()
    weight, dense = made.weight, made.dense
    for _ in range(data.draw(st.integers(1, 6))):
        step = _random_step(dense, lambda n: data.draw(st.integers(0, n - 1)))
        if dense.numel() > 100_000 or not 2 <= step(dense).ndim <= 5:
            break
        weight, dense = step(weight), step(dense)
        assert weight.shape == dense.shape
    made = made._replace(weight=weight, dense=dense)
    assert_agrees(lambda w, x: (x @ w.mT, w @ x.mT, w.sin()), made, 2, dense.shape[-1])


def grouped_products() -> Iterator[Any]:
    """The grouped products that this torch has."""
    for module, name in ((torch, "_grouped_mm"), (F, "grouped_mm")):
        if hasattr(module, name):
            yield pytest.param(getattr(module, name), id=name)


@pytest.mark.parametrize("grouped", list(grouped_products()))
@pytest.mark.parametrize("transposed", [False, True])
@by_base
def test_grouped_product(grouped: Callable[..., Tensor], transposed: bool, lazy: bool) -> None:
    """The product of transformers' grouped experts, of ranks that its alignment does not allow, in factored form."""
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 0.05)):
        made = case(lazy=lazy, dtype=dtype, factor_dtype=torch.float32)
        if transposed:
            made = made._replace(weight=made.weight.mT, dense=made.dense.mT)
        width = made.dense.shape[1]
        assert_agrees(lambda w, x: grouped(x, w, offs=OFFSETS), made, TOKENS, width, tolerance=tolerance)
        if not lazy:
            with recorded_saves() as saved:
                grouped(inputs(TOKENS, width, dtype=dtype), made.weight, offs=OFFSETS)
            big = [t for t in saved if t.numel() >= ROWS * COLUMNS]
            assert all(
                t.untyped_storage().data_ptr() == made.weight._constant.untyped_storage().data_ptr() for t in big
            )


@pytest.mark.parametrize(
    ("dtype", "factor_dtype"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
    ],
    ids=dtype_name,
)
@pytest.mark.parametrize("name", ["bmm", "loop", "linear-bias", "from-left", "einsum", "autograd.Function"])
def test_dtypes(dtype: torch.dtype, factor_dtype: torch.dtype, name: str) -> None:
    """In lower precision, factored and dense form are as close to float64 as that precision allows."""
    function = (PRODUCTS | DENSE)[name]
    low, exact = case(dtype=dtype, factor_dtype=factor_dtype), case()
    found = []
    for weight, factors, x_dtype in ((low.weight, low.factors, dtype), (exact.dense, exact.dense_factors, None)):
        x = inputs(EXPERTS, TOKENS, ROWS, dtype=dtype).detach().to(x_dtype or torch.float64).requires_grad_()
        found.append(results(lambda w, x=x: function(w, x), weight, [x, *factors]))
    tolerance = 1e-5 if dtype == torch.float32 else 0.06
    for actual, expected in zip(*found, strict=True):
        assert (actual.double() - expected).norm() <= tolerance * expected.norm()
    assert [t.dtype for t in found[0][-4:]] == [factor_dtype] * 4
    assert found[0][0].dtype == dtype


@pytest.mark.parametrize("name", ["bmm", "loop", "linear-bias", "einsum", "addmm", "arithmetic"])
def test_autocast(name: str) -> None:
    """Under autocast products run in the dtype and with the rounding that autocast gives the dense weight."""
    made, function = case(dtype=torch.float32), (PRODUCTS | DENSE)[name]
    found = []
    for weight, factors in ((made.weight, made.factors), (made.dense, made.dense_factors)):
        x = inputs(EXPERTS, TOKENS, ROWS, dtype=torch.float32)
        with torch.autocast("cpu", torch.bfloat16):
            found.append(results(lambda w, x=x: function(w, x), weight, [x, *factors]))
    for actual, expected in zip(*found, strict=True):
        assert (actual is None) == (expected is None)
        if expected is not None:
            assert actual.dtype == expected.dtype
            assert (actual.double() - expected.double()).norm() <= 0.03 * expected.double().norm()


def test_experts_share_one_unbinding() -> None:
    """Backward of a loop makes no gradient of the stack's size per expert; experts not taken get zeros."""
    left, right = (inputs(EXPERTS, ROWS, 4), inputs(EXPERTS, 4, COLUMNS))
    weight = lora_weight(torch.zeros(EXPERTS, ROWS, COLUMNS).double(), [Term(left, right, 1.0)])
    x = inputs(TOKENS, ROWS)
    out = x @ weight[0] + x @ weight[2] + x.float().double() @ weight.mT[2].T + x @ weight.double()[0]
    nodes, seen = [out.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            nodes += [parent for parent, _ in node.next_functions]
    names = [node.name() for node in seen]
    assert names.count("UnbindBackward0") == 2
    assert not any("Select" in name or "Slice" in name for name in names)
    out.sum().backward()
    assert left.grad[1].count_nonzero() == right.grad[1].count_nonzero() == 0
    assert left.grad[2].count_nonzero() > 0


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode: Any) -> None:
    """Made or used without gradients, it has the same values; parts taken without gradients have none later."""
    made = case()
    x = inputs(EXPERTS, TOKENS, ROWS).detach()
    for name in ("loop", "bmm", "selected"):
        with mode():
            inside = PRODUCTS[name](made.weight, x)
        expected = PRODUCTS[name](made.dense, x)
        for actual, plain in zip(tree_leaves(inside), tree_leaves(expected), strict=True):
            assert not actual.requires_grad
            torch.testing.assert_close(actual, plain.detach())
    with torch.no_grad():
        weight = case().weight
        part = made.weight[1]
    assert not weight.requires_grad
    assert not (x @ weight).requires_grad
    assert not (x[0] @ part).requires_grad
    assert (x[0] @ made.weight[1]).requires_grad


def test_detach() -> None:
    """Detaching detaches the factors."""
    made = case()
    x = inputs(EXPERTS, TOKENS, ROWS)
    for weight in (made.weight.detach(), made.weight.data, made.weight.detach()[1:], made.weight[:2].detach()[[0, 1]]):
        assert type(weight) is LoraWeight
        assert not weight.requires_grad
        out = x[: weight.shape[0]] @ weight
        assert torch.autograd.grad(out.sum(), [x, *made.factors], allow_unused=True)[1:] == (None,) * 4
    assert not (x.detach()[0] @ made.weight.detach()[0]).requires_grad


def test_a_leaf_that_is_asked_for_its_gradient() -> None:
    """Made to require a gradient of its own, it receives that of the dense weight."""
    made = case()
    gradients = []
    for weight in (made.weight, made.dense):
        leaf = weight.detach().requires_grad_()
        (inputs(EXPERTS, TOKENS, ROWS) @ leaf).square().sum().backward()
        gradients.append(leaf.grad)
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_an_argument_of_a_checkpointed_function(use_reentrant: bool) -> None:
    """Handed to a checkpointed region, which detaches it, it still takes the gradient to the factors."""
    made = case()
    found = []
    for weight, factors in ((made.weight, made.factors), (made.dense, made.dense_factors)):
        x = inputs(EXPERTS, TOKENS, ROWS)
        out = checkpoint(lambda w, y: (y @ w).sin().sum(), weight, x, use_reentrant=use_reentrant)
        found.append(backward(out, [x, *factors]))
    torch.testing.assert_close(*found, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("name", ["loop", "bmm", "selected", "einsum", "autograd.Function"])
@pytest.mark.parametrize("p", [0.0, 0.5])
def test_checkpointing(use_reentrant: bool, name: str, p: float) -> None:
    """A checkpointed region that makes the weight gives the gradients that it gives without checkpointing."""
    function = (PRODUCTS | DENSE)[name]
    if p and name in DENSE:
        return
    stack = PackedStack.from_float(torch.randn(EXPERTS, ROWS, COLUMNS), "nf4", 64, True)
    left, right = inputs(EXPERTS, ROWS, 4), inputs(EXPERTS, 4, COLUMNS)
    dropout = nn.Dropout(p)

    def region(x: Tensor) -> Tensor:
        weight = lora_weight(lazy_weight(stack, torch.float64), [Term(left, right, 2.0, dropout)])
        return sum(part.sin().sum() for part in tree_leaves(function(weight, x)))

    found = []
    for checkpointed in (False, True):
        x = inputs(EXPERTS, TOKENS, ROWS)
        torch.manual_seed(1)
        out = checkpoint(region, x, use_reentrant=use_reentrant) if checkpointed else region(x)
        torch.rand(3)
        found.append(backward(out, [x, left, right]))
    for actual, expected in zip(*found, strict=True):
        assert torch.equal(actual, expected)


def backward(out: Tensor, leaves: list[Tensor]) -> tuple[Tensor, ...]:
    """`out` and the gradients of `leaves`, by ``backward``: reentrant checkpointing knows no ``autograd.grad``."""
    for leaf in leaves:
        leaf.grad = None
    out.backward()
    return (out.detach(), *(leaf.grad for leaf in leaves))


def test_dropout() -> None:
    """Dropout applies to the input of the update alone, drawn once per term and product."""
    dropout = nn.Dropout(0.5)
    made = case(lazy=False, dropout=dropout)
    x = inputs(EXPERTS, TOKENS, ROWS)
    left, right, left2, right2 = made.factors
    base = made.weight._constant
    explicit: dict[str, tuple[Any, Any]] = {
        "bmm": (
            torch.bmm(x, base),
            lambda: sum(s * (dropout(x) @ a @ b) for a, b, s in ((left, right, 2.0), (left2, right2, -0.5))),
        ),
        "linear-3d": (
            x @ base[1],
            lambda: sum(s * (dropout(x) @ a[1] @ b[1]) for a, b, s in ((left, right, 2.0), (left2, right2, -0.5))),
        ),
    }
    for name, (plain, update) in explicit.items():
        torch.manual_seed(3)
        expected = plain + update()
        torch.manual_seed(3)
        actual = tree_leaves(PRODUCTS[name](made.weight, x))[0]
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)
        grads = [torch.autograd.grad(out.sin().sum(), [x, *made.factors]) for out in (actual, expected)]
        torch.testing.assert_close(*grads, rtol=1e-10, atol=1e-10)
        assert not torch.allclose(actual, x @ made.dense if name == "bmm" else x @ made.dense[1])
    dropout.eval()
    torch.testing.assert_close(x @ made.weight, x @ made.dense, rtol=1e-10, atol=1e-10)


def test_dropout_outside_of_a_product_raises() -> None:
    """What dropout cannot be applied to is refused while it is active."""
    made = case(dropout=nn.Dropout(0.1))
    x = inputs(EXPERTS, TOKENS, ROWS)
    for operation in (
        lambda: made.weight * 2,
        lambda: made.weight[1].tolist(),
        lambda: DENSE["einsum"](made.weight, x),
    ):
        with pytest.raises(RuntimeError, match=r"lora_dropout cannot be applied: .*set lora_dropout=0"):
            operation()
    with pytest.raises(RuntimeError, match="lora_dropout"):
        Foreign.apply(x, made.weight).sum().backward()
    assert (x @ made.weight.float().double()[0].mT.contiguous().T).shape == (EXPERTS, TOKENS, COLUMNS)


WRITES: dict[str, Callable[[Tensor], object]] = {
    "setitem": lambda w: w.__setitem__(0, 1.0),
    "expert": lambda w: w[1].copy_(torch.zeros(w.shape[1:])),
    "view": lambda w: w.mT.zero_(),
    "add_": lambda w: w.add_(1),
    "mul_": lambda w: w.__imul__(2),
    "detached": lambda w: w.detach().add_(1),
    "cast": lambda w: w.float().add_(1),
    "data": lambda w: setattr(w, "data", torch.zeros_like(w)),
    "apply_": lambda w: w.apply_(lambda value: value),
    "share_memory_": lambda w: w.share_memory_(),
    "out": lambda w: torch.add(w.detach(), 1, out=w.detach()),
    "out-of-a-product": lambda w: torch.bmm(torch.ones(EXPERTS, ROWS, ROWS).double(), w.detach(), out=w.detach()),
    "foreach": lambda w: torch._foreach_add_([w.detach()], 1.0),
    "init": nn.init.normal_,
    "resize_": lambda w: w.detach().resize_(3),
    "set_": lambda w: w.detach().set_(torch.zeros(3).double()),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_writing_raises(write: Callable[[Tensor], object]) -> None:
    """An in-place operation is refused, not lost; the weight keeps its values."""
    made = case()
    with pytest.raises(RuntimeError, match="would write to a packed weight"):
        write(made.weight)
    torch.testing.assert_close(made.weight + 0, made.dense)


def test_facts_and_text() -> None:
    """Facts, numbers, text and copies."""
    made = case()
    for weight in (made.weight, made.dense):
        assert (len(weight), weight.numel(), weight.ndim, weight.dim()) == (EXPERTS, EXPERTS * ROWS * COLUMNS, 3, 3)
        assert (weight.is_floating_point(), weight.requires_grad, weight.is_leaf) == (True, True, False)
    np.testing.assert_allclose(made.weight[1].detach().numpy(), made.dense[1].detach().numpy())
    np.testing.assert_allclose(made.weight[1].tolist(), made.dense[1].tolist())
    np.testing.assert_allclose(np.asarray(made.weight.detach()), made.dense.detach().numpy())
    assert isinstance(made.weight[0, 0, 0].item(), float)
    assert str(made.weight[0]) == "LoraWeight((64, 128), torch.float64, device=cpu, ranks=[4, 3])"
    assert f"{made.weight}".startswith("LoraWeight")
    assert torch.zeros(1).type_as(made.weight).dtype == torch.zeros(1).to(made.weight).dtype == torch.float64
    with pytest.raises(TypeError, match="save the module's state"):
        pickle.dumps(made.weight)
    with pytest.raises(IndexError):
        made.weight[EXPERTS]
    with pytest.raises(IndexError):
        made.weight[0, 0, 0, 0]
    with pytest.raises((RuntimeError, IndexError)):
        made.weight.narrow(0, 2, 5)


def test_overwritten_factors_raise() -> None:
    """A factor that was written to between forward and backward is not used in silence."""
    for function in (PRODUCTS["bmm"], DENSE["arithmetic"]):
        made = case()
        out = tree_leaves(function(made.weight, inputs(EXPERTS, TOKENS, ROWS)))[0]
        with torch.no_grad():
            made.factors[0].add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


def test_arguments() -> None:
    """No terms give the base; factors that do not fit and a trainable base are refused."""
    base = torch.zeros(EXPERTS, ROWS, COLUMNS)
    left, right = torch.zeros(EXPERTS, ROWS, 4), torch.zeros(EXPERTS, 4, COLUMNS)
    assert lora_weight(base, []) is base
    assert not lora_weight(base, [Term(left, right, 1.0)]).requires_grad
    for factors in ((left.mT, right), (left, right.mT), (left[0], right[0]), (left, right[:, :3])):
        with pytest.raises(ValueError, match="do not fit"):
            lora_weight(base, [Term(*factors, 1.0)])
    with pytest.raises(ValueError, match="freeze"):
        lora_weight(base.requires_grad_(), [Term(left, right, 1.0)])


def test_compiled_code_reads_an_ordinary_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """While torch.compile traces, the weight is multiplied out."""
    made = case(lazy=False)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    dense = lora_weight(made.weight._constant, made.weight._terms)
    assert type(dense) is Tensor
    torch.testing.assert_close(dense, made.dense)
    torch.autograd.grad(dense.sum(), made.factors)


@pytest.mark.parametrize(("ndim", "swapped"), [(3, True), (3, False), (2, False), (2, True)])
def test_terms_of_factors(ndim: int, swapped: bool) -> None:
    """PEFT's layout of the factors, by the definition of its update."""
    experts, rank, dropout = EXPERTS if ndim == 3 else 1, 4, nn.Dropout(0.1)
    lora_A, lora_B = inputs(experts * rank, COLUMNS), inputs(ROWS, rank * experts)
    term = terms_of(LoraFactors(lora_A, lora_B, 0.5, dropout), experts, ndim, swapped)
    update = torch.einsum(
        "ore,eri->eoi" if swapped or ndim == 2 else "ore,eri->eio",
        lora_B.view(ROWS, rank, experts),
        lora_A.view(experts, rank, COLUMNS),
    )
    torch.testing.assert_close(term.left @ term.right, update if ndim == 3 else update[0])
    assert (term.scaling, term.dropout) == (0.5, dropout)
    assert term.left.untyped_storage().data_ptr() in (lora_A.data_ptr(), lora_B.data_ptr())
