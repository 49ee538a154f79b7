"""Storage formats: bytes, scales and values are bitsandbytes' own; what it does not check is checked."""

import functools
import os
import subprocess
import sys
import tempfile
from itertools import product

import bitsandbytes.functional as bnb
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hf_qmoe.ops import formats, reference
from hf_qmoe.ops.defaults import torch_defaults
from tests.support.oracle import (
    NATIVE_DTYPES,
    PASSTHROUGH,
    SCALED,
    assert_same_bits,
    bnb_dequantize,
    bnb_quantize,
    bnb_scales,
    dtype_name,
)


SCALED_BLOCKSIZES = [(q, b) for q in SCALED for b in formats.FORMATS[q].blocksizes]


@pytest.fixture(autouse=True)
def _no_compilation():
    """bitsandbytes compiles its fallback for blocks of 2048 and more: minutes for values that are the same eagerly."""
    with torch.compiler.set_stance("force_eager"):
        yield


def expected_bytes(codes: torch.Tensor, rows: int) -> torch.Tensor:
    """bitsandbytes' codes in the shape of this package."""
    return codes.reshape(rows, -1)


@pytest.mark.parametrize("dtype", NATIVE_DTYPES, ids=dtype_name)
@pytest.mark.parametrize(("quant_type", "blocksize"), SCALED_BLOCKSIZES)
def test_bytes_scales_and_values_are_those_of_bitsandbytes(quant_type, blocksize, dtype, device):
    """For every format, block size and dtype, one matrix packs and unpacks as `bitsandbytes` does it, bit for bit."""
    weight = torch.randn(32, 256, device=device).to(dtype)
    codes, state = bnb_quantize(weight, quant_type, blocksize)

    packed, absmax = formats.quantize(weight, quant_type, blocksize)

    assert_same_bits(packed, expected_bytes(codes, 32))
    assert_same_bits(absmax, state.absmax)
    for read_as in NATIVE_DTYPES:
        values = formats.dequantize(packed, absmax, quant_type, blocksize, read_as)
        assert_same_bits(values, bnb_dequantize(codes, state, read_as, (32, 256)))


@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
def test_the_shape_given_to_bitsandbytes_makes_no_difference_where_blocks_lie_within_rows(quant_type, device):
    """`quantize_4bit` on the matrix itself, which users of `bitsandbytes` call, gives the bytes and values of ours."""
    weight = torch.randn(24, 128, device=device)
    codes, state = bnb.quantize_4bit(weight, blocksize=64, quant_type=quant_type)

    packed, absmax = formats.quantize(weight, quant_type, 64)

    assert_same_bits(packed, codes.view(24, 64))
    assert_same_bits(
        formats.dequantize(packed, absmax, quant_type, 64, torch.float32), bnb.dequantize_4bit(codes, state)
    )


@pytest.mark.parametrize(
    ("quant_type", "blocksize", "shape"),
    [
        ("nf4", 32, (300, 1000)),
        ("nf4", 4096, (264, 1024)),
        ("fp4", 64, (1023, 320)),
        ("int8", 64, (300, 1024)),
        ("fp8", 128, (777, 640)),
    ],
)
def test_a_matrix_longer_than_one_run_is_quantized_as_a_whole(quant_type, blocksize, shape, device):
    """Cutting a matrix into runs of blocks (2^18 weights, the last one shorter) changes no byte and no scale."""
    weight = torch.randn(shape, device=device)
    assert weight.numel() > 2**18
    assert weight.numel() % 2**18
    codes, state = bnb_quantize(weight, quant_type, blocksize)

    packed, absmax = formats.quantize(weight, quant_type, blocksize)

    assert_same_bits(packed, expected_bytes(codes, shape[0]))
    assert_same_bits(absmax, state.absmax)


