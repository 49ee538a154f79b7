"""The native CPU kernels: bit for bit what bitsandbytes computes, on every instruction set, and never out of bounds.

`HF_QMOE_NATIVE_LIBRARY` points these tests at another library, e.g. the one that
``python -m hf_qmoe.ops.build_native --sanitize`` builds.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from hf_qmoe.ops import build_native, formats, native, native_library
from tests.support.kernels import instruction_set
from tests.support.oracle import NATIVE_DTYPES, SCALED, bnb_quantize, dtype_name


GUARD = 64
BLOCKSIZES = [(q, b) for q in SCALED for b in formats.FORMATS[q].blocksizes]
every_format = pytest.mark.parametrize("quant_type", SCALED)
every_dtype = pytest.mark.parametrize("dtype", NATIVE_DTYPES, ids=dtype_name)


@pytest.fixture(autouse=True)
def _no_compilation() -> Iterator[None]:
    """bitsandbytes compiles its fallback for blocks of 2048 and more: seconds for values that are the same eagerly."""
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.fixture
def kernels() -> None:
    """Skips where there are no kernels; `test_the_library_is_there` fails if there should be."""
    if not native_library.available():
        pytest.skip(str(native_library.why_not()))
    if not native_library.load().unpacks:
        pytest.skip("bitsandbytes unpacks on this processor; HF_QMOE_CPU_KERNELS=generic tests these kernels")


# `amx` and `avx512bf16` multiply otherwise; they pack and unpack with the code of `avx512`.
@pytest.fixture(params=("avx512", "avx2", "generic"))
def isa(request: pytest.FixtureRequest, kernels: None) -> Iterator[str]:
    """Each instruction set of this processor in turn."""
    with instruction_set(request.param) as name:
        yield name


@pytest.fixture
def fresh_state(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Loads the library and asks bitsandbytes anew inside the test, and again after it."""
    caches = (native_library.load, native._unpacking, native._packing)
    for cached in caches:
        cached.cache_clear()
    yield monkeypatch
    monkeypatch.undo()
    for cached in caches:
        cached.cache_clear()


def assert_identical(actual: Tensor, expected: Tensor) -> None:
    """Equal in every bit: signs of zeros and subnormal values too, which comparing values would not all see."""
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    assert torch.equal(actual.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8))


def bnb_values(packed: Tensor, absmax: Tensor, quant_type: str, blocksize: int, dtype: torch.dtype) -> Tensor:
    """bitsandbytes' values of the flattened matrix, as one row."""
    ops, packed = torch.ops.bitsandbytes, packed.reshape(-1)
    if quant_type in ("nf4", "fp4"):
        shape = (1, packed.numel() * 2)
        return ops.dequantize_4bit.default(packed.view(-1, 1), absmax, blocksize, quant_type, shape, dtype).view(-1)
    return ops.dequantize_blockwise.default(packed, absmax, formats.codebook(quant_type, "cpu"), blocksize, dtype)


def bnb_packed(weight: Tensor, quant_type: str, blocksize: int) -> tuple[Tensor, Tensor]:
    """bitsandbytes' bytes and scales, flat."""
    codes, state = bnb_quantize(weight, quant_type, blocksize)
    return codes.reshape(-1), state.absmax


