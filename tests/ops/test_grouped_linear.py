"""The grouped product: each expert's rows equal `F.linear` on bitsandbytes' own dequantized weight, bit for bit."""

import threading
import weakref
from itertools import pairwise

import pytest
import torch
from torch.nn.functional import linear

from hf_qmoe.ops import cpu, native, reference, torch_ops
from hf_qmoe.ops.schema import dequantize_stack, grouped_linear
from hf_qmoe.packed import PackedStack
from tests.support.oracle import (
    DTYPES,
    PASSTHROUGH,
    assert_same_bits,
    control_weights,
    dtype_name,
    offsets_of,
    poisoned_memory,
    stack_and_control,
    storage_params,
)


def run(x: torch.Tensor, stack: PackedStack, offsets: torch.Tensor, transpose: bool = False) -> torch.Tensor:
    """The operator on a stack."""
    scales = (stack.absmax, stack.nested_absmax, stack.nested_offset)
    return grouped_linear(x, stack.packed, *scales, offsets, stack.quant_type, transpose)


def expected_product(
    x: torch.Tensor, weights: torch.Tensor, offsets: torch.Tensor, transpose: bool = False
) -> torch.Tensor:
    """`F.linear` per expert on float weights; zeros for the rows of no expert."""
    y = x.new_zeros(x.shape[0], weights.shape[2 if transpose else 1])
    for expert, (start, end) in enumerate(pairwise(offsets.tolist())):
        if start < end:
            weight = weights[expert].clone()  # at an aligned address: the bits of `F.linear` can depend on that
            y[start:end] = linear(x[start:end], weight.t() if transpose else weight)
    return y


@pytest.mark.parametrize("transpose", [False, True], ids=["forward", "transpose"])
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize(("quant_type", "double_quant"), storage_params())
def test_each_experts_rows_equal_linear_bit_for_bit(quant_type, double_quant, dtype, transpose, device):
    """In every storage and dtype, in and out of grad mode, with experts without tokens and rows of no expert."""
    stack, weights = stack_and_control(quant_type, double_quant, (5, 24, 128), dtype=dtype, device=device)
    offsets = offsets_of(3, 0, 17, 1, 0, device=device)
    x = torch.randn(26, 24 if transpose else 128, device=device).to(dtype)
    expected = expected_product(x, weights, offsets, transpose)

    with poisoned_memory():
        torch_ops.release_scratch()
        tracked = run(x.clone().requires_grad_(), stack, offsets, transpose)
        with torch.no_grad():
            untracked = run(x, stack, offsets, transpose)
        with torch.inference_mode():
            inference = run(x, stack, offsets, transpose)

    assert tracked.requires_grad
    assert not untracked.requires_grad
    for result in (tracked.detach(), untracked, inference):
        assert_same_bits(result, expected)


@pytest.mark.parametrize("quant_type", ["nf4", "fp4", "int8", "fp8"])
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize(("rows", "columns", "blocksize"), [(24, 96, 64), (64, 100, 64), (8, 80, 128), (64, 36, 256)])
def test_blocks_that_cross_rows_scale_their_own_weights(quant_type, dtype, rows, columns, blocksize):
    """The product is right for an in_features that the block size does not divide."""
    stack, weights = stack_and_control(quant_type, False, (3, rows, columns), blocksize, dtype)
    offsets = offsets_of(2, 4, 1)
    x = torch.randn(7, columns).to(dtype)
    assert stack.blocksize == blocksize
    assert columns % blocksize
    assert_same_bits(run(x, stack, offsets), expected_product(x, weights, offsets))


@pytest.mark.parametrize("transpose", [False, True], ids=["forward", "transpose"])
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize(
    ("quant_type", "rows", "columns"),
    [("int8", 64, 33), ("fp8", 64, 99), ("bf16", 65, 35), ("fp16", 7, 1407), ("nf4", 65, 64), ("nf4", 64, 34)],
)
def test_odd_sizes_equal_linear_bit_for_bit(quant_type, rows, columns, dtype, transpose):
    """Rows that begin off a cache line give the bits of `F.linear` too: its kernels depend on where operands lie."""
    stack, weights = stack_and_control(quant_type, False, (4, rows, columns), dtype=dtype)
    offsets = offsets_of(2, 3, 5, 7)
    x = torch.randn(17, rows if transpose else columns).to(dtype)
    y = run(x, stack, offsets, transpose)
    assert_same_bits(y, expected_product(x, weights, offsets, transpose))


