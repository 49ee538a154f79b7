"""Products of the native CPU kernels against float64, on every instruction set, and never out of bounds.

The reference is `hf_qmoe.ops.reference` in float64 on weights that bitsandbytes' rule gives. Two bounds are held: an
elementwise one, for any size, and for sizes where a norm says something the one that is promised, 1.1 times the error
of dequantizing and multiplying in the same dtype.
"""

import itertools
import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from hf_qmoe.ops import native_library, native_product, reference
from hf_qmoe.ops.fused import can_fuse, fused_experts
from hf_qmoe.ops.native_product import ACTIVATIONS, GATES
from hf_qmoe.ops.operands import Operands
from hf_qmoe.ops.schema import grouped_linear
from hf_qmoe.packed import PackedStack
from tests.support import kernels


DTYPES = (torch.float32, torch.bfloat16, torch.float16)
QUANT_TYPES = ("nf4", "fp4", "int8", "fp8")
MULTIPLYING = tuple(name for name in native_library.INSTRUCTION_SETS if name != "generic")

by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
by_quant_type = pytest.mark.parametrize("quant_type", QUANT_TYPES)


@pytest.fixture(params=MULTIPLYING)
def instruction_set(request):
    """Each one that this processor has."""
    with kernels.instruction_set(request.param) as name:
        yield name


@pytest.fixture
def threads():
    """Sets the number of threads, and puts it back."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def stack_of(experts, rows, columns, quant_type="nf4", blocksize=64, double_quant=False, seed=0) -> PackedStack:
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randn(experts, rows, columns, generator=generator) * columns**-0.5
    return PackedStack.from_float(weights, quant_type, blocksize, double_quant)


def operands(stack: PackedStack) -> Operands:
    return Operands(stack.packed, stack.absmax, stack.nested_absmax, stack.nested_offset, stack.quant_type)


def multiply(x: Tensor, stack: PackedStack, offsets: Tensor, exact: bool) -> Tensor:
    scales = stack.absmax, stack.nested_absmax, stack.nested_offset
    return grouped_linear(x, stack.packed, *scales, offsets, stack.quant_type, False, exact)


def rounding(dtype: torch.dtype) -> float:
    """A relative error that one rounding to `dtype` may make."""
    return torch.finfo(dtype).eps


def assert_near(out: Tensor, x: Tensor, weights: Tensor, offsets: Tensor) -> None:
    """Each number is off by a few roundings of each of its terms at most, and of itself."""
    expected = reference.grouped_linear(x.double(), weights.double(), offsets)
    terms = reference.grouped_linear(x.double().abs(), weights.double().abs(), offsets)
    # bfloat16 kernels round the weight; the others round sums of `columns` terms in float32.
    allowed = rounding(out.dtype) * expected.abs() + 1e-30
    allowed += terms * (rounding(torch.bfloat16) if out.dtype == torch.bfloat16 else 4e-7 * x.shape[1] ** 0.5)
    assert out.isfinite().all()
    assert ((out.double() - expected).abs() <= allowed).all()


# (rows, columns, blocksize): whole groups of 64, blocks of half a group, of several groups, straddling rows, cut rows.
SHAPES = [
    (64, 128, 64),
    (1, 64, 64),
    (5, 192, 64),
    (36, 256, 128),
    (32, 96, 32),
    (40, 80, 64),
    (64, 100, 64),
    (32, 2, 64),
    (96, 66, 64),
    (32, 1024, 1024),
    (3, 4096, 4096),
]


@by_quant_type
@by_dtype
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))
def test_grouped_linear_of_any_size(shape, dtype, quant_type, instruction_set):
    """Odd sizes, with few and many tokens, experts without any, and rows of no expert, which become zeros."""
    rows, columns, blocksize = shape
    blocksize = blocksize if quant_type in ("nf4", "fp4") else max(blocksize, 64)
    stack = stack_of(6, rows, columns, quant_type, blocksize, double_quant=columns % 128 == 0)
    counts = [1, 0, 3, 7, 30, 2]
    offsets = torch.tensor([0, *itertools.accumulate(counts)])
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(sum(counts) + 4, columns, generator=generator).to(dtype)
    assert native_product.multiplies(x, operands(stack))

    out = multiply(x, stack, offsets, exact=False)
    assert torch.equal(out[-4:], torch.zeros(4, rows, dtype=dtype))
    assert_near(out[:-4], x[:-4], stack.dequantize(torch.float64), offsets)


@by_quant_type
@by_dtype
@pytest.mark.parametrize("tokens", [*range(1, 20), 31, 32, 47, 63, 64, 257, 273, 527])
def test_any_number_of_tokens(tokens, dtype, quant_type, instruction_set):
    """One expert, all tokens."""
    stack = stack_of(1, 48, 320, quant_type)
    x = torch.randn(tokens, 320, generator=torch.Generator().manual_seed(tokens)).to(dtype)
    offsets = torch.tensor([0, tokens])
    assert_near(multiply(x, stack, offsets, exact=False), x, stack.dequantize(torch.float64), offsets)


@by_dtype
@pytest.mark.parametrize("counts", [(1500, 40, 700, 0, 1200, 5), (0, 0, 33, 1023, 0), (31,) * 70])
def test_more_rows_than_are_packed_at_a_time(counts, dtype, instruction_set):
    """What is packed in batches of 2 MB, or not at all, lands where it belongs."""
    stack = stack_of(len(counts), 33, 1024)
    offsets = torch.tensor([0, *itertools.accumulate(counts)])
    x = torch.randn(sum(counts), 1024, generator=torch.Generator().manual_seed(4)).to(dtype)
    assert_near(multiply(x, stack, offsets, exact=False), x, stack.dequantize(torch.float64), offsets)


MEASURE_RESERVED = """
import resource, torch
from hf_qmoe.ops.schema import grouped_linear
from hf_qmoe.packed import PackedStack
torch.set_num_threads(1)
x = torch.ones(70 * 31, 8192, dtype=torch.bfloat16)
stack = PackedStack.from_float(torch.randn(70, 1, 8192), "int8", 64)
def multiply(rows):
    offsets = (torch.arange(71) * 31).clamp(max=rows)
    return grouped_linear(x, stack.packed, stack.absmax, None, None, offsets, "int8", False, False)