def random_packed(rows: int, columns: int, quant_type: str, blocksize: int) -> tuple[Tensor, Tensor]:
    """Bytes with every code in them, and scales of every size."""
    packed = torch.randint(0, 256, (rows, formats.row_bytes(columns, quant_type)), dtype=torch.uint8)
    return packed, torch.randn(-(rows * columns // -blocksize)).exp2().mul_(0.1)


def check_unpacking(packed: Tensor, absmax: Tensor, shape: tuple[int, ...], quant_type, blocksize, dtype) -> Tensor:
    """Unpacks into a buffer of NaN, between guards, and compares with bitsandbytes; returns the values."""
    count = torch.Size(shape).numel()
    whole = torch.full((count + 2 * GUARD,), float("nan"), dtype=dtype)
    out = whole[GUARD : GUARD + count].view(shape)

    assert native.dequantize_into(out, packed, absmax, quant_type, blocksize) is True

    assert_identical(out.reshape(-1), bnb_values(packed, absmax, quant_type, blocksize, dtype))
    assert whole[:GUARD].isnan().all()
    assert whole[GUARD + count :].isnan().all()
    return out


def check_packing(weight: Tensor, quant_type: str, blocksize: int) -> None:
    """Packs and compares with bitsandbytes; the weight is left as it was."""
    before = weight.clone()
    result = native.quantize(weight, quant_type, blocksize)

    assert result is not None
    packed, absmax = result
    expected, expected_absmax = bnb_packed(weight, quant_type, blocksize)
    assert packed.shape == (*weight.shape[:-1], formats.row_bytes(weight.shape[-1], quant_type))
    assert_identical(packed.reshape(-1), expected)
    assert_identical(absmax, expected_absmax)
    assert_identical(weight, before)


def test_the_library_is_there_where_a_compiler_is():
    """Installing the package compiles the kernels; that they are missing must not look like a skipped test."""
    if os.environ.get("HF_QMOE_CPU_KERNELS") == "off" or not shutil.which("g++"):
        pytest.skip("switched off, or no g++")
    assert native_library.available(), native_library.why_not()
    assert native_library.why_not() is None
    assert native_library.instruction_set() in native_library.INSTRUCTION_SETS


@every_dtype
@pytest.mark.parametrize(("quant_type", "blocksize"), BLOCKSIZES)
def test_unpacked_values_are_those_of_bitsandbytes(isa, quant_type, blocksize, dtype):
    """Every format, block size and dtype."""
    packed, absmax = random_packed(16, 512, quant_type, blocksize)
    check_unpacking(packed, absmax, (16, 512), quant_type, blocksize, dtype)


@every_dtype
@pytest.mark.parametrize(("quant_type", "blocksize"), BLOCKSIZES)
def test_bytes_and_scales_are_those_of_bitsandbytes(isa, quant_type, blocksize, dtype):
    """Every format, block size and dtype."""
    check_packing(torch.randn(16, 512).to(dtype), quant_type, blocksize)


@every_dtype
@every_format
@pytest.mark.parametrize(
    ("rows", "columns", "blocksize"),
    [(1, 64, 64), (1, 8192, 256), (64, 100, 64), (64, 2, 64), (48, 96, 512), (16, 36, 64), (1024, 4, 4096)],
)
def test_odd_shapes(isa, quant_type, dtype, rows, columns, blocksize):
    """One block, one row, blocks that cross rows."""
    packed, absmax = random_packed(rows, columns, quant_type, blocksize)
    check_unpacking(packed, absmax, (rows, columns), quant_type, blocksize, dtype)
    check_packing(torch.randn(rows, columns).to(dtype), quant_type, blocksize)


@every_dtype
@pytest.mark.parametrize("quant_type", ["int8", "fp8"])
@pytest.mark.parametrize(
    ("shape", "blocksize"),
    [((64, 33), 64), ((1, 1), 64), ((1, 63), 64), ((1, 65), 64), ((7, 143), 256), ((5000,), 256)],
)
def test_8_bit_blocks_may_be_cut_short(isa, quant_type, dtype, shape, blocksize):
    """Odd rows, and a last block that is not full, as nested scales have."""
    rows = torch.Size(shape[:-1]).numel()
    packed, absmax = random_packed(rows, shape[-1], quant_type, blocksize)
    check_unpacking(packed, absmax, shape, quant_type, blocksize, dtype)
    check_packing(torch.randn(shape).to(dtype), quant_type, blocksize)


@every_dtype
@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
@pytest.mark.parametrize("count", [2, 30, 62, 66, 126, 4098])
def test_a_4_bit_block_cut_short_is_unpacked(isa, quant_type, dtype, count):
    """Any even number of weights. By value: bitsandbytes' code for such sizes has a negative zero in its fp4 table."""
    packed, absmax = random_packed(1, count, quant_type, 64)
    out = torch.full((count + 1,), float("nan"), dtype=dtype)

    assert native.dequantize_into(out[:-1], packed, absmax, quant_type, 64)

    torch.testing.assert_close(out[:-1], bnb_values(packed, absmax, quant_type, 64, dtype), rtol=0, atol=0)
    assert out[-1].isnan()


SCALES = (0.0, -0.0, -1.5, 1e-45, 1e-41, 1.1e-38, 3e-38, 1e-8, 6e-5, 65504.0, 7e4, 1e30, 3.4e38, float("inf"))


@every_dtype
@every_format
def test_scales_of_every_size(isa, quant_type, dtype):
    """Products that are subnormal in any of the dtypes, or overflow float16; negative and infinite scales."""
    absmax = torch.tensor([scale for scale in SCALES for _ in range(256 // 64)])
    packed = torch.randint(0, 256, (len(SCALES), formats.row_bytes(256, quant_type)), dtype=torch.uint8)
    values = check_unpacking(packed, absmax, (len(SCALES), 256), quant_type, 64, dtype)
    assert values.isinf().any()


@every_dtype
@every_format
@pytest.mark.parametrize("blocksize", [1024, 2048])
def test_subnormal_values_are_kept_or_not_as_bitsandbytes_does(isa, quant_type, dtype, blocksize):
    """Its code for long blocks rounds subnormal products to bfloat16 otherwise than that for short ones may."""
    packed, _ = random_packed(4, 1024, quant_type, blocksize)
    absmax = torch.full((4096 // blocksize,), 3e-39)
    check_unpacking(packed, absmax, (4, 1024), quant_type, blocksize, dtype)


@every_dtype
@every_format
def test_a_scale_that_is_not_a_number_shows(isa, quant_type, dtype):
    """All values of its block are NaN, whatever bits it has (all ones would wrap round to zero), and no others."""
    packed, absmax = random_packed(2, 128, quant_type, 64)
    absmax.view(torch.int32)[1], absmax[3] = -1, float("nan")
    out = torch.zeros(2, 128, dtype=dtype)

    assert native.dequantize_into(out, packed, absmax, quant_type, 64)

    assert torch.equal(out.view(4, 64).isnan().all(1), torch.tensor([False, True, False, True]))
    assert out.view(4, 64)[::2].isfinite().all()


def edges(quant_type: str) -> Tensor:
    """Values at which the code changes, in units of absmax."""
    table = formats.codebook(quant_type, "cpu").sort().values
    return (table[:-1] + table[1:]) / 2


@every_dtype
@every_format
@pytest.mark.parametrize("scale", [1.0, 0.37, 3e38, 1.7e-38, 4e-41, 1e-45])
def test_ties_and_their_neighbours(isa, quant_type, dtype, scale):
    """Halfway between two codes, one step above and below; scaled, down to where 1 / absmax overflows."""
    middle = edges(quant_type)
    values = torch.cat([middle, middle.nextafter(middle + 1), middle.nextafter(middle - 1), torch.tensor([0.0, -0.0])])
    rows = torch.nn.functional.pad(values, (0, -values.numel() % 62)).view(-1, 62)
    blocks = torch.nn.functional.pad(torch.nn.functional.pad(rows, (1, 0), value=1.0), (0, 1), value=-1.0)
    if dtype == torch.float16:
        scale = {3e38: 6e4, 1.7e-38: 6e-5, 4e-41: 6e-7, 1e-45: 6e-8}.get(scale, scale)
    check_packing((blocks * scale).to(dtype), quant_type, 64)


@pytest.mark.parametrize("quant_type", ["int8", "fp8"])
def test_every_step_between_minus_one_and_one(isa, quant_type):
    """8-bit codes are looked up by 65536 steps: each of them, and the floats at both sides of where it begins."""
    start = (torch.arange(1, 1 << 16, dtype=torch.float64) - 0.5).div_(65535).mul_(2).sub_(1).float()
    values = torch.cat([start, start.nextafter(torch.tensor(2.0)), start.nextafter(torch.tensor(-2.0))])
    rows = torch.nn.functional.pad(values, (0, -values.numel() % 255)).view(-1, 255)
    check_packing(torch.nn.functional.pad(rows, (1, 0), value=1.0), quant_type, 256)


@every_dtype
@every_format
def test_blocks_of_zeros(isa, quant_type, dtype):
    """Of both signs, beside ordinary blocks."""
    weight = torch.randn(8, 64)
    weight[1], weight[4], weight[5, ::2] = 0.0, -0.0, -0.0
    check_packing(weight.to(dtype), quant_type, 64)


@every_format
@every_dtype
def test_packed_float16_reaches_subnormal_values(isa, quant_type, dtype):
    """Each of the 63488 finite float16 numbers, as input of each dtype."""
    numbers = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.float16)
    check_packing(numbers[numbers.isfinite()].to(dtype).view(-1, 64), quant_type, 64)


@pytest.mark.parametrize("threads", range(1, 9))
@every_format
@every_dtype
def test_threads_change_nothing(isa, quant_type, dtype, threads):
    """Sizes at which all of them have work, and do not share it evenly."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        packed, absmax = random_packed(1031, 128, quant_type, 64)
        check_unpacking(packed, absmax, (1031, 128), quant_type, 64, dtype)
        if threads in (1, 3, 8):
            check_packing(torch.randn(1031, 128).to(dtype), quant_type, 64)
    finally:
        torch.set_num_threads(before)


def misaligned(tensor: Tensor) -> Tensor:
    """A copy whose first element lies one byte after an aligned address."""
    buffer = bytearray(tensor.numel() * tensor.element_size() + 64)
    start = torch.frombuffer(buffer, dtype=torch.uint8).data_ptr()
    copy = torch.frombuffer(buffer, dtype=tensor.dtype, count=tensor.numel(), offset=-start % 8 + 1)
    return copy.view(tensor.shape).copy_(tensor)


@every_dtype
@every_format
def test_addresses_need_no_alignment(isa, quant_type, dtype):
    """Tensors over foreign memory (a mapped file) may begin anywhere."""
    packed, absmax = random_packed(8, 192, quant_type, 64)
    out = misaligned(torch.zeros(8, 192, dtype=dtype))
    assert out.data_ptr() % 2 == 1
    assert native.dequantize_into(out, misaligned(packed), misaligned(absmax), quant_type, 64)
    assert_identical(out.reshape(-1), bnb_values(packed, absmax, quant_type, 64, dtype))

    weight = torch.randn(8, 192).to(dtype)
    packed, absmax = native.quantize(misaligned(weight), quant_type, 64)
    expected, expected_absmax = bnb_packed(weight, quant_type, 64)
    assert_identical(packed.view(-1), expected)
    assert_identical(absmax, expected_absmax)


@pytest.mark.usefixtures("kernels")
@every_format
def test_strided_tensors_are_taken_in_logical_order(quant_type):
    """A pointer knows no strides: bytes, scales, weights and the buffer itself."""
    packed, absmax = random_packed(8, 64, quant_type, 64)
    wide, sparse = torch.zeros(8, 2 * packed.shape[1], dtype=torch.uint8), torch.zeros(16)
    wide[:, 7 : 7 + packed.shape[1]], sparse[::2] = packed, absmax
    out, surroundings = torch.zeros(64, 8).t(), torch.full((8, 96), float("nan"))

    strided = wide[:, 7 : 7 + packed.shape[1]], sparse[::2]
    assert native.dequantize_into(out, *strided, quant_type, 64)
    assert native.dequantize_into(surroundings[:, 16:80], *strided, quant_type, 64)

    expected = bnb_values(packed, absmax, quant_type, 64, torch.float32).view(8, 64)
    assert_identical(out, expected)
    assert_identical(surroundings[:, 16:80], expected)
    assert surroundings[:, :16].isnan().all()
    assert surroundings[:, 80:].isnan().all()
    check_packing(torch.randn(64, 32).t(), quant_type, 64)
    check_packing(torch.randn(8, 128)[:, 32:96], quant_type, 64)


@pytest.mark.usefixtures("kernels")
@every_format
@pytest.mark.parametrize("shape", [(0, 64), (4, 0), (0,)])
def test_nothing_to_do(quant_type, shape):
    """An empty matrix has no bytes and no scales."""
    packed, absmax = native.quantize(torch.empty(shape), quant_type, 64)
    assert packed.shape == (*shape[:-1], formats.row_bytes(shape[-1], quant_type))
    assert absmax.shape == (0,)
    assert native.dequantize_into(torch.empty(shape), packed, absmax, quant_type, 64)


@every_dtype
@every_format
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("position", [0, 70, 63 * 1024, -1])
def test_weights_that_are_not_finite_are_refused(isa, quant_type, dtype, value, position):
    """As `formats.quantize` does, in whichever thread's part of the matrix it lies."""
    weight = torch.randn(64, 1024).to(dtype)
    weight.view(-1)[position] = value
    with pytest.raises(ValueError, match="NaN or infinite"):
        native.quantize(weight, quant_type, 64)


@pytest.mark.usefixtures("kernels")
@every_format
def test_what_the_kernels_cannot_do_is_declined(quant_type):
    """`False` or `None`, and the buffer as it was."""
    packed, absmax = random_packed(4, 64, quant_type, 64)

    def declines(out: Tensor, packed: Tensor = packed, absmax: Tensor = absmax, blocksize: int = 64) -> bool:
        return native.dequantize_into(out, packed, absmax, quant_type, blocksize) is False

    poisoned = torch.full((4, 64), float("nan"), dtype=torch.float64)
    assert declines(poisoned)
    assert poisoned.isnan().all()
    assert declines(torch.empty(4, 64, device="meta"))
    assert declines(torch.empty(4, 64), blocksize=0)
    with FakeTensorMode():
        fake, fake_absmax = torch.empty(4, 64), torch.empty(absmax.shape)
        fake_packed = torch.empty(packed.shape, dtype=torch.uint8)
    assert declines(fake, fake_packed, fake_absmax)
    assert declines(torch.empty(4, 64), fake_packed)
    assert native.quantize(fake, quant_type, 64) is None
    assert native.quantize(torch.empty(4, 64, device="meta"), quant_type, 64) is None
    assert native.quantize(torch.randn(4, 64, dtype=torch.float64), quant_type, 64) is None
    assert native.quantize(torch.randn(4, 64), "bf16", 64) is None
    assert native.dequantize_into(torch.empty(4, 64), packed, absmax, "bf16", 64) is False


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
def test_4_bit_blocks_that_do_not_divide_the_matrix_are_declined(quant_type):
    """bitsandbytes scales the weights of a last short block by another formula, which no caller here needs."""
    assert native.quantize(torch.randn(3, 100), quant_type, 64) is None
    assert native.quantize(torch.randn(64, 33), quant_type, 64) is None
    assert native.quantize(torch.randn(5, 6), quant_type, 15) is None


@every_format
@pytest.mark.parametrize("spoil", ["absmax", "packed", "dtype"])
def test_tensors_that_do_not_belong_together_are_refused(quant_type, spoil):
    """Native code would read beyond their end."""
    packed, absmax = random_packed(4, 128, quant_type, 64)
    if spoil == "absmax":
        absmax = absmax[:-1]
    elif spoil == "packed":
        packed = packed[:-1]
    else:
        absmax = absmax.bfloat16()
    with pytest.raises(ValueError, match="packed must be" if spoil == "packed" else "absmax must be float32"):
        native.dequantize_into(torch.empty(4, 128), packed, absmax, quant_type, 64)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("context", [torch.inference_mode, torch.no_grad, lambda: torch.device("meta")])
def test_the_first_use_may_be_anywhere(context, fresh_state):
    """What is asked of bitsandbytes then is kept for the process: it must be real tensors' values."""
    weight = torch.randn(8, 64)
    out = torch.empty(8, 64)
    with context():
        packed, absmax = native.quantize(weight, "int8", 64)
        assert native.dequantize_into(out, packed, absmax, "int8", 64)
    check_packing(weight, "int8", 64)
    assert_identical(out.view(-1), bnb_values(packed, absmax, "int8", 64, torch.float32))


@pytest.mark.usefixtures("kernels")
@every_format
def test_another_arithmetic_of_bitsandbytes_is_left_to_it(quant_type, fresh_state):
    """A version that rounds differently, in either direction: the kernels decline and the buffer is as it was."""
    packed, absmax = random_packed(4, 64, quant_type, 64)
    unpack, tables = native._bnb_dequantize, native._packing_tables
    fresh_state.setattr(native, "_bnb_dequantize", lambda *args: unpack(*args) * (1 + 2**-7))
    fresh_state.setattr(native, "_packing_tables", lambda name: tables("nf4" if name == "fp4" else "fp4"))
    if quant_type in ("int8", "fp8"):
        other = "fp8" if quant_type == "int8" else "int8"
        fresh_state.setattr(native, "_packing_tables", lambda name: tables(other))
    out = torch.full((4, 64), float("nan"))

    assert native.dequantize_into(out, packed, absmax, quant_type, 64) is False
    assert native.quantize(torch.randn(4, 64), quant_type, 64) is None

    assert out.isnan().all()


@pytest.mark.parametrize("value", ["on", "AVX512", "sse", "1"])
def test_an_unknown_mode_is_refused(value, fresh_state):
    """The error names the variable, the value and the choices."""
    fresh_state.setenv("HF_QMOE_CPU_KERNELS", value)
    choices = ", ".join(("auto", *native_library.INSTRUCTION_SETS, "off"))
    with pytest.raises(ValueError, match=rf"HF_QMOE_CPU_KERNELS='{value}'.*{choices}"):
        native_library.available()


def test_a_mode_without_a_library_is_refused(fresh_state, tmp_path):
    """Asked for by name, the kernels must run; left to `auto`, their absence is only explained."""
    fresh_state.setenv("HF_QMOE_NATIVE_LIBRARY", str(tmp_path / "missing.so"))
    fresh_state.setenv("HF_QMOE_CPU_KERNELS", "generic")
    with pytest.raises(RuntimeError, match=r"missing\.so does not exist.*build_native"):
        native_library.available()
    fresh_state.setenv("HF_QMOE_CPU_KERNELS", "auto")
    assert not native_library.available()
    assert "missing.so does not exist" in native_library.why_not()
    assert native_library.instruction_set() is None
    assert native.quantize(torch.randn(4, 64), "nf4", 64) is None
    with pytest.raises(RuntimeError, match="not available"):
        native_library.use_instruction_set(None)


@pytest.mark.usefixtures("kernels")
def test_an_unknown_instruction_set_is_refused():
    """And the one in use stays."""
    before = native_library.instruction_set()
    with pytest.raises(ValueError, match="'sse'"):
        native_library.use_instruction_set("sse")
    assert native_library.instruction_set() == before


@pytest.mark.parametrize("content", [b"", b"not a library"])
def test_a_file_that_is_no_library_is_not_used(content, fresh_state, tmp_path):
    """It is explained instead."""
    path = tmp_path / "broken.so"
    path.write_bytes(content)
    fresh_state.setenv("HF_QMOE_NATIVE_LIBRARY", str(path))
    fresh_state.setenv("HF_QMOE_CPU_KERNELS", "auto")
    assert "cannot be loaded" in native_library.why_not()


@pytest.mark.usefixtures("kernels")
def test_a_library_of_other_sources_is_not_used(fresh_state):
    """After an update without a new build, old kernels must not run."""
    fresh_state.setenv("HF_QMOE_CPU_KERNELS", "auto")
    fresh_state.setattr(build_native, "source_digest", lambda: "of newer sources")
    assert "built from other sources" in native_library.why_not()


@pytest.mark.parametrize("compiler", ["no-such-compiler", "false"])
def test_without_a_working_compiler_nothing_is_built(compiler, monkeypatch, tmp_path, capsys):
    """One error, one line on the command line, and a library that was there stays."""
    monkeypatch.setenv("CXX", compiler)
    target = tmp_path / "kept.so"
    target.write_bytes(b"old")
    with pytest.raises(
        build_native.BuildError, match=r"CXX=no-such-compiler is not a command|false failed on \w+\.cpp"
    ):
        build_native.build(output=target)
    assert target.read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["kept.so"]
    assert build_native.main([]) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_a_library_of_these_sources_is_not_built_again(monkeypatch, tmp_path):
    """Installing with other extras does not compile; other sources, no library or a compiler by name do."""
    library, built = tmp_path / "_native.so", []
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(build_native, "LIBRARY", library)
    monkeypatch.setattr(build_native, "build", lambda *_, **__: built.append(len(built)) or library)
    assert build_native.build_if_needed() == library
    assert built == [0]
    library.write_bytes(b"of 0123456789abcdef")
    assert build_native.main(["--if-needed"]) == 0
    assert built == [0, 1]
    library.write_bytes(b"of " + build_native.source_digest().encode() + b"\0")
    assert build_native.build_if_needed() == library
    assert build_native.main(["--if-needed"]) == 0
    assert built == [0, 1]
    monkeypatch.setenv("CXX", "g++")
    assert build_native.build_if_needed() == library
    assert built == [0, 1, 2]


@pytest.mark.usefixtures("kernels")
def test_the_library_names_its_sources():
    """Which is what tells whether it has to be built again."""
    library = Path(os.environ.get("HF_QMOE_NATIVE_LIBRARY") or build_native.LIBRARY)
    assert build_native.source_digest().encode() in library.read_bytes()


PROGRAM = """
import hashlib, sys, torch
from hf_qmoe.ops import cpu, formats, native, native_library
digest = hashlib.sha256()
for quant_type in ("nf4", "fp4", "int8", "fp8"):
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        weight = torch.randn(96, 96, generator=torch.Generator().manual_seed(0)).to(dtype)
        packed, absmax = native.quantize(weight, quant_type, 128) or formats.quantize(weight, quant_type, 128)
        out = torch.empty_like(weight)
        for arguments in [(out, packed, absmax, quant_type, 128)]:
            native.dequantize_into(*arguments) or cpu.dequantize_into(*arguments)
        for tensor in (packed, absmax, out):
            digest.update(bytes(tensor.view(torch.uint8).flatten().tolist()))
print(native_library.instruction_set(), digest.hexdigest())
"""


@pytest.mark.slow
@pytest.mark.usefixtures("kernels")
def test_every_mode_gives_the_same_bytes():
    """In processes of their own: the best instruction set, each lower one by name, and none."""
    root = Path(__file__).parents[2]
    lines = {}
    best = native_library.INSTRUCTION_SETS.index(native_library.instruction_set() or "generic")
    for mode in ("auto", *native_library.INSTRUCTION_SETS[best:], "off"):
        environment = {**os.environ, "HF_QMOE_CPU_KERNELS": mode}
        run = subprocess.run(
            [sys.executable, "-c", PROGRAM], env=environment, cwd=root, capture_output=True, text=True, check=True
        )
        lines[mode] = run.stdout.split()
    assert lines["off"][0] == "None"
    assert all(lines[mode][0] == mode for mode in native_library.INSTRUCTION_SETS[best:])
    assert len({digest for _, digest in lines.values()}) == 1