@pytest.mark.parametrize("quant_type", SCALED)
@pytest.mark.parametrize("blocksize", [64, 128, 512])
@pytest.mark.parametrize("columns", [16, 32, 36, 48, 96, 100, 176])
def test_values_are_right_where_blocks_cross_rows(quant_type, blocksize, columns, device):
    """A block that ends inside a row scales its own weights, as the specification and the flat matrix say."""
    weight = torch.randn(128, columns, device=device)
    codes, state = bnb_quantize(weight, quant_type, blocksize)

    packed, absmax = formats.quantize(weight, quant_type, blocksize)

    assert_same_bits(packed, expected_bytes(codes, 128))
    specified = reference.dequantize(packed, absmax, quant_type, blocksize)
    for dtype in NATIVE_DTYPES:
        values = formats.dequantize(packed, absmax, quant_type, blocksize, dtype)
        assert_same_bits(values, specified.to(dtype))
        assert_same_bits(values, bnb_dequantize(codes, state, dtype, (128, columns)))


@pytest.mark.parametrize("quant_type", formats.QUANT_TYPES)
def test_float64_is_float32_cast(quant_type, device):
    """Unpacking in float64 gives the float32 values, and packing float64 weights those of their float32 rounding."""
    weight = torch.randn(8, 64, dtype=torch.float64, device=device)
    packed, absmax = formats.quantize(weight, quant_type, 64)
    packed32, absmax32 = formats.quantize(weight.float(), quant_type, 64)

    assert_same_bits(packed, packed32)
    assert (absmax is None) == (absmax32 is None)
    if absmax is not None:
        assert_same_bits(absmax, absmax32)
    values = formats.dequantize(packed, absmax, quant_type, 64, torch.float64)
    assert_same_bits(values, formats.dequantize(packed, absmax, quant_type, 64, torch.float32).double())


@pytest.mark.parametrize("quant_type", PASSTHROUGH)
def test_16_bit_formats_store_the_bytes_of_the_rounded_weight(quant_type):
    """bf16 and fp16 hold the weight rounded to nearest, two bytes each, without scales."""
    weight = torch.randn(5, 7)
    packed, absmax = formats.quantize(weight, quant_type, 64)

    assert absmax is None
    assert_same_bits(packed, weight.to(PASSTHROUGH[quant_type]).view(torch.uint8))
    for dtype in (*NATIVE_DTYPES, torch.float64):
        values = formats.dequantize(packed, None, quant_type, 0, dtype)
        assert_same_bits(values, weight.to(PASSTHROUGH[quant_type]).to(dtype))


@pytest.mark.parametrize("quant_type", formats.QUANT_TYPES)
def test_strided_weights_are_packed_in_logical_order(quant_type, device):
    """A transposed view (gpt-oss keeps `[in, out]`) packs as its contiguous copy does."""
    weight = torch.randn(64, 16, device=device).t()
    packed, absmax = formats.quantize(weight, quant_type, 64)
    expected, expected_absmax = formats.quantize(weight.contiguous(), quant_type, 64)

    assert not weight.is_contiguous()
    assert_same_bits(packed, expected)
    if expected_absmax is not None:
        assert_same_bits(absmax, expected_absmax)


@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
@pytest.mark.parametrize(("shape", "blocksize"), [((16, 64), 64), ((32, 256), 32), ((96, 320), 64), ((24, 36), 32)])
def test_double_quantization_is_compress_statistics(quant_type, shape, blocksize, device):
    """Codes, their scales, the offset and the restored scales equal `quantize_4bit(compress_statistics=True)`."""
    weight = torch.randn(shape, device=device)
    codes, state = bnb_quantize(weight, quant_type, blocksize, double_quant=True)

    packed, absmax = formats.quantize(weight, quant_type, blocksize)
    compressed, nested_absmax, offset = formats.compress_absmax(absmax)

    assert_same_bits(packed, expected_bytes(codes, shape[0]))
    assert_same_bits(compressed, state.absmax)
    assert_same_bits(nested_absmax, state.state2.absmax)
    assert_same_bits(offset, state.offset)
    scales = formats.decompress_absmax(compressed, nested_absmax, offset)
    assert_same_bits(scales, bnb_scales(state))
    values = formats.dequantize(packed, scales, quant_type, blocksize, torch.float32)
    assert_same_bits(values, bnb_dequantize(codes, state, torch.float32, shape))


