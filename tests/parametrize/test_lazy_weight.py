"""`LazyWeight` against the plain float tensor it stands for: values, gradients, memory, overwritten weights."""

import copy
import pickle
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.functional import embedding, grouped_mm, linear

from hf_qmoe.lazy_weight import LazyWeight, lazy_weight
from hf_qmoe.ops.torch_ops import release_scratch
from hf_qmoe.packed import PackedStack
from tests.support.heap import live_tensors
from tests.support.oracle import (
    NATIVE_DTYPES,
    assert_same_bits,
    control_weights,
    dtype_name,
    recorded_saves,
    storage_params,
)


EXPERTS, ROWS, COLUMNS, TOKENS = 3, 32, 64, 3
INDEX, MASK = torch.tensor([2, 0, 1, 2]), torch.tensor([True, False, True])
by_storage = pytest.mark.parametrize(
    ("quant_type", "double_quant"), storage_params([("nf4", False), ("nf4", True), ("int8", False), ("bf16", False)])
)
#: ``(dtype, transposed)`` that each operation is tried with.
FORMS = [(dtype, transposed) for dtype in (torch.float32, torch.bfloat16) for transposed in (False, True)]


def packed_and_control(
    quant_type: str = "nf4",
    double_quant: bool = False,
    dtype: torch.dtype = torch.float32,
    transposed: bool = False,
) -> tuple[PackedStack, Tensor]:
    """A random packed stack and the float weight it stands for, by bitsandbytes alone."""
    weights = 0.2 * torch.randn(EXPERTS, ROWS, COLUMNS)
    control = control_weights(weights, quant_type, 64, double_quant, dtype)
    stack = PackedStack.from_float(weights, quant_type, 64, double_quant)
    return stack, control.transpose(1, 2) if transposed else control


def pair(
    quant_type: str = "nf4",
    double_quant: bool = False,
    dtype: torch.dtype = torch.float32,
    transposed: bool = False,
) -> tuple[LazyWeight, Tensor]:
    """A `LazyWeight` and the plain tensor it stands for."""
    stack, control = packed_and_control(quant_type, double_quant, dtype, transposed)
    return lazy_weight(stack, dtype, transposed=transposed), control


def assert_same(actual: object, expected: object) -> None:
    """Same bits, shape, dtype and strides; of sequences, item by item; of other values, equality."""
    if isinstance(expected, Tensor):
        assert isinstance(actual, Tensor)
        assert (actual.shape, actual.stride(), actual.dtype) == (expected.shape, expected.stride(), expected.dtype)
        values = actual.unpack() if isinstance(actual, LazyWeight) else actual
        assert (type(values), values.stride()) == (Tensor, expected.stride())
        assert_same_bits(values, expected)
    elif isinstance(expected, list | tuple):
        assert len(actual) == len(expected)
        for item, expected_item in zip(actual, expected, strict=True):
            assert_same(item, expected_item)
    else:
        assert actual == expected