@pytest.mark.parametrize(("quant_type", "double_quant"), storage_params())
def test_the_operators_follow_the_specification(quant_type, double_quant):
    """In float64 the product is `reference.grouped_linear` on the weights that `reference.dequantize` reads."""
    stack, _ = stack_and_control(quant_type, double_quant, (3, 16, 128))
    experts = []
    for expert in range(3):
        scales = torch_ops.expert_absmax(stack.absmax, stack.nested_absmax, stack.nested_offset, expert)
        experts.append(reference.dequantize(stack.packed[expert], scales, quant_type, 64))
    offsets = offsets_of(4, 0, 3)
    x = torch.randn(9, 128, dtype=torch.float64)

    expected = reference.grouped_linear(x, torch.stack(experts).double(), offsets)

    assert expected[7:].abs().max() == 0
    torch.testing.assert_close(run(x, stack, offsets), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize(
    "counts",
    [(257, 0, 3), (0, 0, 257), (1, 1, 1), (0, 0, 0), (0, 5, 0)],
    ids=["257-rows-first", "257-rows-last", "one-each", "no-rows", "one-expert"],
)
@pytest.mark.parametrize("rest", [0, 1, 300], ids=lambda n: f"rest{n}")
def test_every_distribution_of_rows(counts, rest, dtype, device):
    """Crowded, single and empty experts, no tokens at all, and rows past the last offset, which give zeros."""
    stack, weights = stack_and_control("nf4", False, (3, 16, 64), dtype=dtype, device=device)
    offsets = offsets_of(*counts, device=device)
    x = torch.randn(sum(counts) + rest, 64, device=device).to(dtype)
    with poisoned_memory():
        y = run(x, stack, offsets)
    assert_same_bits(y, expected_product(x, weights, offsets))


@pytest.mark.parametrize("transpose", [False, True], ids=["forward", "transpose"])
@pytest.mark.parametrize(("quant_type", "double_quant"), storage_params())
@pytest.mark.parametrize("shape", [(1, 24, 64), (3, 1, 64), (1, 1, 64), (2, 64, 2)], ids=str)
def test_degenerate_shapes(quant_type, double_quant, shape, transpose):
    """One expert, one row, both, and rows of two weights."""
    stack, weights = stack_and_control(quant_type, double_quant, shape)
    offsets = offsets_of(*range(1, shape[0] + 1))
    x = torch.randn(int(offsets[-1]), shape[1] if transpose else shape[2])
    assert_same_bits(run(x, stack, offsets, transpose), expected_product(x, weights, offsets, transpose))


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize(
    "view",
    [
        pytest.param(lambda x: x.t().contiguous().t(), id="transposed"),
        pytest.param(lambda x: torch.cat([x, x], dim=1)[:, : x.shape[1]], id="column-slice"),
        pytest.param(lambda x: x.repeat_interleave(2, dim=0)[::2], id="row-stride"),
        pytest.param(lambda x: x[:1].expand(x.shape), id="expanded"),
    ],
)
def test_the_strides_of_x_change_nothing(view, dtype):
    """A non-contiguous `x` gives the bits of its contiguous copy and is left as it was."""
    stack, weights = stack_and_control("nf4", False, (3, 16, 64), dtype=dtype)
    offsets = offsets_of(2, 3, 1)
    x = view(torch.randn(6, 64).to(dtype))
    before = x.clone(memory_format=torch.contiguous_format)
    assert not x.is_contiguous()

    assert_same_bits(run(x, stack, offsets), expected_product(before, weights, offsets))
    assert_same_bits(x, before)


@pytest.mark.parametrize("autocast", [torch.bfloat16, torch.float16], ids=dtype_name)
def test_autocast_leaves_the_operator_alone(autocast):
    """The product runs in the dtype of `x`, which the caller chose; autocast neither changes it nor the bits."""
    stack, weights = stack_and_control("nf4")
    offsets = offsets_of(2, 3, 1, 0)
    x = torch.randn(6, 64)
    with torch.autocast("cpu", autocast):
        y = run(x, stack, offsets)
    assert_same_bits(y, expected_product(x, weights, offsets))


@pytest.mark.parametrize(
    "bounds",
    [[1, 2, 4, 4], [0, 3, 2, 4], [0, 2, 4, 5], [-1, 2, 4, 4]],
    ids=["not-from-0", "falling", "beyond-x", "negative"],
)
def test_offsets_that_cover_no_rows_or_foreign_rows_are_refused(bounds):
    """Offsets that do not rise from 0 to at most S would leave rows unwritten; they raise and are shown."""
    stack, _ = stack_and_control("nf4", False, (3, 16, 64))
    with pytest.raises(ValueError, match=r"expert_offsets must rise from 0 to at most 4, got \[" + str(bounds[0])):
        run(torch.randn(4, 64), stack, torch.tensor(bounds))


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize(("quant_type", "double_quant"), storage_params())
def test_dequantize_stack_is_bitsandbytes_per_expert(quant_type, double_quant, dtype, device):
    """The whole stack unpacks to what bitsandbytes gives for each expert, in `dtype`, in memory of its own."""
    stack, weights = stack_and_control(quant_type, double_quant, (3, 24, 128), dtype=dtype, device=device)
    with poisoned_memory():
        torch_ops.release_scratch()
        values = dequantize_stack(
            stack.packed, stack.absmax, stack.nested_absmax, stack.nested_offset, quant_type, dtype
        )
    assert_same_bits(values, weights)
    assert values.untyped_storage().data_ptr() != stack.packed.untyped_storage().data_ptr()


def test_only_experts_with_rows_are_unpacked(monkeypatch):
    """An expert without tokens costs nothing: it is not unpacked."""
    stack, _ = stack_and_control("nf4", False, (5, 16, 64))
    unpacked = []
    original = cpu.dequantize_into

    def record(out, packed, *args):
        unpacked.append((packed.data_ptr() - stack.packed.data_ptr()) // stack.packed[0].nbytes)
        return original(out, packed, *args)

    monkeypatch.setattr(native, "dequantize_into", lambda *_: False)
    monkeypatch.setattr(cpu, "dequantize_into", record)
    run(torch.randn(4, 64), stack, offsets_of(0, 3, 0, 0, 1))

    assert unpacked == [1, 4]


def test_calls_of_other_shapes_and_dtypes_do_not_disturb_each_other():
    """Growing, shrinking and changing the dtype of the reused buffer between calls leaves each result right."""
    cases = []
    for quant_type, shape, dtype in [
        ("nf4", (2, 8, 64), torch.float32),
        ("int8", (3, 64, 256), torch.float32),
        ("nf4", (2, 32, 128), torch.bfloat16),
        ("fp8", (2, 8, 64), torch.float64),
        ("bf16", (2, 24, 64), torch.bfloat16),
        ("fp4", (2, 128, 128), torch.bfloat16),
        ("nf4", (2, 4, 64), torch.float16),
    ]:
        stack, weights = stack_and_control(quant_type, False, shape, dtype=dtype)
        x, offsets = torch.randn(5, shape[2]).to(dtype), offsets_of(2, 3, *[0] * (shape[0] - 2))
        cases.append((x, stack, offsets, expected_product(x, weights, offsets)))

    torch_ops.release_scratch()
    results = [(run(x, stack, offsets), expected) for _ in range(2) for x, stack, offsets, expected in cases]
    results += [(run(x, stack, offsets), expected) for x, stack, offsets, expected in reversed(cases)]

    for result, expected in results:
        assert_same_bits(result, expected)


def test_threads_do_not_share_a_buffer():
    """Two threads on different stacks of one dtype, at the same time, each get their own weights' products."""
    failures = []
    barrier = threading.Barrier(2)

    def work(index: int) -> None:
        generator = torch.Generator().manual_seed(index)
        weights = torch.randn(2, 256, 512, generator=generator)
        stack, offsets = PackedStack.from_float(weights, "nf4", 64), offsets_of(1, 1)
        x = torch.randn(2, 512, generator=generator)
        expected = expected_product(x, control_weights(weights, "nf4", 64, False, x.dtype), offsets)
        barrier.wait(timeout=60)
        failures.extend(index for _ in range(300) if not torch.equal(run(x, stack, offsets), expected))

    threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)

    assert not any(thread.is_alive() for thread in threads)
    assert failures == []


@pytest.fixture
def buffers(monkeypatch):
    """Weak references to the memory behind each buffer that the CPU path unpacks into."""
    seen = []
    original = cpu.dequantize_into

    def record(out, *args):
        seen.append((out.data_ptr(), weakref.ref(out if out._base is None else out._base)))
        return original(out, *args)

    monkeypatch.setattr(native, "dequantize_into", lambda *_: False)
    monkeypatch.setattr(cpu, "dequantize_into", record)
    torch_ops.release_scratch()
    yield seen
    torch_ops.release_scratch()


def test_one_buffer_serves_all_experts_and_is_freed_on_release(buffers):
    """The same memory is used again by each expert and smaller stack, lives on between calls, and can be freed."""
    large, _ = stack_and_control("nf4", False, (3, 32, 128))
    small, _ = stack_and_control("int8", False, (2, 8, 64))
    run(torch.randn(3, 128), large, offsets_of(1, 1, 1))
    run(torch.randn(2, 64), small, offsets_of(1, 1))

    assert len(buffers) == 5
    assert len({pointer for pointer, _ in buffers}) == 1
    assert buffers[0][1]() is not None

    torch_ops.release_scratch()

    assert all(reference() is None for _, reference in buffers)
    x = torch.randn(3, 128)
    weights = large.dequantize(torch.float32)
    assert_same_bits(run(x, large, offsets_of(1, 1, 1)), expected_product(x, weights, offsets_of(1, 1, 1)))


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize("quant_type", ["nf4", "fp4", "int8", "fp8", "bf16", "fp16"])
def test_torch_alone_unpacks_into_the_buffer_too(quant_type, dtype, monkeypatch):
    """Without kernels and without bitsandbytes' library, and for 16-bit weights read in another dtype."""
    for module in (native, cpu):
        monkeypatch.setattr(module, "dequantize_into", lambda *_: False)
    torch_ops.release_scratch()
    stack, weights = stack_and_control(quant_type, False, (3, 8, 64), dtype=dtype)
    addresses = set()
    for expert in range(3):
        scales = torch_ops.expert_absmax(stack.absmax, None, None, expert)
        values = torch_ops.dequantize_expert(stack.packed[expert], scales, quant_type, dtype)
        assert_same_bits(values, weights[expert])
        addresses.add(values.data_ptr())
    is_view = dtype == PASSTHROUGH.get(quant_type)  # bytes that are values already
    assert addresses == {expert.data_ptr() for expert in stack.packed} if is_view else len(addresses) == 1


def test_a_larger_stack_replaces_the_buffer(buffers):
    """The buffer grows by being replaced: the smaller one is freed, not kept beside it."""
    small, _ = stack_and_control("nf4", False, (1, 8, 64))
    large, _ = stack_and_control("nf4", False, (1, 32, 128))
    run(torch.randn(1, 64), small, offsets_of(1))
    run(torch.randn(1, 128), large, offsets_of(1))
    (_, first), (_, second) = buffers
    assert first() is None
    assert second() is not None


@pytest.mark.parametrize("quant_type", ["nf4", "int8", "bf16"])
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_a_buffer_made_in_inference_mode_serves_training(quant_type, dtype):
    """Evaluating under `inference_mode` before training leaves no inference tensor behind that later calls trip on."""
    stack, weights = stack_and_control(quant_type, False, (2, 8, 64), dtype=dtype)
    offsets = offsets_of(1, 2)
    x = torch.randn(3, 64).to(dtype).requires_grad_()
    torch_ops.release_scratch()
    with torch.inference_mode():
        run(x.detach(), stack, offsets)
        stack.dequantize_expert(0, dtype)

    y = run(x, stack, offsets)
    y.float().sum().backward()
    expert = stack.dequantize_expert(1, dtype)

    assert_same_bits(y.detach(), expected_product(x.detach(), weights, offsets))
    assert x.grad is not None
    assert not expert.is_inference()


def test_the_buffer_is_on_the_device_of_the_weights(monkeypatch):
    """Under another default device (`torch.set_default_device`) the native code still gets CPU memory to write to."""
    stack, weights = stack_and_control("nf4", False, (1, 8, 64))
    devices = []
    original = cpu.dequantize_into

    def check(out, *args):
        devices.append(out.device.type)
        return original(out, *args) if out.device.type == "cpu" else True  # else it would write to address 0

    monkeypatch.setattr(native, "dequantize_into", lambda *_: False)
    monkeypatch.setattr(cpu, "dequantize_into", check)
    torch_ops.release_scratch()
    with torch.device("meta"):
        values = stack.dequantize_expert(0, torch.float32)

    assert devices == ["cpu"]
    assert_same_bits(values, weights[0])