@pytest.mark.parametrize("scales", [torch.zeros(5), torch.full((300,), 0.25), torch.tensor([3.0])], ids=len)
def test_constant_scales_survive_double_quantization(scales):
    """Scales that are all equal leave nothing to quantize: their mean alone restores them."""
    restored = formats.decompress_absmax(*formats.compress_absmax(scales))
    assert_same_bits(restored, scales)


@pytest.mark.parametrize("quant_type", SCALED)
def test_blocks_of_zeros_come_back_as_zeros(quant_type, device):
    """A block without any weight has scale 0, zero values, and leaves its neighbours alone."""
    weight = torch.randn(4, 128, device=device)
    expected = formats.dequantize(*formats.quantize(weight, quant_type, 64), quant_type, 64, torch.float32)
    weight[1, 64:] = 0
    expected[1, 64:] = 0

    packed, absmax = formats.quantize(weight, quant_type, 64)

    assert absmax[3] == 0
    assert torch.equal(formats.dequantize(packed, absmax, quant_type, 64, torch.float32), expected)


@pytest.mark.parametrize("quant_type", SCALED)
@pytest.mark.parametrize("outlier", [1e30, -1e30])
def test_an_outlier_spoils_its_own_block_only(quant_type, outlier, device):
    """One huge weight is kept (int8's least value is -0.993), flattens its block, and touches no other."""
    weight = torch.randn(4, 128, device=device)
    expected = formats.dequantize(*formats.quantize(weight, quant_type, 64), quant_type, 64, torch.float32)
    weight[2, 5] = outlier

    values = formats.dequantize(*formats.quantize(weight, quant_type, 64), quant_type, 64, torch.float32)

    assert torch.isfinite(values).all()
    block, expected_rest = values[2, :64].clone(), expected.clone()
    assert block[5].item() == pytest.approx(outlier, rel=1e-2)
    block[5] = 0
    assert block.abs().max() <= 0.02 * abs(outlier)
    values[2, :64] = expected_rest[2, :64] = 0
    assert_same_bits(values, expected_rest)


def test_precision_of_the_formats_is_in_the_documented_order():
    """On the same normal weights: fp16 < bf16 < int8 < fp8 < nf4 < fp4, and int8 is below a quarter of nf4."""
    weight = torch.randn(128, 512)
    error = {}
    for quant_type in formats.QUANT_TYPES:
        packed, absmax = formats.quantize(weight, quant_type, 64)
        values = formats.dequantize(packed, absmax, quant_type, 64, torch.float32)
        error[quant_type] = (values - weight).abs().mean().item()

    assert sorted(error, key=error.__getitem__) == ["fp16", "bf16", "int8", "fp8", "nf4", "fp4"]
    assert error["int8"] < error["nf4"] / 4


