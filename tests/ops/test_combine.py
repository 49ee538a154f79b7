"""Between tokens and rows: `combine_experts`, `spread_tokens`, `dot_rows` against explicit loops in float64."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from hf_qmoe.ops import combine, native_library
from hf_qmoe.ops.combine import combine_experts, dot_rows, spread_tokens
from hf_qmoe.routing import Routing, route
from tests.support.kernels import instruction_set
from tests.support.oracle import DTYPES, NATIVE_DTYPES, assert_same_bits, dtype_name, poisoned_memory, recorded_saves


E = 5
SIZES = [(7, 3, 150), (4, 1, 16), (1, 8, 33), (0, 2, 8), (3, 2, 0)]
by_size = pytest.mark.parametrize(("tokens", "top_k", "width"), SIZES)
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
ROUNDING = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-24, torch.float64: 2**-53}


@pytest.fixture(params=["torch", *native_library.INSTRUCTION_SETS])
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """torch, and the kernels of each instruction set of this processor, in turn."""
    if request.param == "torch":
        monkeypatch.setattr(combine, "_native", lambda *_: False)
        yield request.param
        return
    with instruction_set(request.param) as name:
        yield name


def routing(tokens: int, top_k: int) -> Routing:
    """A seeded routing, two of seven pairs to experts of other ranks."""
    generator = torch.Generator().manual_seed(tokens)
    return route(torch.randint(0, E + 2, (tokens, top_k), generator=generator), E)


def operands(tokens: int, top_k: int, width: int, *dtypes: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Seeded tokens, rows (NaN where they belong to no expert), weights, and ``inverse``."""
    found, generator = routing(tokens, top_k), torch.Generator().manual_seed(width)
    shapes = ((tokens, width), (tokens * top_k, width), (tokens, top_k))
    dtypes = dtypes * 3 if len(dtypes) == 1 else dtypes
    tensors = [torch.randn(s, generator=generator).to(d) for s, d in zip(shapes, dtypes, strict=True)]
    tensors[1][found.offsets[-1] :] = torch.nan
    return (*tensors, found.inverse.view(tokens, top_k))


def explicit(tokens: Tensor, rows: Tensor, weights: Tensor, inverse: Tensor, owned: int) -> tuple[Tensor, ...]:
    """The definitions, pair by pair."""
    combined, spread, dots = torch.zeros_like(tokens), torch.zeros_like(rows), torch.zeros_like(weights)
    for token, slots in enumerate(inverse.tolist()):
        for slot, row in enumerate(slots):
            if row < owned:
                combined[token] += weights[token, slot] * rows[row]
                spread[row] = weights[token, slot] * tokens[token]
                dots[token, slot] = (tokens[token] * rows[row]).sum()
    return combined, spread, dots


def near(actual: Tensor, exact: Tensor, dtype: torch.dtype, terms: int) -> None:
    """Within one rounding to `dtype` of `exact`, and the roundings of `terms` additions in float32."""
    wide = 2**-24 if dtype != torch.float64 else 2**-53
    largest = exact.abs().max().item() if exact.numel() else 0.0
    assert actual.dtype == dtype
    torch.testing.assert_close(actual.double(), exact, rtol=1.01 * ROUNDING[dtype], atol=4 * terms * wide * largest)


@pytest.mark.parametrize("to", DTYPES, ids=dtype_name)
@by_dtype
@by_size
def test_equals_the_definition(
    implementation: str, tokens: int, top_k: int, width: int, dtype: torch.dtype, to: torch.dtype
) -> None:
    """Each operator, from and to every dtype, of which half the rows of no expert hold NaN."""
    if (dtype == torch.float64) != (to == torch.float64):
        pytest.skip("products of float64 give float64")
    x, rows, weights, inverse = operands(tokens, top_k, width, dtype)
    offsets = routing(tokens, top_k).offsets
    exact = explicit(x.double(), rows.double(), weights.double(), inverse, int(offsets[-1]))
    with poisoned_memory():
        near(combine_experts(rows, weights, inverse, offsets, to), exact[0], to, top_k)
        near(spread_tokens(x, weights, inverse, offsets, to), exact[1], to, 1)
        near(dot_rows(x, rows, inverse, offsets, to), exact[2], to, width)