#: What selects, views or casts: another `LazyWeight`, nothing is unpacked.
NOTED: dict[str, Callable[[Tensor], Any]] = {
    "int": lambda w: w[1],
    "negative": lambda w: w[-1],
    "two-ints": lambda w: w[2, 3],
    "0-dim": lambda w: w[torch.tensor(1)],
    "slice": lambda w: w[1:],
    "slice-to-end": lambda w: w[-2:99],
    "empty-slice": lambda w: w[2:2],
    "step": lambda w: w[::2],
    "inner-slice": lambda w: w[1, 4:20:3],
    "ellipsis": lambda w: w[..., 3],
    "none": lambda w: w[:, None],
    "index": lambda w: w[INDEX],
    "int32-index": lambda w: w[INDEX.int()],
    "index-matrix": lambda w: w[INDEX.view(2, 2)],
    "index-pair": lambda w: w[INDEX, INDEX],
    "inner-index": lambda w: w[:, INDEX],
    "list": lambda w: w[[2, 0]],
    "index_select": lambda w: w.index_select(2, INDEX),
    "select": lambda w: w.select(1, -1),
    "narrow": lambda w: w.narrow(0, 1, 2),
    "chunk": lambda w: w.chunk(2, -1),
    "uneven-chunk": lambda w: w.chunk(2, 0),
    "split": lambda w: w.split([5, w.shape[1] - 5], 1),
    "tensor_split": lambda w: w.tensor_split(3, -1),
    "unbind": lambda w: w.unbind(),
    "iteration": lambda w: list(w),
    "mT": lambda w: w.mT,
    "T": lambda w: w[0].T,
    "t": lambda w: w[1].t(),
    "permute": lambda w: w.permute(2, 0, 1),
    "movedim": lambda w: w.movedim(0, -1),
    "view": lambda w: w.view(EXPERTS, w.shape[1], 2, -1) if w.is_contiguous() else w.mT.view(EXPERTS, -1),
    "view_as": lambda w: w.view_as(w),
    "flatten-experts": lambda w: w.flatten(0, 1) if w.is_contiguous() else w.mT.flatten(0, 1),
    "unflatten": lambda w: w.unflatten(1, (-1, 4)),
    "squeeze": lambda w: (w[:1].squeeze(), w[:1].squeeze(0), w[:1, :1].squeeze((0, 1))),
    "expand": lambda w: w[None].expand(2, -1, -1, -1),
    "contiguous": lambda w: (w[0].contiguous(), w.mT.contiguous(), w.mT.flatten()),
    "detach": lambda w: w.detach(),
    "float": lambda w: w.float(),
    "half": lambda w: w.half(),
    "double": lambda w: w[0].double(),
    "casts-there-and-back": lambda w: w.bfloat16().mT.float(),
    "to-device-and-dtype": lambda w: w.to(w.device, torch.float16),
    "type_as": lambda w: w.type_as(torch.zeros(1, dtype=torch.float16)),
    "cast-of-a-slice": lambda w: w[:, :8].to(torch.float16).flatten(),
}

#: What computes: an ordinary tensor, or a number.
COMPUTED: dict[str, Callable[[Tensor], Any]] = {
    "mask": lambda w: w[MASK],
    "mask-of-values": lambda w: w[w > 0],
    "clone": lambda w: w.clone(),
    "written-clone": lambda w: w.clone().mul_(2),
    "reshape": lambda w: w.reshape(-1) + 0,
    "cpu": lambda w: w.cpu() + 0,
    "gather": lambda w: w.gather(1, torch.zeros(1, 2, 3, dtype=torch.int64)),
    "take_along_dim": lambda w: w.take_along_dim(INDEX.view(-1, 1, 1) % 2, 0),
    "cat": lambda w: torch.cat([w[:1], w, torch.zeros_like(w)]),
    "stack": lambda w: torch.stack([w[2], w[0]]),
    "repeat": lambda w: w.repeat(2, 1, 1),
    "roll": lambda w: w.roll(1, 0),
    "diagonal": lambda w: w.diagonal(0, 1, 2) + 0,
    "as_strided": lambda w: w.as_strided((2, 2), (1, 2), 3) + 0,
    "bits": lambda w: (w if w.is_contiguous() else w.mT).view(torch.int16) + 0,
    "arithmetic": lambda w: (2 * w - 1) / (w + 3) - w**2,
    "comparison": lambda w: ((w > 0).sum().item(), torch.equal(w, w), torch.allclose(w, -w), bool((w != 0).any())),
    "reductions": lambda w: (w.sum((1, 2)), w.mean(), w.abs().amax(-1), w.norm(), w.std(), w.max(0).indices),
    "lists": lambda w: (w[0].tolist(), w[1].numpy().tolist(), np.asarray(w[2]).tolist()),
    "text": lambda w: f"{w[0, 1, 2]:.5f}",
    "dlpack": lambda w: torch.from_dlpack(w) + 0,
    "numbers": lambda w: (w.sum().item(), float(w[0, 1, 2]), w[2, -1, -1].item(), int(w[0, 0, 0] * 9)),
    "where": lambda w: torch.where(w > 0, w, 0.0),
    "masked_fill": lambda w: w.masked_fill(w > 0, 0.0),
    "index_fill": lambda w: w.index_fill(0, INDEX[:2], 1.0),
    "slice_scatter": lambda w: w.slice_scatter(torch.ones_like(w[:, :2]), 1, 0, 2),
    "embedding": lambda w: embedding(INDEX, w[1]),
    "copied-into": lambda w: torch.zeros(w.shape, dtype=w.dtype).copy_(w),
    "added-into": lambda w: torch.ones(4, *w.shape[1:], dtype=w.dtype).index_add_(0, INDEX[:3], w),
    "vmap": lambda w: torch.func.vmap(lambda expert: expert.exp())(w),
    "facts": lambda w: (len(w), w.shape, w.stride(), w.numel(), w.ndim, w.dtype, w.device, w.is_contiguous()),
    "more-facts": lambda w: (w.nbytes, w.requires_grad, w.is_leaf, w.grad, w.storage_offset(), w[1, 2:].size(0)),
    "packed-anew": lambda w: PackedStack.from_float(w, "int8", 64).packed,
}


