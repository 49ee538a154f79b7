"""`hf_qmoe.matmul_4bit` against `bitsandbytes.matmul_4bit` bit for bit, and against float64 where they differ."""

from collections.abc import Iterator

import bitsandbytes
import bitsandbytes.functional as bnb
import pytest
import torch
from bitsandbytes.functional import QuantState
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.utils._pytree import tree_leaves

from hf_qmoe import matmul_4bit
from tests.support.experts import relative_error
from tests.support.oracle import (
    NATIVE_DTYPES,
    assert_same_bits,
    bnb_dequantize,
    bnb_quantize,
    dtype_name,
    recorded_saves,
    storage_params,
)


OUT, IN = 160, 128  # 320 blocks of 64: more than one block of nested scales
LEADING = ((), (7,), (2, 5))

#: Largest error relative to the largest value. A result is rounded once, by half an eps of its dtype, after a sum in
#: float32 of up to 160 products, whose own error (about 1e-6) counts for float32 only.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}

by_format = pytest.mark.parametrize(
    ("quant_type", "nested"), storage_params([(q, d) for q in ("nf4", "fp4") for d in (False, True)])
)
by_dtype = pytest.mark.parametrize("dtype", NATIVE_DTYPES, ids=dtype_name)
by_nesting = pytest.mark.parametrize("nested", [False, True], ids=["plain", "nested"])


def pack(
    quant_type: str = "nf4",
    nested: bool = False,
    dtype: torch.dtype = torch.float32,
    blocksize: int = 64,
    storage: torch.dtype = torch.uint8,
    shape: tuple[int, int] = (OUT, IN),
) -> tuple[Tensor, QuantState]:
    """A random matrix packed by bitsandbytes."""
    return bnb.quantize_4bit(
        torch.randn(shape, dtype=dtype),
        blocksize=blocksize,
        quant_type=quant_type,
        compress_statistics=nested,
        quant_storage=storage,
    )


def unpack(packed: Tensor, state: QuantState, dtype: torch.dtype = torch.float64) -> Tensor:
    """The weight ``[N, K]`` by bitsandbytes, with the state's dtype left as it was."""
    previous = state.dtype
    weight = bnb_dequantize(packed, state, dtype, tuple(state.shape))
    state.dtype = previous
    return weight


def operands(packed: Tensor, state: QuantState) -> dict[str, Tensor]:
    """Every tensor that a packed weight consists of, by name."""
    tensors = {"packed": packed, "absmax": state.absmax, "code": state.code}
    if state.nested:
        tensors |= {"offset": state.offset, "nested_absmax": state.state2.absmax, "nested_code": state.state2.code}
    return tensors


def problems(dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor | None, Tensor]]:
    """Input, bias or none, and gradient of the output, for inputs of one, two and three dimensions."""
    for leading in LEADING:
        for has_bias in (False, True):
            bias = torch.randn(OUT).to(dtype) if has_bias else None
            yield torch.randn(*leading, IN).to(dtype), bias, torch.randn(*leading, OUT).to(dtype)


def leaf(tensor: Tensor | None) -> Tensor | None:
    """A copy to differentiate by."""
    return None if tensor is None else tensor.detach().clone().requires_grad_()


@pytest.mark.parametrize("storage", [torch.uint8, torch.bfloat16], ids=dtype_name)
@pytest.mark.parametrize("blocksize", [64, 128])
@by_dtype
@by_format
def test_forward_has_the_bits_of_bitsandbytes(
    quant_type: str, nested: bool, dtype: torch.dtype, blocksize: int, storage: torch.dtype
) -> None:
    """With and without gradients, with and without a bias, for any number of dimensions, for B and its transpose."""
    packed, state = pack(quant_type, nested, dtype, blocksize, storage)
    for x, bias, _ in problems(dtype):
        expected = bitsandbytes.matmul_4bit(x, packed, state, bias=bias)
        assert expected.shape == (*x.shape[:-1], OUT)
        for b in (packed, packed.t()):
            assert_same_bits(matmul_4bit(x, b, state, bias=bias), expected)
            trained = matmul_4bit(leaf(x), b, state, bias=leaf(bias))
            assert trained.requires_grad
            assert_same_bits(trained.detach(), expected)


@pytest.mark.parametrize("blocksize", [64, 128])
@by_dtype
@by_format
def test_gradient_of_the_input_has_the_bits_of_bitsandbytes(
    quant_type: str, nested: bool, dtype: torch.dtype, blocksize: int
) -> None:
    """Where the weight was quantized from the dtype of A; there bitsandbytes multiplies by the same weight."""
    packed, state = pack(quant_type, nested, dtype, blocksize)
    for x, bias, grad in problems(dtype):
        actual, expected = leaf(x), leaf(x)
        matmul_4bit(actual, packed, state, bias=bias).backward(grad)
        bitsandbytes.matmul_4bit(expected, packed, state, bias=bias).backward(grad)
        assert_same_bits(actual.grad, expected.grad)


