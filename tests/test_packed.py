"""`PackedStack`: experts are packed independently, sizes follow from the tensors, errors leave the stack whole."""

import copy
import pickle

import pytest
import torch

from hf_qmoe.ops import formats
from hf_qmoe.packed import PackedStack
from tests.support.oracle import (
    DTYPES,
    PASSTHROUGH,
    SCALED,
    assert_same_bits,
    bnb_quantize,
    control_weights,
    dtype_name,
    stack_and_control,
    storage_params,
)


def assert_same_stack(actual: PackedStack, expected: PackedStack) -> None:
    """Same format, same tensors, bit for bit."""
    assert actual.quant_type == expected.quant_type
    assert actual.tensors().keys() == expected.tensors().keys()
    for name, tensor in expected.tensors().items():
        assert_same_bits(getattr(actual, name), tensor)


@pytest.mark.parametrize("double_quant", [False, True], ids=["plain", "double"])
@pytest.mark.parametrize("quant_type", formats.QUANT_TYPES)
@pytest.mark.parametrize("blocksize", [32, 64, 128])
@pytest.mark.parametrize("columns", [8, 32, 48, 64, 96, 100])
def test_each_expert_is_packed_as_if_alone(columns, blocksize, quant_type, double_quant):
    """Packing a stack equals packing its experts one by one, for every in_features and block size, or is refused."""
    if quant_type in ("int8", "fp8") and blocksize == 32:
        blocksize = 256  # 8-bit formats start at 64; the sizes tried are as many
    weights = torch.randn(3, 24, columns)
    chosen = formats.choose_blocksize(24, columns, quant_type, blocksize)
    if chosen is None:
        with pytest.raises(ValueError, match=f"no block size that {quant_type} supports divides .*24 x {columns}"):
            PackedStack.from_float(weights, quant_type, blocksize, double_quant)
        return

    stack = PackedStack.from_float(weights, quant_type, blocksize, double_quant)

    assert stack.blocksize == chosen
    for expert in range(3):
        alone = PackedStack.from_float(weights[expert : expert + 1], quant_type, blocksize, double_quant)
        for name, tensor in alone.tensors().items():
            assert_same_bits(getattr(stack, name)[expert], tensor[0])
    for dtype in DTYPES:
        values = stack.dequantize(dtype)
        assert torch.isfinite(values).all()
        assert_same_bits(values, control_weights(weights, quant_type, chosen, stack.double_quant, dtype))


