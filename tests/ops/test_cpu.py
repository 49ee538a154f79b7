"""Unpacking into a caller's buffer: native entry points on the CPU, ``.out`` operators elsewhere, or an honest no."""

import types
from collections.abc import Iterator

import pytest
import torch
from bitsandbytes.cextension import BNBNativeLibrary, ErrorHandlerMockBNBNativeLibrary

from hf_qmoe.ops import cpu, cuda, formats, native, torch_ops
from tests.support.oracle import (
    NATIVE_DTYPES,
    SCALED,
    assert_same_bits,
    bnb_dequantize,
    bnb_quantize,
    dtype_name,
)


GUARD = 64


@pytest.fixture(autouse=True)
def _no_compilation() -> Iterator[None]:
    """bitsandbytes compiles its fallback for blocks of 2048 and more: seconds for values that are the same eagerly."""
    with torch.compiler.set_stance("force_eager"):
        yield


def guarded_buffer(rows, columns, dtype):
    """A NaN-filled ``[N, K]`` view into a longer buffer, and that buffer."""
    whole = torch.full((rows * columns + 2 * GUARD,), float("nan"), dtype=dtype)
    return whole[GUARD:-GUARD].view(rows, columns), whole


@pytest.mark.parametrize("quant_type", SCALED)
@pytest.mark.parametrize("dtype", NATIVE_DTYPES, ids=dtype_name)
@pytest.mark.parametrize(
    ("rows", "columns", "blocksize"),
    [(24, 64, 64), (3, 256, 128), (1, 64, 64), (64, 100, 64), (64, 96, 128), (64, 2, 64), (16, 1024, 1024)],
)
def test_the_whole_buffer_and_nothing_else_is_written(quant_type, dtype, rows, columns, blocksize):
    """A poisoned buffer holds bitsandbytes' values afterwards, bit for bit, and its surroundings are untouched."""
    weight = torch.randn(rows, columns)
    codes, state = bnb_quantize(weight, quant_type, blocksize)
    packed, absmax = formats.quantize(weight, quant_type, blocksize)
    out, whole = guarded_buffer(rows, columns, dtype)

    assert cpu.dequantize_into(out, packed, absmax, quant_type, blocksize) is True

    assert_same_bits(out, bnb_dequantize(codes, state, dtype, (rows, columns)))
    assert whole[:GUARD].isnan().all()
    assert whole[-GUARD:].isnan().all()


@pytest.mark.parametrize("quant_type", SCALED)
@pytest.mark.parametrize(
    ("dtype", "blocksize"),
    [(torch.float64, 64), (torch.float32, 2048), (torch.bfloat16, 4096)],
    ids=["float64", "blocksize2048", "blocksize4096"],
)
def test_what_the_library_cannot_do_is_declined(quant_type, dtype, blocksize):
    """No float64 entry point, no accurate one for long blocks: `False`, and the buffer is as it was."""
    packed, absmax = formats.quantize(torch.randn(4, 1024), quant_type, blocksize)
    out, _ = guarded_buffer(4, 1024, dtype)

    assert cpu.dequantize_into(out, packed, absmax, quant_type, blocksize) is False

    assert out.isnan().all()


@pytest.mark.parametrize("quant_type", SCALED)
@pytest.mark.parametrize(
    "library",
    [
        pytest.param(lambda: BNBNativeLibrary(types.SimpleNamespace()), id="without-entry-point"),
        pytest.param(lambda: ErrorHandlerMockBNBNativeLibrary("no library"), id="not-loaded"),
    ],
)
def test_a_library_without_the_entry_point_is_declined(quant_type, library, monkeypatch):
    """bitsandbytes answers for missing functions with one that raises; that must not be called."""
    packed, absmax = formats.quantize(torch.randn(4, 64), quant_type, 64)
    out, _ = guarded_buffer(4, 64, torch.float32)
    monkeypatch.setattr(cpu, "lib", library())

    assert cpu.dequantize_into(out, packed, absmax, quant_type, 64) is False

    assert out.isnan().all()