@by_dtype
@pytest.mark.parametrize("state_dtype", NATIVE_DTYPES, ids=dtype_name)
@by_format
def test_gradients_against_float64(
    quant_type: str, nested: bool, state_dtype: torch.dtype, dtype: torch.dtype
) -> None:
    """Of A and of the bias, whatever dtype the weight was quantized from: the weight is unpacked in that of A."""
    packed, state = pack(quant_type, nested, state_dtype)
    weight = unpack(packed, state, dtype).double()
    for x, bias, grad in problems(dtype):
        actual, actual_bias = leaf(x), leaf(bias)
        exact, exact_bias = leaf(x.double()), leaf(None if bias is None else bias.double())
        matmul_4bit(actual, packed, state, bias=actual_bias).backward(grad)
        linear(exact, weight, exact_bias).backward(grad.double())
        assert actual.grad.dtype == dtype
        assert relative_error(actual.grad, exact.grad) < TOLERANCE[dtype]
        if bias is not None:
            assert actual_bias.grad.dtype == dtype
            assert relative_error(actual_bias.grad, exact_bias.grad) < TOLERANCE[dtype]


def test_gradient_of_the_bias_alone() -> None:
    """A trainable bias over a frozen input has its gradient, and the input has none."""
    packed, state = pack()
    bias, x, grad = torch.randn(OUT, requires_grad=True), torch.randn(2, 5, IN), torch.randn(2, 5, OUT)
    matmul_4bit(x, packed, state, bias=bias).backward(grad)
    assert relative_error(bias.grad, grad.double().sum((0, 1))) < TOLERANCE[torch.float32]
    assert x.grad is None


@by_dtype
@by_nesting
def test_autocast(nested: bool, dtype: torch.dtype) -> None:
    """Under autocast forward has bitsandbytes' bits and dtype, and the gradient is within bfloat16's rounding."""
    packed, state = pack(nested=nested)
    x, grad = torch.randn(7, IN).to(dtype), torch.randn(7, OUT)
    actual, exact = leaf(x), leaf(x.double())
    with torch.autocast("cpu", torch.bfloat16):
        out = matmul_4bit(actual, packed, state)
        expected = bitsandbytes.matmul_4bit(leaf(x), packed, state)
    assert_same_bits(out.detach(), expected.detach())
    out.backward(grad.to(out.dtype))
    linear(exact, unpack(packed, state)).backward(grad.double())
    assert actual.grad.dtype == dtype
    # The gradient of the output, the weight and the result are each rounded to bfloat16.
    assert relative_error(actual.grad, exact.grad) < 3 * TOLERANCE[torch.bfloat16]


@by_nesting
def test_out_is_written_and_returned(nested: bool) -> None:
    """`out` holds the result with and without gradients, which pass through it."""
    packed, state = pack(nested=nested)
    x, bias = torch.randn(7, IN), torch.randn(OUT)
    expected = bitsandbytes.matmul_4bit(x, packed, state, bias=bias)
    gradients = []
    for requires_grad in (False, True):
        out = torch.full((7, OUT), float("nan"))
        argument = x.clone().requires_grad_(requires_grad)
        assert matmul_4bit(argument, packed, state, out=out, bias=bias) is out
        assert_same_bits(out.detach(), expected)
        for result in (out, matmul_4bit(argument, packed, state, bias=bias)) if requires_grad else ():
            gradients.append(torch.autograd.grad(result.square().sum(), argument)[0])
    assert_same_bits(*gradients)


@pytest.mark.parametrize("shape", [(OUT, IN), (IN, OUT)], ids=["NK", "KN"])
@pytest.mark.parametrize("leading", [(0,), (2, 0)], ids=["0", "2x0"])
@pytest.mark.filterwarnings("ignore:matmul_4bit:DeprecationWarning")
def test_no_tokens(leading: tuple[int, ...], shape: tuple[int, int]) -> None:
    """An empty input gives an empty output in both orientations, and a backward with an empty and a zero gradient."""
    packed, state = pack(shape=shape)
    x, bias = torch.randn(*leading, IN, requires_grad=True), torch.randn(OUT, requires_grad=True)
    with torch.no_grad():
        assert matmul_4bit(x, packed, state, bias=bias).shape == (*leading, OUT)
    out = matmul_4bit(x, packed, state, bias=bias)
    assert out.shape == (*leading, OUT)
    assert out.dtype == x.dtype
    out.sum().backward()
    assert_same_bits(x.grad, torch.zeros(*leading, IN))
    assert_same_bits(bias.grad, torch.zeros(OUT))


