"""The product that never waits for a device: as good as dequantizing and `F.linear`, however the rows are spread."""

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import linear
from torch.utils._python_dispatch import TorchDispatchMode

from hf_qmoe.ops import cuda, grouped_mm, reference, torch_ops
from hf_qmoe.ops.operands import Operands
from hf_qmoe.packed import PackedStack
from tests.support.oracle import (
    DTYPES,
    NATIVE_DTYPES,
    assert_same_bits,
    dtype_name,
    offsets_of,
    poisoned_memory,
    stack_and_control,
    storage_params,
)


BF16 = torch.bfloat16
#: Rows per expert of five experts, of which few (one, for five experts) and many are taken in different ways.
COUNTS = {
    "one-row": (0, 0, 1, 0, 0),
    "fewer-rows-than-experts": (0, 2, 0, 1, 0),
    "one-each": (1, 1, 1, 1, 1),
    "many": (7, 0, 20, 1, 0),
    "one-expert": (0, 30, 0, 0, 0),
}
BY_COUNTS = pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
#: Stacks of uncommon shapes that have scales.
ODD = (
    ("nf4", 64, (4, 1, 64)),
    ("nf4", 64, (1, 24, 64)),
    ("nf4", 64, (1, 1, 64)),
    ("nf4", 64, (4, 64, 2)),
    ("nf4", 64, (4, 32, 36)),
    ("nf4", 128, (4, 16, 96)),
    ("fp4", 256, (4, 64, 100)),
    ("int8", 64, (4, 64, 33)),
    ("fp8", 64, (3, 64, 99)),
)
#: Operators whose result on the host, or whose shape, depends on data: a device has to finish for them.
WAITING = (
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "unique",
    "is_nonzero",
    "equal",
    "repeat_interleave.Tensor",
)


class Recorder(TorchDispatchMode):
    """Names of the operators that run; those that wait for a device raise."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().partition("::")[2]
        assert not name.startswith(WAITING), f"{name} waits for the device"
        self.names.append(name.partition(".")[0])
        return func(*args, **(kwargs or {}))


def run(x: Tensor, stack: PackedStack, offsets: Tensor) -> Tensor | None:
    """The function on a stack."""
    scales = (stack.absmax, stack.nested_absmax, stack.nested_offset)
    return grouped_mm.grouped_linear(x, Operands(stack.packed, *scales, stack.quant_type), offsets)


def by_linear(x: Tensor, weights: Tensor, offsets: Tensor) -> Tensor:
    """`F.linear` per expert on float weights; zeros for the rows of no expert."""
    y = x.new_zeros(x.shape[0], weights.shape[1])
    for weight, (start, end) in zip(weights, pairwise(offsets.tolist()), strict=True):
        y[start:end] = linear(x[start:end], weight)
    return y


def reference_weights(stack: PackedStack) -> Tensor:
    """What the bytes stand for, by the specification: float64 ``[E, N, K]``."""
    experts = []
    for expert in range(stack.packed.shape[0]):
        scales = torch_ops.expert_absmax(stack.absmax, stack.nested_absmax, stack.nested_offset, expert)
        blocksize = 0 if scales is None else stack.blocksize
        experts.append(reference.dequantize(stack.packed[expert], scales, stack.quant_type, blocksize))
    return torch.stack(experts).double()


def assert_as_good_as_linear(y: Tensor | None, x: Tensor, stack: PackedStack, offsets: Tensor) -> None:
    """The error against float64 is at most 1.1 x that of dequantize + `F.linear`, or half of what rounding costs.

    The second bound matters where a result has so few elements that both errors are a matter of luck. float64 has no
    better reference than itself: as many roundings as there are products in a sum are allowed.
    """
    assert y is not None
    expected = reference.grouped_linear(x.double(), reference_weights(stack), offsets)
    baseline = by_linear(x, stack.dequantize(x.dtype), offsets)
    assert (y.dtype, y.shape, y.is_contiguous()) == (x.dtype, expected.shape, True)
    assert torch.isfinite(y).all()
    assert not y[int(offsets[-1]) :].any()
    expected[int(offsets[-1]) :] = 0  # these rows of `x` may hold anything
    error, allowed = ((value.double() - expected).norm().item() for value in (y, baseline))
    roundings = x.shape[1] if x.dtype == torch.float64 else 0.25
    rounding = roundings * torch.finfo(x.dtype).eps * expected.norm().item()
    assert error <= max(1.1 * allowed, rounding)


@pytest.fixture
def gemm_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """bitsandbytes' own fallback on the CPU in the place of its kernel on a device."""
    monkeypatch.setattr(cuda, "has_gemm_4bit", lambda _device, dtype: dtype in NATIVE_DTYPES)