@pytest.mark.parametrize("quant_type", SCALED)
@pytest.mark.parametrize("dtype", [*NATIVE_DTYPES, torch.float64], ids=dtype_name)
@pytest.mark.parametrize(("columns", "blocksize"), [(128, 64), (96, 128), (128, 2048)])
def test_declined_and_accepted_unpacking_agree(quant_type, dtype, columns, blocksize, monkeypatch):
    """One expert has the same bits whether our kernels, bitsandbytes' library or its operator unpacks it."""
    packed, absmax = formats.quantize(torch.randn(64, columns), quant_type, blocksize)
    expected = torch_ops.dequantize_expert(packed, absmax, quant_type, dtype).clone()

    for module in (native, cpu):
        monkeypatch.setattr(module, "dequantize_into", lambda *_: False)
        fallback = torch_ops.dequantize_expert(packed, absmax, quant_type, dtype).clone()
        assert_same_bits(expected, fallback)


def test_strided_bytes_and_scales_are_read_in_logical_order():
    """A raw pointer knows no strides: the caller hands over contiguous copies of sliced bytes and scales."""
    packed, absmax = formats.quantize(torch.randn(8, 64), "nf4", 64)
    expected = torch_ops.dequantize_expert(packed, absmax, "nf4", torch.float32).clone()
    wide, sparse = torch.zeros(8, 64, dtype=torch.uint8), torch.zeros(16)
    wide[:, 7:39], sparse[::2] = packed, absmax

    values = torch_ops.dequantize_expert(wide[:, 7:39], sparse[::2], "nf4", torch.float32)

    assert_same_bits(values, expected)


@pytest.mark.parametrize("quant_type", SCALED)
@pytest.mark.parametrize("dtype", [*NATIVE_DTYPES, torch.float64], ids=dtype_name)
def test_a_device_without_out_kernels_is_declined(quant_type, dtype):
    """bitsandbytes has no `.out` kernel for the CPU, so the operator path says `False` there and writes nothing."""
    packed, absmax = formats.quantize(torch.randn(4, 64), quant_type, 64)
    out, _ = guarded_buffer(4, 64, dtype)

    assert cuda.dequantize_into(out, packed, absmax, quant_type, 64) is False

    assert out.isnan().all()


@pytest.fixture
def out_kernels() -> Iterator[None]:
    """Gives the CPU the `.out` kernels that bitsandbytes has on an accelerator, made of its plain operators."""
    library = torch.library.Library("bitsandbytes", "IMPL")
    plain = torch.ops.bitsandbytes

    def dequantize_4bit(A, absmax, blocksize, quant_type, shape, dtype, out):
        out.copy_(plain.dequantize_4bit.default(A, absmax, blocksize, quant_type, shape, dtype))

    def dequantize_blockwise(A, absmax, code, blocksize, dtype, out):
        out.copy_(plain.dequantize_blockwise.default(A, absmax, code, blocksize, dtype))

    library.impl("dequantize_4bit.out", dequantize_4bit, "CPU")
    library.impl("dequantize_blockwise.out", dequantize_blockwise, "CPU")
    yield
    library._destroy()


@pytest.mark.usefixtures("out_kernels")
@pytest.mark.parametrize("quant_type", SCALED)
@pytest.mark.parametrize("dtype", NATIVE_DTYPES, ids=dtype_name)
def test_a_device_with_out_kernels_unpacks_through_them(quant_type, dtype):
    """Where the kernels exist they get the right arguments: the buffer holds the values of `formats.dequantize`."""
    packed, absmax = formats.quantize(torch.randn(8, 128), quant_type, 64)
    out, whole = guarded_buffer(8, 128, dtype)

    assert cuda.dequantize_into(out, packed, absmax, quant_type, 64) is True

    assert_same_bits(out, formats.dequantize(packed, absmax, quant_type, 64, dtype))
    assert whole[:GUARD].isnan().all()
    assert whole[-GUARD:].isnan().all()


@pytest.mark.usefixtures("out_kernels")
def test_a_device_with_out_kernels_declines_float64():
    """The kernels know three dtypes; float64 is left to the caller although a kernel is registered."""
    packed, absmax = formats.quantize(torch.randn(8, 128), "nf4", 64)
    out, _ = guarded_buffer(8, 128, torch.float64)
    assert cuda.dequantize_into(out, packed, absmax, "nf4", 64) is False
    assert out.isnan().all()