@pytest.mark.parametrize("dtype", NATIVE_DTYPES, ids=dtype_name)
@by_size
def test_kernels_give_the_bits_of_torch(
    implementation: str, tokens: int, top_k: int, width: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every instruction set, any address; with and without weights, from and to each dtype."""
    x, rows, weights, inverse = operands(tokens, top_k, width, dtype)
    x, rows = (torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape) for t in (x, rows))
    x[:1, :2] = x.new_tensor([[torch.inf, torch.nan]])[:, :width]
    offsets = routing(tokens, top_k).offsets
    for to in NATIVE_DTYPES:
        for factors in (weights, weights.double(), None):
            actual = [f(t, factors, inverse, offsets, to) for f, t in ((combine_experts, rows), (spread_tokens, x))]
            with monkeypatch.context() as patch:
                patch.setattr(combine, "_native", lambda *_: False)
                expected = [
                    f(t, factors, inverse, offsets, to) for f, t in ((combine_experts, rows), (spread_tokens, x))
                ]
            for a, b in zip(actual, expected, strict=True):
                torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", NATIVE_DTYPES, ids=dtype_name)
@pytest.mark.parametrize("top_k", [1, 2, 8, 16])
def test_adds_as_torch_sums(implementation: str, dtype: torch.dtype, top_k: int) -> None:
    """The bits of weighting ``[T, k, H]`` in float32 and summing it, and those of its gradients."""
    x, rows, weights, inverse = operands(9, top_k, 96, dtype)
    offsets = torch.tensor([0, 9 * top_k])
    rows = rows.nan_to_num()

    def plain(rows: Tensor, weights: Tensor) -> Tensor:
        per_token = rows[inverse.flatten()].view(9, top_k, 96)
        return (per_token * weights.float().unsqueeze(-1)).sum(dim=1).to(dtype)

    results = []
    for function in (plain, lambda r, w: combine_experts(r, w, inverse, offsets, dtype)):
        leaves = [t.clone().requires_grad_() for t in (rows, weights)]
        out = function(*leaves)
        results.append((out.detach(), *torch.autograd.grad(out, leaves, x)))
    for expected, actual in zip(*results, strict=True):
        assert_same_bits(actual, expected)


def test_without_offsets_every_row_counts(implementation: str) -> None:
    """Weights of 1 and no offsets: the plain sum, and a plain copy."""
    x, rows, _, inverse = operands(6, 2, 40, torch.float32)
    rows = rows.nan_to_num(2.0)
    expected = rows[inverse.flatten()].view(6, 2, 40).sum(dim=1)
    assert_same_bits(combine_experts(rows, None, inverse, None, torch.float32), expected)
    spread = spread_tokens(x, None, inverse, None, torch.float32)
    assert_same_bits(spread[inverse.flatten()], x.repeat_interleave(2, dim=0))


OPERATORS: dict[str, Callable[..., Tensor]] = {
    "combine": lambda x, rows, weights, *pairs: combine_experts(rows, weights, *pairs, rows.dtype),
    "spread": lambda x, rows, weights, *pairs: spread_tokens(x, weights, *pairs, x.dtype),
    "dot": lambda x, rows, weights, *pairs: dot_rows(x, rows, *pairs, x.dtype),
    "sum": lambda x, rows, weights, *pairs: combine_experts(rows, None, *pairs, rows.dtype),
}


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize(("tokens", "top_k"), [(3, 2), (2, 1), (1, 3)])
def test_first_and_second_derivatives_are_those_of_finite_differences(name: str, tokens: int, top_k: int) -> None:
    """In float64, with rows of no expert."""
    x, rows, weights, inverse = operands(tokens, top_k, 4, torch.float64)
    leaves = [t.requires_grad_() for t in (x, rows.nan_to_num(), weights)]
    offsets = routing(tokens, top_k).offsets

    def function(*leaves: Tensor) -> Tensor:
        return OPERATORS[name](*leaves, inverse, offsets)

    assert torch.autograd.gradcheck(function, leaves)
    assert torch.autograd.gradgradcheck(function, leaves)


def test_gradients_of_mixed_dtypes(implementation: str) -> None:
    """bfloat16 rows, float32 weights and output: each gradient in its own dtype, near the one in float64."""
    dtypes = (torch.float32, torch.bfloat16, torch.float32)
    x, rows, weights, inverse = operands(7, 3, 50, *dtypes)
    offsets = routing(7, 3).offsets
    leaves = [t.requires_grad_() for t in (rows, weights)]
    out = combine_experts(*leaves, inverse, offsets, torch.float32)
    grad_rows, grad_weights = torch.autograd.grad(out, leaves, x)
    _, exact_rows, exact_weights = explicit(
        *(t.detach().double() for t in (x, rows, weights)), inverse, int(offsets[-1])
    )
    near(grad_rows, exact_rows, torch.bfloat16, 1)
    near(grad_weights, exact_weights, torch.float32, 50)
    unowned = inverse >= offsets[-1]
    assert unowned.any()
    assert not grad_weights[unowned].any()
    assert not grad_rows[offsets[-1] :].any()


@pytest.mark.parametrize("trained", ["both", "rows", "weights"])
def test_saves_what_the_wanted_gradients_need(trained: str) -> None:
    """Operands themselves, never a widened copy; rows only for the gradient of the weights."""
    _, rows, weights, inverse = operands(6, 2, 40, torch.bfloat16)
    offsets = routing(6, 2).offsets
    rows.requires_grad_(trained != "weights")
    weights.requires_grad_(trained != "rows")
    with recorded_saves() as saved:
        combine_experts(rows, weights, inverse, offsets, torch.bfloat16)
    expected = [inverse, offsets]
    expected += [rows] if trained != "rows" else []
    expected += [weights] if trained != "weights" else []
    assert sorted(t.data_ptr() for t in saved) == sorted(t.data_ptr() for t in expected)


@pytest.mark.parametrize("name", OPERATORS)
def test_is_a_well_formed_operator(name: str) -> None:
    """Schema, shape function and autograd registration agree (torch's own check)."""
    x, rows, weights, inverse = operands(6, 2, 8, torch.float32)
    x, rows, weights = (t.nan_to_num().requires_grad_() for t in (x, rows, weights))
    offsets = routing(6, 2).offsets
    operator, arguments = {
        "combine": (combine_experts, (rows, weights)),
        "spread": (spread_tokens, (x, weights)),
        "dot": (dot_rows, (x, rows)),
        "sum": (combine_experts, (rows, None)),
    }[name]
    torch.library.opcheck(operator, (*arguments, inverse, offsets, torch.bfloat16))


BAD = {
    "rows": lambda x, r, w, i, o: combine_experts(r[1:], w, i, o, r.dtype),
    "weights": lambda x, r, w, i, o: combine_experts(r, w[:, :1], i, o, r.dtype),
    "tokens": lambda x, r, w, i, o: spread_tokens(x[1:], w, i, o, x.dtype),
    "inverse": lambda x, r, w, i, o: combine_experts(r, w, i.flatten(), o, r.dtype),
    "dtype of inverse": lambda x, r, w, i, o: dot_rows(x, r, i.int(), o, r.dtype),
    "offsets": lambda x, r, w, i, o: dot_rows(x, r, i, o[:, None], r.dtype),
}


@pytest.mark.parametrize("name", BAD)
def test_refuses_what_does_not_belong_together(name: str) -> None:
    """Shapes and dtypes are checked before any memory is read."""
    arguments = operands(6, 2, 8, torch.float32)
    with pytest.raises(RuntimeError, match="must be"):
        BAD[name](*arguments, routing(6, 2).offsets)


@pytest.mark.parametrize("row", [-1, 12])
@pytest.mark.parametrize("operator", [combine_experts, spread_tokens])
def test_refuses_rows_that_do_not_exist(implementation: str, operator: Callable[..., Tensor], row: int) -> None:
    """Kernels read and write no memory but that of the rows."""
    x, rows, weights, inverse = operands(6, 2, 8, torch.float32)
    inverse = inverse.clone()
    inverse[3, 1] = row
    with pytest.raises((ValueError, IndexError, RuntimeError), match=r"inverse|out of"):
        operator(rows if operator is combine_experts else x, weights, inverse, None, torch.float32)