@pytest.mark.parametrize("device_shape", [(3, 24, 128), (2, 64, 100)], ids=["in-rows", "across-rows"])
@pytest.mark.parametrize("quant_type", SCALED)
def test_scales_are_per_row_where_blocks_lie_within_rows(quant_type, device_shape, device):
    """`absmax` is `[E, N, K / blocksize]` if the block size divides K, else `[E, G]`; values are bitsandbytes'."""
    experts, rows, columns = device_shape
    weights = torch.randn(device_shape, device=device)
    stack = PackedStack.from_float(weights, quant_type, 64)
    blocks = rows * columns // 64
    assert stack.absmax.shape == ((experts, rows, columns // 64) if columns % 64 == 0 else (experts, blocks))
    for expert in range(experts):
        _, state = bnb_quantize(weights[expert], quant_type, 64)
        assert_same_bits(stack.absmax[expert].reshape(-1), state.absmax)


@pytest.mark.parametrize("quant_type", SCALED)
@pytest.mark.parametrize(("rows", "nested"), [(16, 1), (32, 1), (40, 2), (64, 2)], ids=["128", "256", "320", "512"])
def test_double_quantized_scales_are_compressed_per_expert(rows, nested, quant_type, device):
    """Codes, nested scales and offset are bitsandbytes' for each expert alone, with or without a rest beyond 256."""
    weights = torch.randn(2, rows, 512, device=device)
    stack = PackedStack.from_float(weights, quant_type, 64, double_quant=True)
    assert stack.absmax.shape == (2, rows, 8)
    assert stack.absmax.dtype == torch.uint8
    assert stack.nested_absmax.shape == (2, nested)
    assert stack.nested_offset.shape == (2,)
    for expert in range(2):
        codes, state = bnb_quantize(weights[expert], quant_type, 64, double_quant=True)
        assert_same_bits(stack.packed[expert], codes.view(rows, -1))
        assert_same_bits(stack.absmax[expert].reshape(-1), state.absmax)
        assert_same_bits(stack.nested_absmax[expert], state.state2.absmax)
        assert_same_bits(stack.nested_offset[expert], state.offset)


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize(("quant_type", "double_quant"), storage_params())
def test_one_expert_is_unpacked_into_memory_of_its_own(quant_type, double_quant, dtype, device):
    """`dequantize_expert` gives the expert of `dequantize`, and a later call does not overwrite it."""
    stack, weights = stack_and_control(quant_type, double_quant, (3, 24, 128), dtype=dtype, device=device)
    experts = [stack.dequantize_expert(e, dtype) for e in range(3)]
    for expert, expected in zip(experts, weights, strict=True):
        assert_same_bits(expert, expected)
    experts[0].zero_()
    assert_same_bits(stack.dequantize(dtype), weights)


@pytest.mark.parametrize(("quant_type", "double_quant"), storage_params())
def test_sizes_follow_from_the_tensors(quant_type, double_quant):
    """Every size is derived: experts, features, block size, weights and bytes agree with what was asked for."""
    stack = PackedStack.empty(3, 32, 128, quant_type, 64, double_quant)
    bits = formats.get_format(quant_type).bits
    blocks = 0 if quant_type in PASSTHROUGH else 32 * 128 // 64
    scale_bytes = blocks + 4 * -(-blocks // 256) + 4 if double_quant else 4 * blocks

    assert (stack.num_experts, stack.out_features, stack.in_features) == (3, 32, 128)
    assert stack.blocksize == (64 if blocks else 0)
    assert stack.double_quant == double_quant
    assert stack.numel == 3 * 32 * 128
    assert stack.nbytes == 3 * (32 * 128 * bits // 8 + scale_bytes)


@pytest.mark.parametrize(("quant_type", "double_quant"), storage_params())
def test_an_empty_stack_stands_for_zeros_in_its_final_shapes(quant_type, double_quant):
    """`empty` makes the tensors that `from_float` fills: same shapes and dtypes, all zero, standing for zeros."""
    empty = PackedStack.empty(2, 16, 128, quant_type, 64, double_quant)
    filled, _ = stack_and_control(quant_type, double_quant, (2, 16, 128))
    assert {n: (t.shape, t.dtype) for n, t in empty.tensors().items()} == {
        n: (t.shape, t.dtype) for n, t in filled.tensors().items()
    }
    assert all((t == 0).all() for t in empty.tensors().values())
    assert (empty.dequantize(torch.float32) == 0).all()


@pytest.mark.parametrize("quant_type", PASSTHROUGH)
def test_16_bit_formats_ignore_double_quantization(quant_type):
    """Without scales there is nothing to compress: the stack is the plain one."""
    weights = torch.randn(2, 8, 16)
    stack = PackedStack.from_float(weights, quant_type, 64, double_quant=True)
    assert not stack.double_quant
    assert_same_stack(stack, PackedStack.from_float(weights, quant_type, 64))


def test_16_bit_formats_hold_shapes_that_no_block_size_divides():
    """The fallback named in the error works: any shape can be stored as bf16."""
    weights = torch.randn(2, 3, 5)
    stack = PackedStack.from_float(weights, "bf16", 64)
    assert_same_bits(stack.dequantize(torch.bfloat16), weights.bfloat16())


@pytest.mark.parametrize(("quant_type", "double_quant"), storage_params())
def test_overwriting_one_expert_leaves_the_others(quant_type, double_quant):
    """`quantize_expert_` packs into the existing tensors and touches one expert."""
    weights = torch.randn(3, 16, 128)
    stack = PackedStack.from_float(weights, quant_type, 64, double_quant)
    pointers = {n: t.data_ptr() for n, t in stack.tensors().items()}
    weights[1] = torch.randn(16, 128)

    stack.quantize_expert_(1, weights[1])

    assert {n: t.data_ptr() for n, t in stack.tensors().items()} == pointers
    assert_same_stack(stack, PackedStack.from_float(weights, quant_type, 64, double_quant))


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (torch.zeros(128, 16), r"expert 1 has shape \(128, 16\), expected \(16, 128\)"),
        (torch.zeros(16, 64), r"expert 1 has shape \(16, 64\), expected \(16, 128\)"),
        (torch.full((16, 128), float("nan")), r"NaN|not finite"),
        (torch.full((16, 128), float("inf")), r"infinite|not finite"),
    ],
    ids=["transposed", "narrow", "nan", "inf"],
)
@pytest.mark.parametrize(("quant_type", "double_quant"), storage_params())
def test_a_refused_expert_leaves_the_stack_as_it_was(quant_type, double_quant, weight, message):
    """Wrong shapes and values that are not finite raise before anything is overwritten."""
    stack, _ = stack_and_control(quant_type, double_quant, (3, 16, 128))
    before = copy.deepcopy(stack)
    with pytest.raises(ValueError, match=message):
        stack.quantize_expert_(1, weight)
    assert_same_stack(stack, before)


@pytest.mark.parametrize(("quant_type", "double_quant"), storage_params())
def test_packing_trainable_weights_makes_frozen_tensors(quant_type, double_quant):
    """Packed tensors carry no graph, although the weights they come from (a model's parameters) require gradients."""
    weights = torch.nn.Parameter(torch.randn(2, 16, 128))
    stack = PackedStack.from_float(weights, quant_type, 64, double_quant)
    assert {n: (t.requires_grad, t.grad_fn) for n, t in stack.tensors().items()} == dict.fromkeys(
        stack.tensors(), (False, None)
    )


@pytest.mark.parametrize(("quant_type", "double_quant"), storage_params())
def test_a_stack_of_no_experts_has_sizes_too(quant_type, double_quant):
    """A rank of expert parallelism may own no expert: the empty stack still knows its shapes."""
    stack = PackedStack.from_float(torch.zeros(0, 16, 128), quant_type, 64, double_quant)
    assert (stack.num_experts, stack.out_features, stack.in_features, stack.numel) == (0, 16, 128, 0)
    assert stack.blocksize == (0 if quant_type in PASSTHROUGH else 64)
    assert stack.dequantize(torch.float32).shape == (0, 16, 128)


@pytest.mark.parametrize("shape", [(16, 128), (1, 2, 16, 128)], ids=["matrix", "4-d"])
def test_what_is_not_a_stack_is_refused(shape):
    """The error shows the shape received."""
    with pytest.raises(ValueError, match=r"expected a stack \[E, N, K\], got \(" + ", ".join(map(str, shape))):
        PackedStack.from_float(torch.zeros(shape), "nf4", 64)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((3, 16, 33, "nf4", 64), "in_features=33 is odd"),
        ((3, 16, 128, "nf4", 48), "blocksize=48 is not supported"),
        ((3, 16, 128, "int4", 64), "unknown quant_type 'int4'"),
        ((3, 3, 100, "fp4", 64), r"no block size that fp4 supports divides an expert of 3 x 100 .*bf16"),
    ],
    ids=["odd", "blocksize", "format", "no-block-size"],
)
def test_a_stack_that_cannot_be_is_refused(arguments, message):
    """The constructor raises what `formats` raises, or names the shape and the way out."""
    with pytest.raises(ValueError, match=message):
        PackedStack.empty(*arguments)