multiply(31)
size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + (16 << 20),) * 2)
multiply(len(x))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.skipif("HF_QMOE_NATIVE_LIBRARY" in os.environ, reason="sanitizers reserve memory of their own")
def test_rows_that_are_not_packed_reserve_no_memory() -> None:
    """36 MB of inputs, few for each expert, are multiplied where 16 MB are left."""
    run = subprocess.run([sys.executable, "-c", MEASURE_RESERVED], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


@by_quant_type
@by_dtype
@pytest.mark.parametrize("counts", [(1, 2, 1, 4), (9, 12, 7, 20), (130, 64, 100, 40)], ids=["few", "some", "many"])
@pytest.mark.parametrize("double_quant", [False, True])
@pytest.mark.parametrize("signs", ["both", "positive"])
def test_error_is_that_of_dequantizing(signs, double_quant, counts, dtype, quant_type, instruction_set):
    """The promise: at most 1.1 times the error of dequantize and `F.linear`, against float64.

    Inputs of one sign, as after a ReLU, add up an error that equal codes have in common.
    """
    stack = stack_of(4, 256, 1024, quant_type, double_quant=double_quant)
    offsets = torch.tensor([0, *itertools.accumulate(counts)])
    x = torch.randn(sum(counts), 1024, generator=torch.Generator().manual_seed(2)).to(dtype)
    x = x.abs() if signs == "positive" else x
    expected = reference.grouped_linear(x.double(), stack.dequantize(torch.float64), offsets)
    errors = [(multiply(x, stack, offsets, exact).double() - expected).norm() for exact in (True, False)]
    assert 0 < errors[1] <= 1.1 * errors[0]


@by_dtype
@pytest.mark.parametrize("columns", [192, 384])
def test_blocks_of_three_groups(columns, dtype, instruction_set):
    """The operators take any block size, modules powers of two only."""
    stack = stack_of(3, 64, columns)
    stack = PackedStack(stack.packed, stack.absmax[..., ::3].contiguous(), None, None, "nf4")
    assert stack.blocksize == 192
    x = torch.randn(9, columns, generator=torch.Generator().manual_seed(15)).to(dtype)
    offsets = torch.tensor([0, 1, 1, 9])
    assert_near(multiply(x, stack, offsets, exact=False), x, stack.dequantize(torch.float64), offsets)


@by_dtype
def test_no_rows_at_all(dtype, instruction_set):
    """T = 0."""
    stack = stack_of(3, 64, 64)
    out = multiply(torch.empty(0, 64, dtype=dtype), stack, torch.zeros(4, dtype=torch.int64), exact=False)
    assert out.shape == (0, 64)


@by_dtype
@pytest.mark.parametrize("counts", [(2, 0, 7), (17, 0, 40)], ids=["few", "many"])
def test_only_rows_of_experts_are_written(counts, dtype, instruction_set):
    """Poisoned memory around and inside the output: what belongs to an expert is overwritten, nothing else is."""
    stack = stack_of(3, 40, 64)
    end = sum(counts)
    offsets = torch.tensor([0, *itertools.accumulate(counts)])
    x = torch.randn(end + 3, 64, generator=torch.Generator().manual_seed(3)).to(dtype)
    memory = torch.full((end + 5, 40), torch.nan, dtype=dtype)
    native_product.grouped_linear_into(memory[1 : end + 4], x, operands(stack), offsets)
    assert memory[1 : end + 1].isfinite().all()
    assert memory[0].isnan().all()
    assert memory[end + 1 :].isnan().all()


def misaligned(tensor: Tensor | None) -> Tensor | None:
    """A copy whose first element lies one byte after an aligned address."""
    if tensor is None:
        return None
    buffer = bytearray(tensor.nbytes + 64)
    start = torch.frombuffer(buffer, dtype=torch.uint8).data_ptr()
    copy = torch.frombuffer(buffer, dtype=tensor.dtype, count=tensor.numel(), offset=-start % 8 + 1)
    return copy.view(tensor.shape).copy_(tensor)


FUNCTIONS = {
    "silu": functional.silu,
    "gelu_tanh": lambda values: functional.gelu(values, approximate="tanh"),
    "relu": functional.relu,
    "relu2": lambda values: functional.relu(values).square(),
}


def gated(values: Tensor, gate: str, activation: str) -> Tensor:
    if gate == "none":
        return FUNCTIONS[activation](values)
    first, second = values.chunk(2) if gate == "concatenated" else (values[::2], values[1::2])
    return FUNCTIONS[activation](first) * second


def layer_reference(
    x: Tensor, index: Tensor, weights: Tensor, up: Tensor, down: Tensor, biases: tuple, gate: str, activation: str
) -> Tensor:
    """The layer in float64, token by token."""
    return reference.experts_forward(
        x.double(), index, weights.double(), up, down, lambda v: gated(v, gate, activation), *biases
    )


def layer(gate, quant_type="nf4", experts=7, hidden=96, features=72, double_quant=False):
    up_rows = features if gate == "none" else 2 * features
    up = stack_of(experts, up_rows, hidden, quant_type, 64, double_quant, seed=4)
    down = stack_of(experts, hidden, features, quant_type, 64, double_quant, seed=5)
    return up, down


def routing(tokens, top_k, choices, seed=6):
    generator = torch.Generator().manual_seed(seed)
    index = torch.randint(0, choices, (tokens, top_k), generator=generator)
    return index, torch.rand(tokens, top_k, generator=generator)


def run(x, index, weights, up, down, gate, activation, biases=(None, None), out_dtype=None):
    ups, downs = operands(up), operands(down)
    return fused_experts(
        *(x, index, weights, *ups[:4], biases[0], *downs[:4], biases[1]),
        *(up.quant_type, gate, activation, out_dtype or x.dtype),
    )


def stepwise(x, index, weights, up, down, gate, activation, biases):
    """The other path: each weight rounded to the dtype of `x`, each product, each activation."""
    ups, downs = up.dequantize(x.dtype), down.dequantize(x.dtype)
    cast = tuple(None if bias is None else bias.to(x.dtype) for bias in biases)
    out = torch.zeros(x.shape, dtype=torch.float32)
    for row in range(x.shape[0]):
        for expert, weight in zip(index[row].tolist(), weights[row], strict=True):
            if expert >= ups.shape[0]:
                continue
            hidden = functional.linear(x[row], ups[expert], None if cast[0] is None else cast[0][expert])
            result = functional.linear(
                gated(hidden, gate, activation), downs[expert], None if cast[1] is None else cast[1][expert]
            )
            out[row] += weight.float() * result.float()
    return out.to(x.dtype)


@by_dtype
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("tokens", [40, 120])
def test_a_layer(tokens, has_bias, activation, gate, dtype, instruction_set):
    """Any gate and activation, with and without biases; index 7 and 8 name experts of other ranks."""
    up, down = layer(gate)
    generator = torch.Generator().manual_seed(8)
    biases = (torch.randn(7, up.out_features, generator=generator), torch.randn(7, 96, generator=generator))
    biases = biases if has_bias else (None, None)
    x = torch.randn(tokens, 96, generator=generator).to(dtype)
    index, weights = routing(tokens, 3, 9)
    doubles = tuple(None if bias is None else bias.double() for bias in biases)
    weights_64 = up.dequantize(torch.float64), down.dequantize(torch.float64)
    expected = layer_reference(x, index, weights, *weights_64, doubles, gate, activation)
    out = run(x, index, weights, up, down, gate, activation, biases)
    error = (out.double() - expected).norm()
    other = (stepwise(x, index, weights, up, down, gate, activation, biases).double() - expected).norm()
    assert 0 < error <= 1.1 * other


@by_quant_type
@by_dtype
@pytest.mark.parametrize("double_quant", [False, True])
@pytest.mark.parametrize("tokens", [1, 2, 5, 33, 257, 900])
def test_a_layer_in_every_format(tokens, double_quant, dtype, quant_type, instruction_set):
    """All formats and numbers of tokens; the same expert may be chosen twice."""
    up, down = layer("concatenated", quant_type, 5, 128, 64, double_quant)
    x = torch.randn(tokens, 128, generator=torch.Generator().manual_seed(9)).to(dtype)
    index, weights = routing(tokens, 2, 5)
    weights_64 = up.dequantize(torch.float64), down.dequantize(torch.float64)
    expected = layer_reference(x, index, weights, *weights_64, (None, None), "concatenated", "silu")
    out = run(x, index, weights, up, down, "concatenated", "silu")
    assert (out.double() - expected).norm() <= expected.norm() * (
        2e-6 if dtype == torch.float32 else 6 * rounding(dtype) / 8
    )


@by_dtype
@pytest.mark.parametrize(
    ("tokens", "hidden"), [(37, 256), (400, 256), pytest.param(900, 1024, marks=pytest.mark.slow)]
)
def test_threads_do_not_change_a_bit(tokens, hidden, dtype, instruction_set, threads):
    """Each number is made by one thread, its terms added in one order."""
    up, down = layer("concatenated", hidden=hidden, features=320)
    x = torch.randn(tokens, hidden, generator=torch.Generator().manual_seed(10)).to(dtype)
    index, weights = routing(tokens, 4, 7)
    results = []
    for count in range(1, 9):
        threads(count)
        results.append(run(x, index, weights, up, down, "concatenated", "silu"))
    assert all(torch.equal(result, results[0]) for result in results[1:])


@by_dtype
@pytest.mark.parametrize("out_dtype", ["same", "float32"])
def test_the_result_may_be_float32(out_dtype, dtype, instruction_set):
    """Asked for in float32 it is the number that would have been rounded."""
    up, down = layer("none")
    x = torch.randn(6, 96, generator=torch.Generator().manual_seed(11)).to(dtype)
    index, weights = routing(6, 2, 7)
    wide = run(x, index, weights, up, down, "none", "silu", out_dtype=torch.float32)
    assert wide.dtype == torch.float32
    if out_dtype == "same":
        assert torch.equal(wide.to(dtype), run(x, index, weights, up, down, "none", "silu"))


def test_kernels_that_are_chosen_after_others_were_asked(monkeypatch):
    """By another thread: an output that nothing wrote must not be returned."""
    if not native_library.has_products():
        pytest.skip("the CPU kernels in use do not multiply")
    up, down = layer("concatenated")
    index, weights = routing(3, 2, 7)
    x, name = torch.randn(3, 96), native_library.instruction_set()
    monkeypatch.setattr(native_product, "has_products", lambda: True)
    native_library.use_instruction_set("generic")
    try:
        with pytest.raises(RuntimeError, match="do not multiply"):
            run(x, index, weights, up, down, "concatenated", "silu")
        with pytest.raises(RuntimeError, match="do not multiply"):
            multiply(x, up, torch.tensor([0, 3, *[3] * 6]), exact=False)
    finally:
        native_library.use_instruction_set(name)


def test_no_tokens_and_no_slots(instruction_set):
    """T = 0 gives nothing, k = 0 gives zeros."""
    up, down = layer("concatenated")
    empty = torch.empty(0, 96), torch.empty(0, 2, dtype=torch.int64), torch.empty(0, 2)
    assert run(*empty, up, down, "concatenated", "silu").shape == (0, 96)
    none = torch.randn(3, 96), torch.empty(3, 0, dtype=torch.int64), torch.empty(3, 0)
    assert torch.equal(run(*none, up, down, "concatenated", "silu"), torch.zeros(3, 96))


def test_a_negative_index_is_an_error(instruction_set):
    """It would be read before the first expert."""
    up, down = layer("concatenated")
    with pytest.raises(ValueError, match="negative expert index"):
        run(torch.randn(1, 96), torch.tensor([[-1]]), torch.ones(1, 1), up, down, "concatenated", "silu")


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@by_dtype
@pytest.mark.parametrize("tokens", [5, 200])
def test_what_is_not_finite_stays_so(tokens, value, dtype, instruction_set):
    """A NaN or infinity in one token is seen in that token's result only."""
    up, down = layer("concatenated")
    x = torch.randn(tokens, 96, generator=torch.Generator().manual_seed(12)).to(dtype)
    x[2, 7] = value
    index, weights = routing(tokens, 2, 7)
    out = run(x, index, weights, up, down, "concatenated", "silu")
    assert not out[2].isfinite().any()
    assert out[torch.arange(tokens) != 2].isfinite().all()


@by_dtype
@pytest.mark.parametrize("tokens", [9, 48])
def test_extreme_activations(tokens, dtype, instruction_set):
    """SiLU and GELU where their exponentials overflow and underflow."""
    hidden = 64
    eye = torch.eye(hidden)[None]
    up = PackedStack.from_float(eye, "nf4", 64)
    down = PackedStack.from_float(eye, "nf4", 64)
    x = torch.linspace(-200, 200, tokens * hidden).view(tokens, hidden).to(dtype)
    index, weights = torch.zeros(tokens, 1, dtype=torch.int64), torch.ones(tokens, 1)
    for activation in ("silu", "gelu_tanh"):
        out = run(x, index, weights, up, down, "none", activation, out_dtype=torch.float32)
        expected = functional.silu(x.double())
        if activation == "gelu_tanh":  # torch's loses all digits where the tanh is almost -1
            wide = x.double()
            expected = wide * torch.sigmoid(2 * (2 / torch.pi) ** 0.5 * (wide + 0.044715 * wide**3))
        allowed = expected.abs() * max(2e-5, 2 * rounding(dtype) if dtype != torch.float32 else 0) + 1e-30
        assert ((out.double() - expected).abs() <= allowed).all(), activation


@pytest.mark.parametrize("hidden", [96, 128])
@pytest.mark.parametrize("tokens", [4, 200])
def test_unaligned_memory(tokens, hidden, instruction_set):
    """Pointers may be odd: tensors can be views into anything, such as a mapped file."""
    up, down = layer("concatenated", hidden=hidden, double_quant=True)
    x = torch.randn(tokens, hidden, generator=torch.Generator().manual_seed(13)).bfloat16()
    index, weights = routing(tokens, 2, 7)
    expected = run(x, index, weights, up, down, "concatenated", "silu")
    moved = [PackedStack(*map(misaligned, operands(stack)[:4]), stack.quant_type) for stack in (up, down)]
    assert torch.equal(run(*map(misaligned, (x, index, weights)), *moved, "concatenated", "silu"), expected)


def test_where_there_is_no_kernel(instruction_set):
    """Other dtypes, 16-bit formats and other devices are declined; the operator itself refuses."""
    up, down = layer("concatenated")
    sixteen = stack_of(2, 64, 64, "bf16", 64)
    assert not can_fuse(torch.empty(1, 96, dtype=torch.float64), operands(up))
    assert not can_fuse(torch.empty(1, 96, device="meta"), operands(up))
    assert not can_fuse(torch.empty(1, 64), operands(sixteen))
    with pytest.raises(RuntimeError, match=r"no fused kernels for torch\.float64"):
        run(torch.randn(1, 96).double(), *routing(1, 1, 7), up, down, "concatenated", "silu")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.randn(3, 64)}, r"x must be \[T, 96\]"),
        ({"index": torch.zeros(2, 2, dtype=torch.int64)}, "top_k_index"),
        ({"weights": torch.ones(3, 1)}, "top_k_index"),
        ({"gate": "none"}, "rows"),
        ({"biases": (torch.zeros(7, 3), None)}, "a bias must be"),
        ({"out_dtype": torch.bfloat16}, "out_dtype"),
    ],
)
def test_what_does_not_belong_together(change, message):
    """Refused before native code reads what is not there."""
    if not native_library.available():
        pytest.skip(str(native_library.why_not()))
    up, down = layer("concatenated")
    arguments = {"x": torch.randn(3, 96), "index": torch.zeros(3, 2, dtype=torch.int64), "weights": torch.ones(3, 2)}
    arguments |= {"up": up, "down": down, "gate": "concatenated", "activation": "silu"} | change
    with pytest.raises(RuntimeError, match=message):
        run(**arguments)


def test_the_gradient_is_exact():
    """`exact=False` is about the forward; what flows back is that of the exact product."""
    stack = stack_of(2, 64, 128)
    offsets = torch.tensor([0, 3, 5])
    grads = []
    for exact in (True, False):
        x = torch.randn(5, 128, generator=torch.Generator().manual_seed(14)).bfloat16().requires_grad_(True)
        multiply(x, stack, offsets, exact).sum().backward()
        grads.append(x.grad)
    assert torch.equal(*grads)


@pytest.mark.parametrize("name", MULTIPLYING)
def test_an_instruction_set_without_products_is_noticed(name):
    """Whether there are products is not asked again at each call; another instruction set is another answer."""
    x, stack = torch.ones(1, 64), operands(stack_of(1, 2, 64))
    with kernels.instruction_set(name):
        assert can_fuse(x, stack)
        with kernels.instruction_set("generic"):
            assert not can_fuse(x, stack)
        assert can_fuse(x, stack)
