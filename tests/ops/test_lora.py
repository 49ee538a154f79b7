"""`add_expert_lora` against an explicit loop in float64, in every dtype, for every kind of routing."""

from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from hf_qmoe.factors import split_lora_A, split_lora_B
from hf_qmoe.ops import native_library, native_lora
from hf_qmoe.ops.lora import add_expert_lora
from tests.support.kernels import instruction_set
from tests.support.oracle import DTYPES, NATIVE_DTYPES, dtype_name, offsets_of, poisoned_memory


E, N, K, R, SCALING = 5, 24, 16, 3, 0.7

#: Rows per expert: unhit experts, all on one, none at all, few of many (another way to read ``lora_B``).
ROUTINGS = {"some": (3, 0, 2, 4, 0), "all": (1, 2, 1, 3, 2), "one": (0, 0, 0, 0, 6), "none": (0, 0, 0, 0, 0)}


def operands(dtype: torch.dtype, rows: int, factor_dtype: torch.dtype | None = None) -> tuple[Tensor, ...]:
    """Seeded ``rows``, ``x``, ``lora_A``, ``lora_B`` that ask for gradients."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((rows, N), (rows, K), (E * R, K), (N, R * E))
    dtypes = (dtype, dtype, factor_dtype or dtype, factor_dtype or dtype)
    tensors = [torch.randn(s, generator=generator).to(d) for s, d in zip(shapes, dtypes, strict=True)]
    return tuple(tensor.requires_grad_() for tensor in tensors)


def explicit(rows: Tensor, x: Tensor, lora_A: Tensor, lora_B: Tensor, offsets: Tensor) -> Tensor:
    """The definition, element by element of PEFT's layouts."""
    out = []
    for expert in range(E):
        own = slice(offsets[expert], offsets[expert + 1])
        down = torch.stack([lora_A[expert * R + rank] for rank in range(R)])
        up = torch.stack([lora_B[:, rank * E + expert] for rank in range(R)], dim=1)
        out.append(rows[own] + SCALING * (x[own] @ down.t()) @ up.t())
    return torch.cat([*out, rows[offsets[-1] :]])


@pytest.mark.parametrize("tail", [0, 2], ids=["own", "foreign-rows"])
@pytest.mark.parametrize("counts", ROUTINGS.values(), ids=ROUTINGS)
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_value_and_gradients(dtype: torch.dtype, counts: tuple[int, ...], tail: int) -> None:
    """Output and all gradients. Rows of no expert stay, their `x` gets zeros; unhit experts get zeros, not None."""
    offsets = offsets_of(*counts)
    tensors = operands(dtype, sum(counts) + tail)
    reference = [t.detach().double().requires_grad_() for t in tensors]
    out, expected = add_expert_lora(*tensors, offsets, SCALING), explicit(*reference, offsets)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    actual = torch.autograd.grad(out, tensors, grad)
    wanted = torch.autograd.grad(expected, reference, grad.double())
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    for a, b in zip((out, *actual), (expected, *wanted), strict=True):
        assert a.dtype == dtype
        largest = max(b.abs().max().item(), 1) if b.numel() else 1
        torch.testing.assert_close(a.double(), b, rtol=0, atol=tolerance * largest)
    assert torch.equal(out[offsets[-1] :], tensors[0][offsets[-1] :])
    assert not actual[1][offsets[-1] :].any()
    unhit = [expert for expert, count in enumerate(counts) if not count]
    assert not split_lora_A(actual[2], E)[unhit].any()
    assert not split_lora_B(actual[3], E)[unhit].any()