def test_tensors_lists_what_exists_in_order():
    """Names come in the order in which the operators take them; absent scales are left out."""
    assert list(PackedStack.empty(1, 16, 64, "nf4", 64, True).tensors()) == [
        "packed",
        "absmax",
        "nested_absmax",
        "nested_offset",
    ]
    assert list(PackedStack.empty(1, 16, 64, "nf4", 64).tensors()) == ["packed", "absmax"]
    assert list(PackedStack.empty(1, 16, 64, "bf16", 64).tensors()) == ["packed"]


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))], ids=["copy", "pickle"])
@pytest.mark.parametrize(("quant_type", "double_quant"), storage_params())
def test_copies_are_equal_and_independent(quant_type, double_quant, duplicate):
    """`deepcopy` and pickle keep every byte and share none."""
    stack, weights = stack_and_control(quant_type, double_quant)
    other = duplicate(stack)
    assert_same_stack(other, stack)
    for tensor in other.tensors().values():
        tensor.zero_()
    assert_same_bits(stack.dequantize(torch.float32), weights)


def test_a_stack_made_on_the_meta_device_has_shapes_only():
    """A loader builds stacks on `meta` before it fills them."""
    stack = PackedStack.empty(3, 16, 128, "nf4", 64, True, device="meta")
    assert all(t.is_meta for t in stack.tensors().values())
    assert (stack.num_experts, stack.out_features, stack.in_features, stack.blocksize) == (3, 16, 128, 64)