@by_dtype
@by_format
def test_weight_quantized_the_other_way_round(quant_type: str, nested: bool, dtype: torch.dtype) -> None:
    """A ``[K, N]`` weight gives bitsandbytes' result and warning, and the right gradients."""
    packed, state = pack(quant_type, nested, dtype, shape=(OUT, IN))
    x, bias, grad = torch.randn(7, OUT).to(dtype), torch.randn(IN).to(dtype), torch.randn(7, IN).to(dtype)
    actual, actual_bias = leaf(x), leaf(bias)
    with pytest.warns(DeprecationWarning, match="quantized"):
        expected = bitsandbytes.matmul_4bit(x, packed, state, bias=bias)
    with pytest.warns(DeprecationWarning, match=rf"quantized as \[K, N\] = \[{OUT}, {IN}\]") as caught:
        out = matmul_4bit(actual, packed, state, bias=actual_bias)
    assert caught[0].filename == __file__
    assert_same_bits(out.detach(), expected)
    out.backward(grad)
    weight = unpack(packed, state, dtype).double()
    assert relative_error(actual.grad, grad.double() @ weight.t()) < TOLERANCE[dtype]
    assert relative_error(actual_bias.grad, grad.double().sum(0)) < TOLERANCE[dtype]


@pytest.mark.parametrize("requires_grad", [False, True], ids=["inference", "training"])
@by_dtype
@pytest.mark.parametrize("columns", [32, 48, 96])
@by_format
def test_rows_that_are_not_whole_blocks(
    quant_type: str, nested: bool, columns: int, dtype: torch.dtype, requires_grad: bool
) -> None:
    """Blocks that cross rows: `F.linear` on the weight that bitsandbytes unpacks as one row, bit for bit."""
    rows = 192  # up to 288 blocks of 64, none of these numbers of columns holds whole ones
    packed, state = bnb_quantize(torch.randn(rows, columns), quant_type, 64, nested)
    weight = bnb_dequantize(packed, state, dtype, (rows, columns))
    state.shape = torch.Size((rows, columns))
    x, bias, grad = torch.randn(7, columns).to(dtype), torch.randn(rows).to(dtype), torch.randn(7, rows).to(dtype)
    argument = x.clone().requires_grad_(requires_grad)
    out = matmul_4bit(argument, packed, state, bias=bias)
    assert_same_bits(out.detach(), linear(x, weight, bias))
    if requires_grad:
        out.backward(grad)
        assert_same_bits(argument.grad, grad @ weight)


@by_dtype
@pytest.mark.parametrize("shape", [(3, 50), (7, 90), (3, 25)], ids=str)
@by_nesting
def test_last_block_that_is_not_full(nested: bool, shape: tuple[int, int], dtype: torch.dtype) -> None:
    """A matrix that is not a whole number of blocks, or of bytes, is unpacked as bitsandbytes unpacks it."""
    packed, state = bnb_quantize(torch.randn(shape), "nf4", 64, nested)
    weight = bnb_dequantize(packed, state, dtype, shape)
    state.shape = torch.Size(shape)
    x, grad = torch.randn(7, shape[1]).to(dtype).requires_grad_(), torch.randn(7, shape[0]).to(dtype)
    out = matmul_4bit(x, packed, state)
    assert_same_bits(out.detach(), linear(x.detach(), weight))
    out.backward(grad)
    assert_same_bits(x.grad, grad @ weight)


@pytest.mark.parametrize("storage", [torch.uint8, torch.bfloat16], ids=dtype_name)
@by_format
def test_what_is_saved_is_the_packed_weight_and_nothing_else(
    quant_type: str, nested: bool, storage: torch.dtype
) -> None:
    """Saved-tensor hooks see every tensor of the weight once, no dequantized weight, and the node hides no tensor.

    bitsandbytes' node holds the state and the bytes out of the hooks' sight.
    """
    packed, state = pack(quant_type, nested, storage=storage)
    x, bias = torch.randn(7, IN, requires_grad=True), torch.randn(OUT, requires_grad=True)
    with recorded_saves() as saved:
        out = matmul_4bit(x, packed, state, bias=bias)
    assert sorted(t.data_ptr() for t in saved) == sorted(t.data_ptr() for t in operands(packed, state).values())
    assert sum(t.nbytes for t in saved) == sum(t.nbytes for t in operands(packed, state).values())
    facts = (int, str, bool, torch.dtype, type(None))
    assert all(isinstance(value, facts) for value in tree_leaves(vars(out.grad_fn)))
    stock = bitsandbytes.matmul_4bit(x, packed, state, bias=bias)
    assert any(isinstance(value, (Tensor, QuantState)) for value in tree_leaves(vars(stock.grad_fn)))