@pytest.mark.parametrize("factor_dtype", [torch.float32, torch.bfloat16, torch.float64], ids=dtype_name)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=dtype_name)
def test_factors_of_another_dtype(dtype: torch.dtype, factor_dtype: torch.dtype) -> None:
    """Factors are rounded to the dtype of `x` first; gradients come in the factors' own."""
    tensors = operands(dtype, 9, factor_dtype)
    offsets = offsets_of(3, 0, 2, 4, 0)
    out = add_expert_lora(*tensors, offsets, SCALING)
    cast = [t.detach().to(dtype).requires_grad_() for t in tensors]
    same = add_expert_lora(*cast, offsets, SCALING)
    torch.testing.assert_close(out, same, rtol=0, atol=0)
    grads = torch.autograd.grad(out.float().square().sum(), tensors)
    others = torch.autograd.grad(same.float().square().sum(), cast)
    assert [g.dtype for g in grads] == [dtype, dtype, factor_dtype, factor_dtype]
    for a, b in zip(grads, others, strict=True):  # of one number, each rounded to its own dtype
        steps = sum(torch.finfo(t.dtype).eps / 2 for t in (a, b)) if a.dtype != b.dtype else 0
        torch.testing.assert_close(a.double(), b.double(), rtol=1.01 * steps, atol=0)


@pytest.mark.parametrize("counts", ROUTINGS.values(), ids=ROUTINGS)
def test_gradcheck(counts: tuple[int, ...]) -> None:
    """Numerical gradients in float64."""
    offsets = offsets_of(*counts)
    tensors = operands(torch.float64, sum(counts) + 1)
    assert torch.autograd.gradcheck(lambda *t: add_expert_lora(*t, offsets, SCALING), tensors)


def test_is_a_well_formed_operator() -> None:
    """Schema, shape function and autograd registration agree (torch's own check)."""
    torch.library.opcheck(add_expert_lora, (*operands(torch.float32, 9), offsets_of(3, 0, 2, 4, 0), SCALING))


def test_the_sum_is_rounded_once() -> None:
    """In bfloat16 the result is the exact sum, rounded: the term is not rounded before it is added."""
    rows, x, lora_A, lora_B = (t.detach() for t in operands(torch.bfloat16, 9))
    x[:] = x.sign()
    lora_A[:] = 0.125 * lora_A.sign()  # exact products
    lora_B[:] = 0.0625 * lora_B.sign()
    offsets = offsets_of(3, 0, 2, 4, 0)
    exact = explicit(*(t.double() for t in (rows, x, lora_A, lora_B)), offsets) - rows.double()
    out = add_expert_lora(rows, x, lora_A, lora_B, offsets, 1.0)
    torch.testing.assert_close(out, (rows.double() + exact / SCALING).bfloat16(), rtol=0, atol=0)


def test_float16_overflows_only_where_the_result_does() -> None:
    """A large scaling of small factors: what lies between is scaled last, in forward and backward."""
    rows, x, lora_A, lora_B = operands(torch.float16, 9)
    scaling, offsets = 4096.0, offsets_of(3, 0, 2, 4, 0)
    with torch.no_grad():
        lora_A *= 8
        lora_B *= 1e-5
    out = add_expert_lora(rows, x, lora_A, lora_B, offsets, scaling)
    assert torch.isfinite(out).all()
    double = [t.detach().double() for t in (rows, x, lora_A, lora_B)]
    exact = double[0] + (explicit(*double, offsets) - double[0]) * (scaling / SCALING)
    torch.testing.assert_close(out.double(), exact, rtol=1e-2, atol=1e-1)
    grads = torch.autograd.grad(out, (rows, x, lora_A, lora_B), 1e-3 * torch.ones_like(out))
    assert all(torch.isfinite(grad).all() for grad in grads)


def test_keeps_its_operands_alone() -> None:
    """Saved for backward: four of the tensors that came in, whatever was hit."""
    rows, x, lora_A, lora_B = operands(torch.float32, 9)
    saved: list[int] = []
    for counts in ((3, 0, 2, 4, 0), (0, 9, 0, 0, 0)):
        saved.clear()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.data_ptr()) or t, lambda t: t):
            offsets = offsets_of(*counts)
            add_expert_lora(rows, x, lora_A, lora_B, offsets, SCALING)
        assert saved == [t.data_ptr() for t in (x, lora_A, lora_B, offsets)]