@pytest.fixture
def one_expert_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for the weights of one expert in the buffer."""
    monkeypatch.setattr(grouped_mm, "_WEIGHTS_AT_ONCE", 1)


@pytest.fixture(params=["whole", "in-pairs", "one-by-one"])
def _room(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """How many experts of 24 x 128 the buffer has room for."""
    weights = {"whole": 1 << 29, "in-pairs": 2 * 24 * 128, "one-by-one": 1}
    monkeypatch.setattr(grouped_mm, "_WEIGHTS_AT_ONCE", weights[request.param])


@pytest.mark.usefixtures("_room")
@BY_COUNTS
@pytest.mark.parametrize(("quant_type", "double_quant"), storage_params())
def test_it_is_as_good_as_linear_in_every_storage(quant_type, double_quant, counts, device):
    """bfloat16, for few and many rows, with all weights unpacked at once or some at a time."""
    stack, _ = stack_and_control(quant_type, double_quant, (5, 24, 128), device=device)
    offsets = offsets_of(*counts, device=device)
    x = torch.randn(sum(counts), 128, device=device).to(BF16)
    with poisoned_memory():
        y = run(x, stack, offsets)
    assert_as_good_as_linear(y, x, stack, offsets)


@pytest.mark.usefixtures("_room")
@pytest.mark.parametrize("rest", [1, 12])
@pytest.mark.parametrize("counts", [*COUNTS.values(), (0,) * 5, (1, 0, 2, *[0] * 17)], ids=str)
def test_rows_of_no_expert_give_zeros(counts, rest, device):
    """What such rows hold, infinities too, reaches nothing."""
    stack, _ = stack_and_control("nf4", True, (len(counts), 24, 128), device=device)
    offsets = offsets_of(*counts, device=device)
    x = torch.randn(sum(counts) + rest, 128, device=device).to(BF16)
    expected = run(x, stack, offsets)
    x[sum(counts) :] = float("inf")
    with poisoned_memory():
        y = run(x, stack, offsets)
    assert_same_bits(y, expected)
    assert_as_good_as_linear(y, x, stack, offsets)


@pytest.mark.usefixtures("_room")
@pytest.mark.parametrize("rows", [3, 12], ids=["few", "many"])
def test_rows_before_the_first_expert_give_nan(rows):
    """A negative expert index cannot be refused without waiting; its rows are not given to another expert."""
    stack, _ = stack_and_control("nf4", False, (16, 24, 128))
    offsets, x = offsets_of(rows, *[0] * 15), torch.randn(rows, 128).to(BF16)
    expected = run(x, stack, offsets)
    offsets[0] = 2
    y = run(x, stack, offsets)
    assert y[:2].isnan().all()
    assert_same_bits(y[2:], expected[2:])


@pytest.mark.usefixtures("_room")
@pytest.mark.parametrize("rows", [1, 6], ids=["few", "many"])
@pytest.mark.parametrize(
    ("quant_type", "double_quant", "blocksize", "shape"),
    [
        *((*odd[:1], double_quant, *odd[1:]) for odd in ODD for double_quant in (False, True)),
        ("bf16", False, 64, (4, 7, 35)),
        ("fp16", False, 64, (4, 3, 1407)),
    ],
    ids=str,
)
def test_odd_sizes(quant_type, double_quant, blocksize, shape, rows):
    """Rows that are no multiple of 16 bytes, blocks across rows, one expert, one output, short blocks of scales."""
    stack, _ = stack_and_control(quant_type, double_quant, shape, blocksize)
    offsets = offsets_of(*[rows, 0, rows, rows + 2][: shape[0]])
    x = torch.randn(int(offsets[-1]) + 1, shape[2]).to(BF16)
    assert_as_good_as_linear(run(x, stack, offsets), x, stack, offsets)
    one = offsets_of(*[1, 0, 0, 0][: shape[0]])
    assert_as_good_as_linear(run(x[:1], stack, one), x[:1], stack, one)


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize("counts", [(1, 0, 0, 0, 0), (0, 2, 0, 1, 2)], ids=str)
def test_few_rows_in_every_dtype(counts, dtype, device):
    """Up to as many rows as experts run in any dtype, each by its own weight."""
    stack, _ = stack_and_control("nf4", True, (5, 24, 128), device=device)
    offsets = offsets_of(*counts, device=device)
    x = torch.randn(sum(counts), 128, device=device).to(dtype)
    assert_as_good_as_linear(run(x, stack, offsets), x, stack, offsets)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64], ids=dtype_name)
def test_many_rows_in_a_dtype_without_a_grouped_product_are_declined(dtype):
    """torch's grouped product would copy the offsets to the host: the caller's loop does that better."""
    stack, _ = stack_and_control("nf4", False, (5, 24, 128))
    assert run(torch.randn(6, 128, dtype=dtype), stack, offsets_of(6, 0, 0, 0, 0)) is None


def test_no_rows():
    """An empty result, in any dtype."""
    stack, _ = stack_and_control("nf4", False, (5, 24, 128))
    for dtype in DTYPES:
        y = run(torch.empty(0, 128, dtype=dtype), stack, offsets_of(0, 0, 0, 0, 0))
        assert (y.shape, y.dtype) == ((0, 24), dtype)


def test_rows_that_begin_off_a_boundary():
    """A view into the middle of memory is copied to where the product can read it."""
    stack, _ = stack_and_control("nf4", False, (2, 24, 64))
    x = torch.randn(12 * 64 + 1).to(BF16)[1:].view(12, 64)
    offsets = offsets_of(5, 7)
    assert x.data_ptr() % 16
    assert_as_good_as_linear(run(x, stack, offsets), x, stack, offsets)


@pytest.mark.parametrize("rows", [1, 8], ids=["few", "many"])
def test_autocast_leaves_it_alone(rows):
    """The product runs in the dtype of `x`, which the caller chose."""
    stack, _ = stack_and_control("nf4", False, (8, 24, 128))
    x, offsets = torch.randn(rows, 128), offsets_of(rows, *[0] * 7)
    for dtype, autocast in ((torch.float32, BF16), (BF16, torch.float16)):
        expected = run(x.to(dtype), stack, offsets)
        with torch.autocast("cpu", autocast):
            assert_same_bits(run(x.to(dtype), stack, offsets), expected)


# -- which way is taken, and that none of them waits --------------------------------------------------------------


def taken(x: Tensor, stack: PackedStack, offsets: Tensor) -> set[str]:
    """Which products ran, of those that there are."""
    with Recorder() as recorder:
        y = run(x, stack, offsets)
    assert_as_good_as_linear(y, x, stack, offsets)
    return {"bmm", "_grouped_mm", "gemm_4bit"} & set(recorder.names)


@pytest.mark.usefixtures("_room")
@pytest.mark.parametrize(("quant_type", "double_quant"), storage_params())
def test_nothing_waits_for_the_device(quant_type, double_quant):
    """No operator that runs has a result that the host needs; shapes alone decide which way is taken."""
    stack, _ = stack_and_control(quant_type, double_quant, (8, 24, 128))
    x = torch.randn(9, 128).to(BF16)
    assert taken(x[:2], stack, offsets_of(1, 0, 0, 1, 0, 0, 0, 0)) == {"bmm"}
    assert taken(x[:2], stack, offsets_of(0, 0, 0, 0, 0, 0, 0, 2)) == {"bmm"}
    assert taken(x[:3], stack, offsets_of(1, 0, 0, 1, 0, 0, 0, 1)) == {"_grouped_mm"}
    assert taken(x[:9], stack, offsets_of(0, 0, 0, 0, 0, 0, 9, 0)) == {"_grouped_mm"}


@pytest.mark.usefixtures("gemm_rows")
@pytest.mark.parametrize("dtype", NATIVE_DTYPES, ids=dtype_name)
@pytest.mark.parametrize(("quant_type", "double_quant"), storage_params())
def test_packed_bytes_are_multiplied_where_there_is_a_kernel(quant_type, double_quant, dtype):
    """4-bit weights of few rows go to `gemm_4bit` with the right scales; its fallback gives the bits of `F.linear`."""
    stack, _ = stack_and_control(quant_type, double_quant, (8, 24, 128))
    offsets = offsets_of(0, 1, 0, 0, 1, 0, 0, 0)
    x = torch.randn(2, 128).to(dtype)
    is_4bit = quant_type in ("nf4", "fp4")
    assert taken(x, stack, offsets) == ({"gemm_4bit"} if is_4bit else {"bmm"})
    if is_4bit:
        assert_same_bits(run(x, stack, offsets), by_linear(x, stack.dequantize(dtype), offsets))


@pytest.mark.usefixtures("gemm_rows")
def test_packed_bytes_are_not_multiplied_where_the_kernel_is_wrong_or_slow():
    """Rows that end within a block, more rows than launches pay for, and a dtype that it does not know."""
    crossing, _ = stack_and_control("nf4", False, (8, 32, 96))
    assert taken(torch.randn(1, 96).to(BF16), crossing, offsets_of(1, *[0] * 7)) == {"bmm"}
    stack, _ = stack_and_control("nf4", False, (20, 24, 64))
    assert taken(torch.randn(17, 64), stack, offsets_of(17, *[0] * 19)) == {"bmm"}
    assert taken(torch.randn(16, 64), stack, offsets_of(16, *[0] * 19)) == {"gemm_4bit"}
    assert taken(torch.randn(1, 64, dtype=torch.float64), stack, offsets_of(1, *[0] * 19)) == {"bmm"}


@pytest.fixture
def unpacked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Address of the buffer, and number of weights, of each unpacking."""
    seen: list[tuple[int, int]] = []

    def record(out: Tensor, *_: object) -> bool:
        seen.append((out.data_ptr(), out.numel()))
        return False

    monkeypatch.setattr(cuda, "dequantize_into", record)
    return seen