@pytest.mark.parametrize("operation", NOTED.values(), ids=NOTED)
@by_storage
def test_noted_operations(quant_type: str, double_quant: bool, operation: Callable[[Tensor], Any]) -> None:
    """Taking, viewing and casting give lazy results with the bits, shape and strides of the plain tensor."""
    for form in FORMS:
        weight, plain = pair(quant_type, double_quant, *form)
        result = operation(weight)
        parts = result if isinstance(result, list | tuple) else [result]
        assert all(type(part) is LazyWeight for part in parts)
        assert_same(result, operation(plain))
        assert_same(weight, plain)


@pytest.mark.parametrize("operation", COMPUTED.values(), ids=COMPUTED)
def test_computed_operations(operation: Callable[[Tensor], Any]) -> None:
    """Whatever else code does to a weight gives ordinary results with the bits of the plain tensor's."""
    for form in FORMS:
        if operation is COMPUTED["lists"] and form[0] == torch.bfloat16:
            continue  # not a dtype of numpy
        weight, plain = pair("nf4", True, *form)
        result = operation(weight)
        assert type(result) is not LazyWeight
        assert_same(result, operation(plain))


@pytest.mark.parametrize("dtype", NATIVE_DTYPES, ids=dtype_name)
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.float64], ids=dtype_name)
@pytest.mark.parametrize(("quant_type", "double_quant"), storage_params())
def test_casts_round_once_as_the_float_weight_does(
    quant_type: str, double_quant: bool, source: torch.dtype, dtype: torch.dtype
) -> None:
    """A cast that is done while unpacking, or behind a view or an index, gives the bits of unpacking first."""
    weight, plain = pair(quant_type, double_quant, source)
    for operation in (lambda w: w.to(dtype), lambda w: w[1, 2:].T.to(dtype), lambda w: w[INDEX].to(dtype).double()):
        assert_same(operation(weight), operation(plain))