SHAPES = {
    "lora_A-columns": ((9, N), (E * R, K + 1), (N, R * E)),
    "lora_B-columns": ((9, N), (E * R, K), (N, R * E + 1)),
    "experts": ((9, N), (E * R + 1, K), (N, E * R + 1)),
    "dimensions": ((9, N), (K,), (N, R * E)),
    "rows": ((8, N), (E * R, K), (N, R * E)),
    "features": ((9, N + 1), (E * R, K), (N, R * E)),
}


@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_refuses_shapes(shapes: tuple[tuple[int, ...], ...]) -> None:
    """Factors that do not fit `x`, each other, or the number of experts; rows that do not fit either."""
    rows, lora_A, lora_B = (torch.randn(shape) for shape in shapes)
    with pytest.raises(RuntimeError, match=r"lora_A|rows must be"):
        add_expert_lora(rows, torch.randn(9, K), lora_A, lora_B, offsets_of(3, 0, 2, 4, 0), 1.0)


@pytest.fixture(params=["torch", *native_library.INSTRUCTION_SETS])
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """torch, and the kernels of each instruction set of this processor, in turn."""
    if request.param == "torch":
        monkeypatch.setattr(native_lora, "can_add", lambda *_: False)
        yield request.param
        return
    with instruction_set(request.param) as name:
        if not native_lora.can_add(torch.ones(1)):
            pytest.skip(f"no kernels for {name}")
        yield name


#: Experts, rank, in and out features, rows per expert; some in whole registers, most not.
SHAPES_TO_COMPUTE = {
    "whole": (3, 16, 128, 64, (8, 4, 5)),
    "ragged": (4, 5, 83, 201, (1, 0, 13, 2)),
    "few": (9, 3, 17, 33, (0, 0, 7, 0, 0, 0, 0, 0, 0)),
    "narrow": (2, 1, 1, 3, (2, 6)),
    "none": (2, 4, 16, 16, (0, 0)),
}


@pytest.mark.parametrize("factor_dtype", NATIVE_DTYPES, ids=dtype_name)
@pytest.mark.parametrize("dtype", NATIVE_DTYPES, ids=dtype_name)
@pytest.mark.parametrize("shape", SHAPES_TO_COMPUTE.values(), ids=SHAPES_TO_COMPUTE)
def test_every_implementation(
    implementation: str,
    shape: tuple[int, int, int, int, tuple[int, ...]],
    dtype: torch.dtype,
    factor_dtype: torch.dtype,
) -> None:
    """Value and gradients of any shape, unaligned, against float64; nothing is left unwritten."""
    experts, rank, columns, features, counts = shape
    offsets, total, generator = offsets_of(*counts), sum(counts) + 2, torch.Generator().manual_seed(0)

    def unaligned(*size: int, dtype: torch.dtype) -> Tensor:
        numel = torch.Size(size).numel()
        flat = torch.randn(numel + 1, generator=generator).to(dtype)
        return flat[1:].view(size)

    rows, x = unaligned(total, features, dtype=dtype), unaligned(total, columns, dtype=dtype)
    lora_A = unaligned(experts * rank, columns, dtype=factor_dtype)
    lora_B = unaligned(features, rank * experts, dtype=factor_dtype)
    grad = unaligned(total, features, dtype=dtype)
    leaves = [t.detach().requires_grad_() for t in (rows, x, lora_A, lora_B)]
    exact = [t.detach().to(dtype).double().requires_grad_() for t in leaves]
    with poisoned_memory():
        out = add_expert_lora(*leaves, offsets, SCALING)
        actual = (out.detach(), *torch.autograd.grad(out, leaves, grad))

    terms = [exact[0][offsets[-1] :]]
    for expert, (start, end) in reversed(list(enumerate(pairwise(offsets.tolist())))):
        down = split_lora_A(exact[2], experts)[expert]
        up = split_lora_B(exact[3], experts)[expert]
        terms.insert(0, exact[0][start:end] + SCALING * (exact[1][start:end] @ down.t()) @ up.t())
    expected = torch.cat(terms)
    wanted = (expected.detach(), *torch.autograd.grad(expected, exact, grad.double(), allow_unused=True))
    # Kernels round to 16 bits once, after sums in float32; torch also rounds what lies between the two products.
    unit = max(torch.finfo(t).eps for t in (dtype, factor_dtype))
    tolerance = 64 * 2**-24 + (unit if implementation != "torch" else 4 * unit)
    for a, b in zip(actual, wanted, strict=True):
        b = torch.zeros_like(a, dtype=torch.float64) if b is None else b
        largest = max(b.abs().max().item(), 1) if b.numel() else 1
        torch.testing.assert_close(a.double(), b, rtol=0, atol=tolerance * largest)