def test_no_more_experts_are_unpacked_than_can_be_hit(unpacked):
    """Fewer rows than experts unpack one expert each, more rows the whole stack once."""
    stack, _ = stack_and_control("nf4", False, (16, 24, 64))
    numel = 24 * 64
    for counts, experts in (((0, 1, 1), 2), ((0, 3, 3), 6), ((0, 15), 15), ((0, 50, 3), 16)):
        unpacked.clear()
        run(torch.randn(sum(counts), 64).to(BF16), stack, offsets_of(*counts, *[0] * (16 - len(counts))))
        assert [weights for _, weights in unpacked] == [experts * numel]


@pytest.mark.usefixtures("one_expert_at_once")
@pytest.mark.parametrize("rows", [4, 40], ids=["few", "many"])
def test_parts_are_unpacked_into_the_same_buffer(unpacked, rows):
    """What does not fit at once is unpacked part by part, in memory that is used again."""
    stack, _ = stack_and_control("nf4", False, (16, 24, 64))
    run(torch.randn(rows, 64).to(BF16), stack, offsets_of(rows, *[0] * 15))
    assert len(unpacked) == min(rows, 16)
    assert len({address for address, _ in unpacked}) == 1


@pytest.mark.parametrize("rows", [1, 3, 20])
@pytest.mark.parametrize(("quant_type", "double_quant"), storage_params())
def test_fake_tensors_get_a_shape(quant_type, double_quant, rows):
    """On tensors without data every way runs through: nothing is read."""
    stack, _ = stack_and_control(quant_type, double_quant, (8, 24, 128))
    operands = (torch.randn(rows, 128).to(BF16), stack.packed, stack.absmax, stack.nested_absmax, stack.nested_offset)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = [None if tensor is None else mode.from_tensor(tensor) for tensor in operands]
        offsets = mode.from_tensor(offsets_of(rows, *[0] * 7))
        y = grouped_mm.grouped_linear(fake[0], Operands(*fake[1:], quant_type), offsets)
    assert (tuple(y.shape), y.dtype) == ((rows, 24), BF16)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("rows", [1, 8, 64])