class Saving(torch.autograd.Function):
    """A product that saves the weight, as code beside `torch` does, and its own output."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        out = (x @ weight).sigmoid()
        ctx.save_for_backward(weight, out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        weight, out = ctx.saved_tensors
        return grad * out * (1 - out) @ weight.mT, None


#: Products of a weight ``[E, A, B]`` and trainable ``[E, T, A]``.
PRODUCTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "bmm": lambda w, x: torch.bmm(x, w),
    "matmul": lambda w, x: x @ w,
    "matmul-from-left": lambda w, x: w.mT @ x.mT,
    "broadcast": lambda w, x: x[:, None] @ w[None],
    "loop": lambda w, x: torch.stack([x[e] @ w[e] for e in range(EXPERTS)]),
    "linear": lambda w, x: torch.stack([linear(x[e], w[e].T) for e in range(EXPERTS)]),
    "linear-bias": lambda w, x: linear(x, w[0].T, x[0, 0, 0] * torch.ones(w.shape[2], dtype=x.dtype)),
    "linear-3d": lambda w, x: linear(x, w[2].mT),
    "einsum": lambda w, x: torch.einsum("eti,eio->teo", x, w),
    "baddbmm": lambda w, x: torch.baddbmm(x[:, :, :1], x, w, beta=2.0),
    "addbmm": lambda w, x: torch.addbmm(x[0, :, :1], x, w),
    "addmm": lambda w, x: torch.addmm(x[0, :, :1], x[0], w[0]),
    "mv": lambda w, x: torch.mv(w[0].T, x[0, 0]),
    "addmv": lambda w, x: torch.addmv(x[0, 0, :1], w[0].T, x[0, 0]),
    "dot": lambda w, x: torch.dot(w[1, :, 3], x[0, 0]),
    "inner": lambda w, x: torch.inner(x[0], w[0].T),
    "outer": lambda w, x: torch.outer(w[0, 0], x[0, 0]),
    "multi_dot": lambda w, x: torch.linalg.multi_dot([x[0], w[0], w[1].T]),
    "conv1d": lambda w, x: torch.conv1d(x.mT, w[0].T[..., None]),
    "vmap": lambda w, x: torch.func.vmap(torch.mm)(x, w),
    "index": lambda w, x: torch.bmm(x[INDEX % 2], w[INDEX]),
    "per-token": lambda w, x: (x[INDEX, 0].unsqueeze(1) @ w[INDEX]).squeeze(1),
    "list": lambda w, x: x[:2] @ w[[2, 0]],
    "mask": lambda w, x: x[MASK] @ w[MASK],
    "chunk": lambda w, x: torch.sigmoid(x @ w.chunk(2, -1)[0]) * (x @ w.chunk(2, -1)[1]),
    "strided": lambda w, x: torch.sigmoid(x @ w[..., ::2]) * (x @ w[..., 1::2]),
    "double": lambda w, x: x.double() @ w.double(),
    "cast-down": lambda w, x: x.bfloat16() @ w.to(torch.bfloat16),
    "clone": lambda w, x: x @ w.clone().detach(),
    "twice": lambda w, x: x @ w @ w.mT,
    "changed-weight": lambda w, x: x @ (2 * w + x.sum()),
    "elementwise": lambda w, x: (x.unsqueeze(-1) * w[:, None]).sum(2),
    "saved-output": lambda w, x: x @ w.exp() + (x @ w).softmax(-1),
    "norm": lambda w, x: torch.rms_norm(x, x.shape[-1:], w[0, :, 0]),
    "into-a-buffer": lambda w, x: (x @ w).index_add(0, INDEX[:3], (x @ w).tanh()),
    "custom-function": lambda w, x: Saving.apply(x, w),
}


def product_and_gradients(product: Callable[[Tensor, Tensor], Tensor], weight: Tensor, x: Tensor) -> list[Tensor]:
    """The product, its gradient to `x`, and the gradient of a function of that one (double backward)."""
    x = x.clone().requires_grad_()
    out = product(weight, x)
    (grad,) = torch.autograd.grad((out * out).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(grad.square().sum(), x)
    return [out.detach(), grad.detach(), second]


@pytest.mark.parametrize("product", PRODUCTS.values(), ids=PRODUCTS)
@by_storage
def test_products(quant_type: str, double_quant: bool, product: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Results, gradients and second gradients have the bits of the plain tensor's."""
    for form in FORMS:
        weight, plain = pair(quant_type, double_quant, *form)
        x = torch.randn(EXPERTS, TOKENS, weight.shape[1], dtype=form[0])
        expected = product_and_gradients(product, plain, x)
        assert expected[1].abs().sum() > 0
        assert_same(product_and_gradients(product, weight, x), expected)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("made", ["inside", "outside", "used-outside"])