@pytest.mark.parametrize("columns", [IN, 96], ids=["whole-blocks", "uneven-rows"])
@pytest.mark.parametrize(
    ("nested", "name"),
    [(n, name) for n in (False, True) for name in operands(*pack(nested=n))],
    ids=lambda value: value if isinstance(value, str) else ("nested" if value else "plain"),
)
def test_overwriting_any_one_tensor_raises(nested: bool, name: str, columns: int) -> None:
    """A write to the bytes or to a scale between forward and backward is an error, even of the same values."""
    packed, state = pack(nested=nested, shape=(OUT, columns))
    x = torch.randn(7, columns, requires_grad=True)
    out = matmul_4bit(x, packed, state)
    tensor = operands(packed, state)[name]
    tensor.copy_(tensor.clone())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@by_nesting
def test_assigning_to_the_parameters_data(nested: bool) -> None:
    """``weight.data = other`` after forward leaves the gradient that belongs to that forward."""
    packed, state = pack(nested=nested)
    weight = nn.Parameter(packed, requires_grad=False)
    x, grad = torch.randn(7, IN, requires_grad=True), torch.randn(7, OUT)
    out = matmul_4bit(x, weight, state)
    expected = grad @ unpack(packed, state, torch.float32)
    weight.data = torch.randint_like(packed, 256)
    out.backward(grad)
    assert_same_bits(x.grad, expected)


@by_format
def test_double_backward(quant_type: str, nested: bool) -> None:
    """A penalty on the gradient, as ``create_graph=True`` allows it, differentiates as in float64."""
    packed, state = pack(quant_type, nested)
    x, bias = torch.randn(2, 5, IN), torch.randn(OUT)

    def step(x: Tensor, bias: Tensor, out: Tensor) -> list[Tensor]:
        gradients = torch.autograd.grad(out.sin().sum(), (x, bias), create_graph=True)
        return [*gradients, *torch.autograd.grad(sum(g.square().sum() for g in gradients), (x, bias))]

    arguments, exact = (leaf(x), leaf(bias)), (leaf(x.double()), leaf(bias.double()))
    actual = step(*arguments, matmul_4bit(arguments[0], packed, state, bias=arguments[1]))
    expected = step(*exact, linear(exact[0], unpack(packed, state), exact[1]))
    for ours, reference in zip(actual, expected, strict=True):
        assert reference.abs().max() > 0
        # Products and sines one after another; the output, up to 60, goes into the sine with an error of 4e-6.
        assert relative_error(ours, reference) < 2e-5


def test_what_cannot_be_computed_is_refused() -> None:
    """No state, a state that is not a matrix's, and scales in other blocks than 256."""
    packed, state = pack(nested=True)
    x = torch.randn(7, IN)
    with pytest.raises(ValueError, match="quant_state"):
        matmul_4bit(x, packed, None)
    state.state2.blocksize = 128
    with pytest.raises(ValueError, match="blocks of 128 are not supported, only 256"):
        matmul_4bit(x, packed, state)
    packed, state = pack()
    state.shape = torch.Size((2, OUT // 2, IN))
    with pytest.raises(ValueError, match=rf"matrix \[N, K\].*\(2, {OUT // 2}, {IN}\)"):
        matmul_4bit(x, packed, state)


@pytest.mark.parametrize("requires_grad", [False, True], ids=["inference", "training"])
def test_float64_is_refused(requires_grad: bool) -> None:
    """There is no unpacking in float64: bitsandbytes returns memory that nobody wrote, ours raises."""
    packed, state = pack()
    x = torch.randn(7, IN, dtype=torch.float64, requires_grad=requires_grad)
    with pytest.raises((TypeError, ValueError), match="float64"):
        matmul_4bit(x, packed, state)


@pytest.mark.parametrize("shape", [(64, 128), (64, 32), (63, 33)], ids=str)
@by_nesting
@pytest.mark.parametrize("name", ["packed", "absmax", "nested_absmax"])
def test_freed_storage_is_refused(name: str, nested: bool, shape: tuple[int, int]) -> None:
    """bitsandbytes reads memory without asking whether it is there; an offloader or FSDP1 may have freed it."""
    if name == "nested_absmax" and not nested:
        pytest.skip("there is none")
    packed, state = pack(nested=nested, shape=shape)
    operands(packed, state)[name].untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match=r"no memory|out of bounds"):
        matmul_4bit(torch.randn(3, shape[1]), packed, state)