@settings(max_examples=60, deadline=None)
@given(
    quant_type=st.sampled_from(formats.QUANT_TYPES),
    rows=st.integers(1, 40),
    columns=st.integers(1, 60).map(lambda n: 2 * n),
    blocksize=st.sampled_from([64, 128, 256, 1024]),
    scale=st.sampled_from([1e-6, 1.0, 1e3]),
    seed=st.integers(0, 2**16),
)
def test_packing_follows_the_specification(quant_type, rows, columns, blocksize, scale, seed):
    """Whatever the shape, packed bytes mean what `reference.dequantize` says, in each dtype."""
    chosen = formats.choose_blocksize(rows, columns, quant_type, blocksize)
    if chosen is None:
        rows, chosen = 32, formats.choose_blocksize(32, columns, quant_type, 64)
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * scale
    packed, absmax = formats.quantize(weight, quant_type, chosen)

    specified = reference.dequantize(packed, absmax, quant_type, chosen)

    assert packed.shape == (rows, formats.row_bytes(columns, quant_type))
    for dtype in NATIVE_DTYPES:
        values = formats.dequantize(packed, absmax, quant_type, chosen, dtype)
        assert_same_bits(values, specified.to(dtype))
    # Half the widest gap between two codes, relative to the largest weight; half a subnormal step for fp16.
    gap = {"nf4": 0.153, "fp4": 0.167, "int8": 0.008, "fp8": 0.036, "bf16": 2**-8, "fp16": 2**-11}[quant_type]
    step = 2**-25 if quant_type == "fp16" else 0
    assert (specified - weight).abs().max() <= gap * weight.abs().max() + step


@pytest.mark.parametrize("quant_type", formats.QUANT_TYPES)
@pytest.mark.parametrize("dtype", [*NATIVE_DTYPES, torch.float64], ids=dtype_name)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("position", [0, 70, -1])
def test_weights_that_are_not_finite_are_refused(quant_type, dtype, value, position):
    """One NaN or infinity anywhere in the matrix raises instead of becoming a code."""
    weight = torch.randn(4, 64).to(dtype)
    weight.view(-1)[position] = value
    with pytest.raises(ValueError, match=r"NaN|not finite"):
        formats.quantize(weight, quant_type, 64)


def test_bf16_weights_beyond_the_range_of_fp16_are_refused():
    """70000 is a bf16 number and an infinity in fp16; storing it as fp16 raises and names the format."""
    weight = torch.full((2, 4), 70000.0, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="not finite in fp16"):
        formats.quantize(weight, "fp16", 64)


def test_float64_weights_beyond_the_range_of_float32_are_refused():
    """Rounding float64 to float32 first must not hide an overflow."""
    weight = torch.ones(1, 64, dtype=torch.float64)
    weight[0, 3] = 1e300
    with pytest.raises(ValueError, match="infinite"):
        formats.quantize(weight, "nf4", 64)


@pytest.mark.parametrize(
    ("weight", "seen"),
    [
        (torch.zeros(64), r"\(64,\) torch.float32"),
        (torch.zeros(2, 2, 64), r"\(2, 2, 64\) torch.float32"),
        (torch.zeros(2, 64, dtype=torch.int32), r"\(2, 64\) torch.int32"),
        (torch.zeros(2, 64, dtype=torch.complex64), r"\(2, 64\) torch.complex64"),
    ],
    ids=["1-d", "3-d", "int32", "complex64"],
)
def test_what_is_not_a_float_matrix_is_refused(weight, seen):
    """Wrong dimensions or dtype raise and say what was received."""
    with pytest.raises(ValueError, match=seen):
        formats.quantize(weight, "nf4", 64)


@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
@pytest.mark.parametrize(
    "call",
    [
        pytest.param(lambda q: formats.quantize(torch.zeros(64, 33), q, 64), id="quantize"),
        pytest.param(lambda q: formats.choose_blocksize(64, 33, q, 64), id="choose_blocksize"),
        pytest.param(lambda q: formats.row_bytes(33, q), id="row_bytes"),
    ],
)
def test_an_odd_row_is_refused_by_4_bit_formats(quant_type, call):
    """Two weights share a byte, so an odd in_features raises, naming the number and what to do."""
    with pytest.raises(ValueError, match=r"in_features=33 is odd.*int8.*modules_to_not_convert"):
        call(quant_type)


@pytest.mark.parametrize("quant_type", ["int8", "fp8"])
def test_8_bit_formats_hold_odd_rows(quant_type):
    """An odd in_features is no problem where a weight is a byte."""
    packed, absmax = formats.quantize(torch.randn(64, 33), quant_type, 64)
    assert packed.shape == (64, 33)
    assert absmax.shape == (33,)