def test_without_gradients(mode: type[AbstractContextManager], made: str) -> None:
    """A weight made inside or outside of `no_grad` and `inference_mode` works in the other place too."""
    stack, plain = packed_and_control("nf4", True)
    x = torch.randn(EXPERTS, TOKENS, COLUMNS)
    with mode() if made != "outside" else nullcontext():
        weight = lazy_weight(stack, torch.float32)
    with mode() if made != "used-outside" else nullcontext():
        assert_same(x @ weight.mT, x @ plain.mT)
        assert_same([linear(x, expert) for expert in weight], [linear(x, expert) for expert in plain])
        assert_same(x[INDEX % 3] @ weight[INDEX, 1:].mT, x[INDEX % 3] @ plain[INDEX, 1:].mT)


def test_grouped_mm() -> None:
    """The product that transformers' grouped experts use, forward and gradient, in either orientation."""
    offsets = torch.tensor([2, 2, TOKENS], dtype=torch.int32)
    for transposed in (False, True):
        weight, plain = pair("nf4", True, torch.bfloat16, transposed)
        weight, plain = (weight, plain) if transposed else (weight.mT, plain.mT)
        results = []
        for values in (weight, plain):
            x = torch.linspace(-1, 1, TOKENS * COLUMNS, dtype=torch.bfloat16).view(TOKENS, COLUMNS).requires_grad_()
            out = grouped_mm(x, values, offs=offsets)
            results.append([out.detach(), *torch.autograd.grad(out.square().sum(), x)])
        assert_same(*results)


def _random_step(weight: Tensor, draw: Callable[[int], int]) -> Callable[[Tensor], Tensor]:
    """Some operation that `weight`'s shape and strides allow; ``draw(n)`` is a number below `n`."""
    dim = draw(weight.ndim)
    size = weight.shape[dim]
    start, step = draw(size), 1 + draw(2)
    index = torch.tensor([draw(size) for _ in range(1 + draw(3))])
    key = (slice(None),) * dim
    choices: list[Callable[[Tensor], Tensor]] = [
        lambda w: w[(*key, slice(start, None, step))],
        lambda w: w[(*key, index)],
        lambda w: w.index_select(dim, index),
        lambda w: w.transpose(0, dim),
        lambda w: w.unsqueeze(dim),
        lambda w: w.to((torch.float32, torch.bfloat16, torch.float64, torch.float16)[start % 4]),
        lambda w: w.chunk(2, dim)[-1],
        lambda w: w.clone(),
        lambda w: w.flatten(dim),
        lambda w: w.permute(*range(1, w.ndim), 0),
        lambda w: w.expand(2, *w.shape),
    ]
    if weight.ndim > 2:
        choices += [lambda w: w.select(dim, start), lambda w: w.select(dim, start - size)]
    return choices[draw(len(choices))]


@settings(max_examples=150, deadline=None)
@given(data=st.data(), transposed=st.booleans(), quant_type=st.sampled_from(["nf4", "fp8", "bf16"]))
def test_random_chains(data: st.DataObject, transposed: bool, quant_type: str) -> None:
    """Any chain of views, indices and casts ends in the plain tensor's geometry, values, product and gradient."""
    torch.manual_seed(0)
    weight, plain = pair(quant_type, transposed=transposed)
    for _ in range(data.draw(st.integers(1, 6))):
        step = _random_step(plain, lambda n: data.draw(st.integers(0, n - 1)))
        if plain.numel() > 30_000 or plain.ndim > 5:
            break
        weight, plain = step(weight), step(plain)
    assert_same(weight, plain)
    results = []
    for values in (weight, plain):
        x = torch.linspace(-1, 1, 2 * plain.shape[-1], dtype=plain.dtype).view(2, -1).requires_grad_()
        out = x @ values.mT if plain.ndim > 1 else x @ values
        results.append([out.detach(), *torch.autograd.grad(out.sum(), x)])
    assert_same(*results)