@pytest.mark.parametrize("out_dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize("shape", [(64, 96), (33, 31), (1, 70), (257, 1), (0, 5), (5, 0)], ids=str)
def test_transposing(shape: tuple[int, int], dtype: torch.dtype, out_dtype: torch.dtype, implementation: str) -> None:
    """torch's bits, of matrices in unaligned memory, of slices, with what no number is; all of it is written."""
    size = shape[0] * shape[1]
    values = torch.randn(size + 1, generator=torch.Generator().manual_seed(0)).to(dtype)
    if size > 4:
        values[1:5] = torch.tensor([torch.nan, torch.inf, 3.4e38, -1e-40])
    matrix = values[1:].view(shape)
    sliced = torch.cat([matrix, matrix], dim=1)[:, : shape[1]]
    for given in (matrix, sliced):
        out = torch.full((size + 1,), 7.0, dtype=out_dtype)[1:].view(shape[1], shape[0])
        native_lora.transpose_into(out, given)
        torch.testing.assert_close(out, given.t().to(out_dtype), rtol=0, atol=0, equal_nan=True)


def test_the_number_of_threads_changes_nothing() -> None:
    """Experts are computed each by one thread, in one order."""
    offsets, results = offsets_of(9, 1, 30, 0, 8), []
    before = torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            leaves = operands(torch.bfloat16, 48)
            out = add_expert_lora(*leaves, offsets, SCALING)
            results.append((out.detach(), *torch.autograd.grad(out.float().square().sum(), leaves)))
    finally:
        torch.set_num_threads(before)
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_is_no_further_from_float64_than_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16, value and every gradient: the kernels round less often."""
    if not native_lora.can_add(torch.ones(1)):
        pytest.skip("no kernels")
    offsets, errors = offsets_of(40, 1, 30, 0, 8), []
    leaves = operands(torch.bfloat16, 79)
    reference = [t.detach().double().requires_grad_() for t in leaves]
    grad = torch.randn(79, N, generator=torch.Generator().manual_seed(1)).bfloat16()
    expected = explicit(*reference, offsets)
    wanted = (expected, *torch.autograd.grad(expected, reference, grad.double()))
    for is_native in (True, False):
        monkeypatch.setattr(native_lora, "can_add", lambda *_, native=is_native: native)
        out = add_expert_lora(*leaves, offsets, SCALING)
        found = (out, *torch.autograd.grad(out, leaves, grad))
        errors.append([((a.double() - b).norm() / b.norm()).item() for a, b in zip(found, wanted, strict=True)])
    assert all(native <= 1.001 * by_torch for native, by_torch in zip(*errors, strict=True))


@pytest.mark.parametrize("dtype", NATIVE_DTYPES, ids=dtype_name)
def test_rows_that_do_not_follow_each_other(dtype: torch.dtype, implementation: str) -> None:
    """Inputs whose memory runs along columns, as a gate of a model's own may return, have gradients like any."""
    rows, x, lora_A, lora_B = operands(dtype, 6)
    offsets = offsets_of(1, 2, 3)
    gradients = []
    for given in (x, x.detach().t().contiguous().t()):
        leaf = given.detach().requires_grad_(True)
        assert leaf.is_contiguous() == (given is x)
        add_expert_lora(rows, leaf, lora_A, lora_B, offsets, 1.0).square().sum().backward()
        gradients.append(leaf.grad)
    scale = gradients[0].abs().max().item()  # torch's own products differ in the last bits
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-5 * scale)