def test_a_device_says_that_nothing_waits(rows):
    """torch's own check for synchronizing calls finds none, once codebooks are on the device."""
    stack, _ = stack_and_control("nf4", True, (32, 64, 128), device="cuda")
    x, offsets = torch.randn(rows, 128, device="cuda").to(BF16), offsets_of(rows, *[0] * 31, device="cuda")
    if run(x, stack, offsets) is None:
        pytest.skip("no grouped product on this device")
    torch.cuda.set_sync_debug_mode("error")
    try:
        y = run(x, stack, offsets)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_as_good_as_linear(y, x, stack, offsets)


# -- where there are kernels --------------------------------------------------------------------------------------


@pytest.fixture
def capability(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """Sets the architecture of the CUDA devices that the rule sees."""
    cuda._has_cutlass.cache_clear()

    def set_major(major: int) -> None:
        cuda._has_cutlass.cache_clear()
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (major, 0))

    monkeypatch.setattr(torch.version, "hip", None)
    yield set_major
    cuda._has_cutlass.cache_clear()


def test_torchs_grouped_product_is_used_where_it_is_a_kernel(capability, monkeypatch):
    """bfloat16 on the architectures that torch has it for; its loops elsewhere read the offsets on the host."""
    device = torch.device("cuda", 0)
    for major, expected in ((7, False), (8, False), (9, True), (10, True), (12, False)):
        capability(major)
        assert cuda.has_grouped_mm(device, BF16) is expected
    capability(9)
    assert not any(cuda.has_grouped_mm(device, dtype) for dtype in DTYPES if dtype != BF16)
    assert cuda.has_grouped_mm(torch.device("cpu"), BF16)
    assert not any(cuda.has_grouped_mm(torch.device(name), BF16) for name in ("xpu", "mps", "meta"))
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert not cuda.has_grouped_mm(device, BF16)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.delattr(torch.nn.functional, "grouped_mm")  # torch before 2.10
    assert not cuda.has_grouped_mm(device, BF16)