@pytest.mark.parametrize("index", [[2, 0], [1]])
@pytest.mark.parametrize("dim", range(4))
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (1, 2, 3, 0), (3, 0, 2, 1), (2, 1, 0, 3)])
@pytest.mark.parametrize("ones", range(4))
def test_an_index_among_dimensions_of_one(ones: int, order: tuple[int, ...], dim: int, index: list[int]) -> None:
    """Strides are those of the plain tensor also where torch's shape computation gives others."""
    weight, plain = (t.unsqueeze(ones).permute(order) for t in pair("nf4"))
    key = (*(slice(None),) * dim, torch.tensor(index) if plain.shape[dim] > 1 else torch.zeros(len(index), dtype=int))
    assert_same(weight[key], plain[key])


AUTOCAST = ("bmm", "matmul", "loop", "linear", "linear-bias", "linear-3d", "einsum", "baddbmm", "addmm", "mv", "index")


@pytest.mark.parametrize("product", [PRODUCTS[name] for name in (*AUTOCAST, "chunk", "norm", "twice")])
@by_storage
def test_autocast(quant_type: str, double_quant: bool, product: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Under autocast a float32 weight is cast as a plain one, in forward and gradient, with its cache and without."""
    for transposed in (False, True):
        weight, plain = pair(quant_type, double_quant, transposed=transposed)
        x = torch.randn(EXPERTS, TOKENS, weight.shape[1])
        for cached in (True, False):
            results = []
            for values in (weight, plain):
                leaf = x.clone().requires_grad_()
                with torch.autocast("cpu", torch.bfloat16, cache_enabled=cached):
                    out = product(values, leaf) + product(values, leaf)
                results.append([out.detach(), *torch.autograd.grad(out.float().square().sum(), leaf)])
            assert_same(*results)


WRITES: dict[str, Callable[[Tensor], object]] = {
    "setitem": lambda w: w.__setitem__(0, 1.0),
    "expert": lambda w: w[1].copy_(torch.zeros(w.shape[1:])),
    "view": lambda w: w.mT.zero_(),
    "masked": lambda w: w.masked_fill_(w > 0, 0.0),
    "add_": lambda w: w.add_(1),
    "mul_": lambda w: w.__imul__(2),
    "detached": lambda w: w.detach().add_(1),
    "cast": lambda w: w.double().add_(1),
    "data": lambda w: setattr(w, "data", torch.zeros_like(w)),
    "apply_": lambda w: w.apply_(lambda value: value),
    "share_memory_": lambda w: w.share_memory_(),
    "out": lambda w: torch.add(w, 1, out=w),
    "out-of-a-product": lambda w: torch.bmm(torch.ones(EXPERTS, w.shape[1], w.shape[1]), w, out=w),
    "foreach": lambda w: torch._foreach_add_([w], 1.0),
    "init": nn.init.normal_,
    "resize_": lambda w: w.resize_(3),
    "out-resized": lambda w: torch.cat([torch.ones(2), torch.ones(3)], out=w),
    "set_": lambda w: w.set_(torch.zeros(3)),
    "index_add_": lambda w: w.index_add_(0, INDEX[:1], torch.ones(1, *w.shape[1:])),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_writing_raises(write: Callable[[Tensor], object]) -> None:
    """An in-place operation is refused, not lost; the weight keeps its values."""
    weight, plain = pair()
    with pytest.raises(RuntimeError, match=r"packed weight|LazyWeight"):
        write(weight)
    assert_same(weight, plain)


def test_copies_and_text() -> None:
    """A deep copy has the same values, printing says what it is, pickling says what to do instead."""
    weight, plain = pair("int8")
    assert_same(copy.deepcopy({"weight": weight[1]})["weight"], plain[1])
    assert "quant_type=int8" in repr(weight)
    assert "quant_type=int8" in str(weight[0].mT)
    with pytest.raises(TypeError, match="save the module's state"):
        pickle.dumps(weight)


def test_a_leaf_that_is_asked_for_its_gradient() -> None:
    """Made to require a gradient, it receives that of the plain tensor, through functions that save their output."""
    gradients = []
    for values in pair():
        leaf = values.detach().requires_grad_()
        (leaf[1].exp() * leaf[0].sigmoid()).sum().backward()
        gradients.append(leaf.grad)
    assert_same(*gradients)


#: What models do between reading a weight ``[E, A, B]`` and multiplying it with ``[E, T, A]``.
PATHS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    name: PRODUCTS[name] for name in ("loop", "linear-bias", "bmm", "einsum", "chunk", "strided", "index", "cast-down")
} | {
    "grouped_mm": lambda w, x: grouped_mm(x[0], w, offs=torch.tensor([2, 2, TOKENS], dtype=torch.int32)),
    "to": lambda w, x: x.bfloat16() @ w[1].to(x.device, torch.bfloat16),
    "unbind": lambda w, x: sum(x[0] @ expert.contiguous() for expert in w),
}


@contextmanager
def unpacked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, StorageWeakRef]]]:
    """Size of, and weak reference to the memory of, everything that is unpacked inside the block."""
    seen: list[tuple[int, StorageWeakRef]] = []
    unpack = LazyWeight.unpack

    def recorded(self: LazyWeight, *args: Any, **kwargs: Any) -> Tensor:
        values = unpack(self, *args, **kwargs)
        seen.append((values.numel(), StorageWeakRef(values.untyped_storage())))
        return values

    with monkeypatch.context() as patch:
        patch.setattr(LazyWeight, "unpack", recorded)
        yield seen


def large_floats() -> int:
    """Number of live ordinary float tensors of half an expert or more, that Python knows."""
    found = [t for t in live_tensors() if type(t) in (Tensor, nn.Parameter) and not t.is_meta]
    return sum(t.is_floating_point() and t.numel() >= ROWS * COLUMNS // 2 for t in found)


@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)
def test_no_dequantized_weight_is_alive_between_forward_and_backward(
    path: Callable[[Tensor, Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its memory is free after forward, what autograd saves of its size is lazy, and backward frees it again."""
    for dtype, transposed in FORMS:
        if path is PATHS["grouped_mm"] and dtype != torch.bfloat16:
            continue
        weight, _ = pair("nf4", True, dtype, transposed)
        x = torch.randn(EXPERTS, TOKENS, weight.shape[1], dtype=dtype, requires_grad=True)
        before = large_floats()
        with unpacked(monkeypatch) as seen:
            with recorded_saves() as saved:
                out = path(weight, x)
            release_scratch()
            assert seen
            assert all(memory.expired() for _, memory in seen)
            assert any(type(tensor) is LazyWeight for tensor in saved)
            assert all(t.numel() < ROWS * COLUMNS // 2 for t in saved if type(t) is not LazyWeight)
            assert large_floats() <= before
            out.square().sum().backward()
            release_scratch()
            assert all(memory.expired() for _, memory in seen)
            if path in (PATHS["loop"], PATHS["to"], PATHS["unbind"]):
                assert max(size for size, _ in seen) == ROWS * COLUMNS


def test_the_measure_sees_a_plain_weight() -> None:
    """The control: of a weight that is dequantized first, the memory is alive until backward."""
    stack, _ = packed_and_control()
    x = torch.randn(EXPERTS, TOKENS, COLUMNS, requires_grad=True)
    values = stack.dequantize(torch.float32)
    memory = StorageWeakRef(values.untyped_storage())
    with recorded_saves() as saved:
        out = x @ values.mT
    del values
    assert any(t.numel() >= ROWS * COLUMNS for t in saved)
    saved.clear()
    assert not memory.expired()
    out.sum().backward()
    assert memory.expired()


@pytest.mark.parametrize("path", [PATHS[name] for name in ("loop", "bmm", "index", "cast-down", "chunk")])
@pytest.mark.parametrize("tensor", ["packed", "absmax", "nested_absmax", "nested_offset"])
def test_overwriting_between_forward_and_backward_raises(path: Callable[..., Tensor], tensor: str) -> None:
    """Packed bytes and scales that were written to since forward are not used in silence."""
    stack, _ = packed_and_control("nf4", True)
    stored = stack.tensors()
    for index in (torch.tensor([2, 1, 0]), None):
        x = torch.randn(EXPERTS, TOKENS, COLUMNS, requires_grad=True)
        weight = lazy_weight(stack, torch.float32).mT
        out = path(weight if index is None else weight[index], x)
        stored[tensor].copy_(stored[tensor].clone())  # the same values: it is the writing that counts
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_an_index_may_be_overwritten(mode: type[AbstractContextManager[None]]) -> None:
    """Indexing a float weight reads it at once: an index that changes later, even unseen by torch, changes nothing."""
    for weight in pair():
        with mode():
            values = np.array([2, 1])
            index, foreign = torch.tensor([0, 1]), torch.from_numpy(values)
            expected = weight[index] + 0, weight.index_select(0, foreign) + 0
            parts = weight[index], weight.index_select(0, foreign)
            index.fill_(2)
            values[:] = 0
            for part, value in zip(parts, expected, strict=True):
                assert_same_bits(part + 0, value)


def test_an_integer_factor_is_refused_as_by_a_float_weight() -> None:
    """The weight follows another float dtype, never an integer one."""
    for weight in pair():
        with pytest.raises(RuntimeError, match="dtype"):
            torch.ones(2, weight.shape[1], dtype=torch.long) @ weight[0]


@pytest.mark.parametrize("whole", [False, True], ids=["by-expert", "whole"])
def test_assigning_data_between_forward_and_backward(whole: bool) -> None:
    """As with any parameter, ``parameter.data = other`` leaves the gradient that of the weight forward used."""
    stack, plain = packed_and_control("nf4", True)
    parameters = {name: nn.Parameter(t, requires_grad=False) for name, t in stack.tensors().items()}
    weight = lazy_weight(replace(stack, **parameters), torch.float32)
    x = torch.randn(EXPERTS, TOKENS, COLUMNS, requires_grad=True)
    out = torch.bmm(x, weight.mT) if whole else torch.stack([linear(x[e], weight[e]) for e in range(EXPERTS)])
    for parameter in parameters.values():
        parameter.data = torch.zeros_like(parameter)
    (grad,) = torch.autograd.grad(out.sum(), x)
    assert_same_bits(grad, torch.autograd.grad((x @ plain.mT).sum(), x)[0])


def test_threads() -> None:
    """Threads that use weights of one size at once do not see each other's values."""
    jobs = [(pair(), torch.randn(TOKENS, COLUMNS)) for _ in range(3)]
    start, wrong = threading.Barrier(len(jobs)), []

    def work(weight: Tensor, plain: Tensor, x: Tensor) -> None:
        start.wait()
        for step in range(150):
            results = []
            for values in (weight, plain):
                leaf = x.clone().requires_grad_()
                out = linear(leaf, values[step % EXPERTS])
                results.append(torch.autograd.grad(out.square().sum(), leaf)[0])
            if not torch.equal(*results):
                wrong.append(step)

    threads = [threading.Thread(target=work, args=(*weights, x)) for weights, x in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