@pytest.mark.parametrize(
    ("quant_type", "blocksize"),
    [("nf4", 48), ("fp4", 16), ("nf4", 8192), ("int8", 32), ("fp8", 48), ("nf4", 0), ("int8", -64), ("nf4", "64")],
)
def test_a_block_size_the_format_does_not_know_is_refused(quant_type, blocksize):
    """The error names the value received and those allowed."""
    allowed = ", ".join(map(str, formats.FORMATS[quant_type].blocksizes))
    for call in (
        lambda: formats.check_blocksize(quant_type, blocksize),
        lambda: formats.choose_blocksize(64, 64, quant_type, blocksize),
        lambda: formats.quantize(torch.zeros(64, 64), quant_type, blocksize),
    ):
        with pytest.raises(ValueError, match=f"blocksize={blocksize!r} is not supported for {quant_type}.*{allowed}"):
            call()


def test_supported_block_sizes_are_those_of_bitsandbytes():
    """Each offered 4-bit size is accepted by `quantize_4bit`, and the sizes beside them are not."""
    weight = torch.zeros(1, 4096)
    for blocksize in formats.BLOCKSIZES_4BIT:
        bnb.quantize_4bit(weight, blocksize=blocksize)
    for blocksize in (16, 48, 8192):
        assert blocksize not in formats.BLOCKSIZES_4BIT
        with pytest.raises(ValueError, match="blocksize"):
            bnb.quantize_4bit(weight, blocksize=blocksize)
    assert set(formats.BLOCKSIZES_8BIT) == set(formats.BLOCKSIZES_4BIT) - {32}


def test_a_block_size_that_leaves_a_rest_is_refused():
    """A block must not straddle two experts, so blocks have to divide the matrix."""
    with pytest.raises(ValueError, match=r"blocksize=64 does not divide the 3 x 100"):
        formats.quantize(torch.zeros(3, 100), "nf4", 64)


@pytest.mark.parametrize(("quant_type", "blocksize"), SCALED_BLOCKSIZES)
def test_the_chosen_block_size_is_the_largest_supported_that_divides_the_matrix(quant_type, blocksize):
    """Asked for a size that does not divide N * K, the next smaller one that does is taken, else `None`."""
    least = 32 if quant_type in ("nf4", "fp4") else 64
    for rows, columns in product([1, 2, 24, 96], [8, 32, 48, 64, 96, 100, 2048]):
        expected = blocksize
        while expected and (rows * columns) % expected:
            expected = expected // 2 if expected > least else None
        assert formats.choose_blocksize(rows, columns, quant_type, blocksize) == expected, (rows, columns)


@pytest.mark.parametrize(
    ("shape", "quant_type", "asked", "chosen"),
    [
        ((96, 64), "nf4", 64, 64),
        ((24, 96), "nf4", 128, 128),
        ((3, 96), "nf4", 64, 32),
        ((3, 96), "int8", 128, None),
        ((2, 8), "fp4", 64, None),
        ((1, 2048), "fp8", 4096, 2048),
    ],
)
def test_examples_of_the_fallback(shape, quant_type, asked, chosen):
    """The documented rule, on numbers worked out by hand."""
    assert formats.choose_blocksize(*shape, quant_type, asked) == chosen


@pytest.mark.parametrize("quant_type", PASSTHROUGH)
def test_16_bit_formats_take_any_block_size(quant_type):
    """Without scales there are no blocks: any size is accepted, and 0 is what is used."""
    formats.check_blocksize(quant_type, 48)
    assert formats.choose_blocksize(3, 5, quant_type, 48) == 0


@pytest.mark.parametrize("quant_type", ["nf5", "NF4", "", None, 4, []])
def test_an_unknown_quant_type_is_refused(quant_type):
    """The error names the value and all choices, whatever type the value has."""
    with pytest.raises(ValueError, match=r"unknown quant_type .*nf4, fp4, int8, fp8, bf16, fp16"):
        formats.get_format(quant_type)