def test_packed_products_need_a_kernel_of_the_device():
    """bitsandbytes' fallback, which unpacks, does not count as one."""
    device = torch.device("cpu")
    assert not cuda.has_gemm_4bit(device, BF16)
    library = torch.library.Library("bitsandbytes", "IMPL")
    library.impl("gemm_4bit", lambda *args, **kwargs: None, "CPU")
    try:
        assert all(cuda.has_gemm_4bit(device, dtype) for dtype in NATIVE_DTYPES)
        assert not cuda.has_gemm_4bit(device, torch.float64)
    finally:
        library._destroy()
    assert not cuda.has_gemm_4bit(device, BF16)


def test_devices_other_than_the_cpu_take_it_where_bits_do_not_matter(monkeypatch):
    """Chosen by the device of the rows; the exact product is not its business, and where it declines another is."""
    stack, _ = stack_and_control("nf4", False, (8, 24, 128))
    scales = (stack.absmax, stack.nested_absmax, stack.nested_offset)
    tensors = [torch.randn(3, 128).to(BF16), stack.packed, *scales, offsets_of(3, *[0] * 7)]
    operands = [None if tensor is None else tensor.to("meta") for tensor in tensors]
    answers = [torch.zeros(3, 24), None]
    monkeypatch.setattr(grouped_mm, "grouped_linear", lambda *_: answers.pop(0))
    assert torch_ops.grouped_linear(*operands, "nf4", False, exact=False).device.type == "cpu"  # what was answered
    for exact, left in ((True, 1), (False, 0)):
        with pytest.raises(NotImplementedError, match="meta tensor"):  # other ways read the offsets
            torch_ops.grouped_linear(*operands, "nf4", False, exact=exact)
        assert len(answers) == left