@pytest.mark.parametrize("quant_type", SCALED)
@pytest.mark.parametrize(
    "absmax", [None, torch.ones(4, dtype=torch.bfloat16), torch.ones(4, dtype=torch.uint8)], ids=["none", "bf16", "u8"]
)
def test_unpacking_needs_float32_scales(quant_type, absmax):
    """Missing, cast or still compressed scales raise instead of scaling wrongly."""
    packed = torch.zeros(4, formats.row_bytes(64, quant_type), dtype=torch.uint8)
    with pytest.raises(ValueError, match=f"{quant_type} needs float32 scales"):
        formats.dequantize(packed, absmax, quant_type, 64, torch.float32)


@pytest.mark.parametrize("quant_type", ["nf4", "int8", "fp8"])
def test_codebooks_are_sorted_within_the_unit_interval(quant_type):
    """bitsandbytes' table in rising order, from at least -1 to exactly 1, with 0 among its values."""
    table = formats.codebook(quant_type, "cpu")
    assert table.dtype == torch.float32
    assert table.shape == (2 ** formats.get_format(quant_type).bits,)
    assert (table.diff() >= 0).all()
    assert table.min() >= -1
    assert table.max() == 1
    assert (table == 0).any()


def test_the_fp4_codebook_is_in_bit_order():
    """The upper half of fp4's codes are the negatives of the lower half: the high bit is the sign."""
    table = formats.codebook("fp4", "cpu")
    assert table.shape == (16,)
    assert_same_bits(table[8:], -table[:8])
    assert table.max() == 1


def test_codebooks_are_the_tables_of_bitsandbytes():
    """The values come from bitsandbytes' public functions."""
    assert_same_bits(formats.codebook("nf4", "cpu"), bnb.get_4bit_type("nf4", device="cpu"))
    assert_same_bits(formats.codebook("fp4", "cpu"), bnb.get_4bit_type("fp4", device="cpu"))
    assert_same_bits(formats.codebook("int8", "cpu"), bnb.create_dynamic_map())
    assert_same_bits(formats.codebook("fp8", "cpu"), bnb.create_fp8_map(True, 4, 3, 8))


@pytest.mark.parametrize("quant_type", SCALED)
def test_a_codebook_made_under_a_meta_default_device_holds_values(quant_type):
    """transformers builds models under `torch.device("meta")`; a table cached there must be a real one."""
    with torch.device("meta"):
        table = formats.codebook(quant_type, "cpu:0")  # a device spelling that no other test has cached
    assert_same_bits(table, formats.codebook(quant_type, "cpu"))


@pytest.mark.parametrize("quant_type", PASSTHROUGH)
def test_16_bit_formats_have_no_codebook(quant_type):
    """Asking for one raises and says why."""
    with pytest.raises(ValueError, match="no codebook"):
        formats.codebook(quant_type, "cpu")


#: Its arguments: a default dtype, whether experts are called before it is set, the file of the results.
DEFAULT_DTYPE_SCRIPT = """
import sys

import torch
from hf_qmoe import ExpertsNbit

generator = torch.Generator().manual_seed(0)
weights = [torch.randn(2, 128, 64, generator=generator), torch.randn(2, 64, 64, generator=generator)]
x = torch.randn(3, 64, generator=generator)
arguments = x, torch.tensor([[0], [1], [0]]), torch.ones(3, 1)

def run():
    outputs = []
    for quant_type in ("nf4", "fp4", "int8", "fp8"):
        experts = ExpertsNbit.from_float(*weights, quant_type=quant_type).eval()
        unpacked = experts.stack("gate_up_proj").dequantize(torch.float32)
        outputs += [experts.gate_up_proj.detach(), unpacked, experts(*arguments).detach()]
    return outputs

dtype, first, path = sys.argv[1:]
packed = ExpertsNbit.from_float(*weights).eval() if first == "multiply" else None
torch.set_default_dtype(getattr(torch, dtype))
if packed is not None:
    packed(*arguments)
outputs = run()
torch.set_default_dtype(torch.float32)
torch.save(outputs, path)
"""


@functools.cache
def results_under(dtype: str, first: str, kernels: str) -> list[Tensor]:
    """What `DEFAULT_DTYPE_SCRIPT` gives in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", DEFAULT_DTYPE_SCRIPT, dtype, first, f"{folder}/results"]
        environment = os.environ | {"HF_QMOE_CPU_KERNELS": kernels}
        subprocess.run(command, check=True, capture_output=True, env=environment)
        return torch.load(f"{folder}/results")


@pytest.mark.parametrize("kernels", ["auto", "off"])
@pytest.mark.parametrize(("first", "dtype"), [("quantize", "float64"), ("multiply", "bfloat16")])
def test_the_default_dtype_is_not_remembered(first, dtype, kernels):
    """Tables are made once in a process, bitsandbytes' own among them. Under another default dtype
    (`torch.set_default_dtype`) they are the same.
    """
    results, expected = results_under(dtype, first, kernels), results_under("float32", "quantize", kernels)
    assert len(results) == 12
    assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))


@pytest.mark.parametrize("quant_type", SCALED)
def test_no_table_sets_the_default_dtype(quant_type, monkeypatch):
    """It is the process's: another thread that builds a model sets it too, and puts back what it saw."""
    for cached in (formats._codebook, formats.native._packing, formats.native._unpacking):
        cached.cache_clear()
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    monkeypatch.setattr(torch, "set_default_dtype", lambda dtype: pytest.fail("set the default dtype"))
    try:
        packed, absmax = formats.quantize(torch.ones(2, 64, dtype=torch.float32), quant_type, 64)
        weight = formats.dequantize(packed, absmax, quant_type, 64, torch.float32)
        assert formats.codebook(quant_type, "cpu").dtype == torch.float32
        assert torch.get_default_dtype() == torch.bfloat16
    finally:
        monkeypatch.undo()
        torch.set_default_dtype(before)
    assert weight.eq(1).all()


def test_torch_defaults_within_other_defaults():
    """Of numbers without a dtype it makes float32 tensors; a dtype that is named or follows from the values stays."""
    with torch.device("meta"), torch_defaults():
        made = [torch.tensor([0.1]), torch.ones(2), torch.linspace(0, 1, 3), torch.arange(0.0, 1.0, 0.5)]
        kept = [torch.tensor([1]), torch.arange(3), torch.tensor([True]), torch.ones(1, dtype=torch.float64)]
    assert {(t.dtype, t.device.type) for t in made} == {(torch.float32, "cpu")}
    assert [t.dtype for t in kept] == [torch.int64, torch.int64, torch.bool, torch.float64]


@pytest.mark.parametrize("quant_type", ["int8", "fp8"])
def test_packing_leaves_the_codebook_alone(quant_type, monkeypatch):
    """bitsandbytes 0.48 writes -1 into the first value of the table it packs with; ours is shared."""
    expected = formats.codebook(quant_type, "cpu").clone()
    monkeypatch.setattr(formats.native, "quantize", lambda *_: None)
    original = torch.ops.bitsandbytes.quantize_blockwise.default

    def writing(values, code, blocksize):
        code[0] = -1
        return original(values, code, blocksize)

    monkeypatch.setattr(torch.ops.bitsandbytes.quantize_blockwise, "default", writing)
    weight = torch.randn(8, 64)
    packed, absmax = formats.quantize(weight, quant_type, 64)
    assert torch.equal(formats.codebook(quant_type, "cpu"), expected)
    values = expected[packed.long()] * absmax[:, None]
    assert torch.equal(formats.dequantize(packed, absmax, quant_type, 64, torch.float32), values)
