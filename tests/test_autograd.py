"""What autograd computes and keeps: exact gradients, saved operands only, recycled buffers, row moves."""

import weakref
from collections.abc import Callable, Iterable
from functools import partial
from itertools import pairwise
from types import CellType, FunctionType

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

from hf_qmoe.autograd import frozen_grouped_linear, gather_tokens
from hf_qmoe.ops.combine import combine_experts
from hf_qmoe.ops.schema import grouped_linear
from hf_qmoe.packed import PackedStack
from hf_qmoe.routing import route
from tests.support.oracle import (
    DTYPES,
    assert_same_bits,
    dtype_name,
    offsets_of,
    recorded_saves,
    stack_and_control,
    storage_params,
)


E, N, K = 4, 24, 64
COUNTS = (3, 0, 5, 1)


def control(x: Tensor, weights: Tensor, offsets: Tensor) -> Tensor:
    """What anyone would write with dequantized weights, same sorted layout; rows of no expert give zeros."""
    bounds = offsets.tolist()
    rows = [linear(x[start:end], weights[e]) for e, (start, end) in enumerate(pairwise(bounds))]
    return torch.cat([*rows, x.new_zeros(x.shape[0] - bounds[-1], weights.shape[1])])


def operator(x: Tensor, stack: PackedStack, offsets: Tensor, transpose: bool = False) -> Tensor:
    """The operator on a stack, with `transpose`, which `frozen_grouped_linear` leaves to backward."""
    scales = (stack.absmax, stack.nested_absmax, stack.nested_offset)
    return grouped_linear(x, stack.packed, *scales, offsets, stack.quant_type, transpose)


@pytest.mark.parametrize("transpose", [False, True], ids=["forward", "transpose"])
@pytest.mark.parametrize(("quant_type", "double_quant"), storage_params())
def test_gradients_in_float64_are_those_of_finite_differences(quant_type, double_quant, transpose):
    """`gradcheck` and `gradgradcheck` pass for every storage and both orientations, with rows of no expert."""
    stack, _ = stack_and_control(quant_type, double_quant, (3, 4, 16))
    offsets = offsets_of(2, 0, 1)
    x = torch.randn(4, 4 if transpose else 16, dtype=torch.float64, requires_grad=True)
    function = partial(operator, stack=stack, offsets=offsets, transpose=transpose)
    assert torch.autograd.gradcheck(function, (x,))
    assert torch.autograd.gradgradcheck(function, (x,))


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize(("quant_type", "double_quant"), storage_params())
def test_gradients_equal_those_of_dequantized_weights_bit_for_bit(quant_type, double_quant, dtype, device):
    """Output and gradient are those of `F.linear` on bitsandbytes' weights, and the weights get none."""
    stack, weights = stack_and_control(quant_type, double_quant, (E, N, K), dtype=dtype, device=device)
    offsets = offsets_of(*COUNTS, device=device)
    x = torch.randn(sum(COUNTS) + 2, K, device=device).to(dtype)
    upstream = torch.randn(sum(COUNTS) + 2, N, device=device).to(dtype)
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()

    y = frozen_grouped_linear(ours, stack, offsets)
    y.backward(upstream)
    expected = control(theirs, weights, offsets)
    expected.backward(upstream)

    assert_same_bits(y.detach(), expected.detach())
    assert_same_bits(ours.grad, theirs.grad)
    assert (ours.grad[-2:] == 0).all()
    assert all(t.grad is None for t in stack.tensors().values())


@pytest.mark.parametrize("upstream", ["expanded", "transposed"])
def test_the_strides_of_the_gradient_change_nothing(upstream):
    """A gradient that is not contiguous (that of `sum()` is an expanded scalar) gives the bits of its copy."""
    stack, _ = stack_and_control("nf4")
    offsets = offsets_of(*COUNTS)
    x = torch.randn(sum(COUNTS), K, requires_grad=True)
    gradient = torch.ones(1).expand(9, N) if upstream == "expanded" else torch.randn(N, 9).t()
    assert not gradient.is_contiguous()

    (strided,) = torch.autograd.grad(frozen_grouped_linear(x, stack, offsets), x, gradient)
    (expected,) = torch.autograd.grad(frozen_grouped_linear(x, stack, offsets), x, gradient.contiguous())

    assert_same_bits(strided, expected)


def test_no_graph_is_built_for_an_input_without_gradient():
    """The frozen weights alone never make an output require a gradient."""
    stack, _ = stack_and_control("nf4")
    y = frozen_grouped_linear(torch.randn(9, K), stack, offsets_of(*COUNTS))
    assert not y.requires_grad
    assert y.grad_fn is None


def test_no_tokens_give_an_empty_gradient():
    """T = 0 passes forward and backward."""
    stack, _ = stack_and_control("nf4")
    x = torch.randn(0, K, requires_grad=True)
    y = frozen_grouped_linear(x, stack, offsets_of(0, 0, 0, 0))
    y.sum().backward()
    assert y.shape == (0, N)
    assert x.grad.shape == (0, K)


def test_a_graph_can_be_walked_twice():
    """`retain_graph=True` allows a second backward with the same gradient."""
    stack, _ = stack_and_control("nf4", True)
    x = torch.randn(9, K, requires_grad=True)
    y = frozen_grouped_linear(x, stack, offsets_of(*COUNTS)).square().sum()
    (first,) = torch.autograd.grad(y, x, retain_graph=True)
    (second,) = torch.autograd.grad(y, x)
    assert_same_bits(second, first)


def is_a_weight(tensor: Tensor) -> bool:
    """Whether a float tensor could be a dequantized expert or stack, in either orientation or flattened."""
    return tensor.is_floating_point() and tensor.numel() in (N * K, E * N * K)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=dtype_name)
@pytest.mark.parametrize(("quant_type", "double_quant"), storage_params())
def test_no_dequantized_weight_is_saved(quant_type, double_quant, dtype):
    """Nothing of an expert's or stack's size in a float dtype is kept, where the plain control keeps every expert."""
    stack, weights = stack_and_control(quant_type, double_quant, (E, N, K), dtype=dtype)
    x = torch.randn(9, K, dtype=dtype, requires_grad=True)
    with recorded_saves() as ours:
        frozen_grouped_linear(x, stack, offsets_of(*COUNTS))
    with recorded_saves() as theirs:
        control(x, weights, offsets_of(*COUNTS))

    assert [tuple(t.shape) for t in ours if is_a_weight(t)] == []
    assert len([t for t in theirs if is_a_weight(t)]) >= 3


@pytest.mark.parametrize(("quant_type", "double_quant"), storage_params())
def test_the_packed_operands_themselves_are_saved(quant_type, double_quant):
    """Bytes, every tensor of the scales and the offsets are kept through `save_for_backward`: the memory, no copy."""
    stack, _ = stack_and_control(quant_type, double_quant)
    offsets = offsets_of(*COUNTS)
    x = torch.randn(9, K, requires_grad=True)
    with recorded_saves() as saved:
        frozen_grouped_linear(x, stack, offsets)
    expected = {t.data_ptr() for t in (*stack.tensors().values(), offsets)}
    assert len(expected) == {False: 2 if stack.absmax is None else 3, True: 5}[double_quant]
    assert {t.data_ptr() for t in saved} == expected
    assert len(saved) == len(expected)


@pytest.mark.parametrize(("quant_type", "double_quant"), storage_params())
def test_saved_tensors_do_not_depend_on_the_routing(quant_type, double_quant):
    """All tokens to one expert, spread, or none kept by this rank: number, shapes and dtypes of saves are equal."""
    stack, _ = stack_and_control(quant_type, double_quant)
    x = torch.randn(12, K, requires_grad=True)
    profiles = set()
    for counts in [(12, 0, 0, 0), (0, 0, 0, 12), (3, 3, 3, 3), (1, 0, 0, 0), (0, 0, 0, 0)]:
        with recorded_saves() as saved:
            frozen_grouped_linear(x, stack, offsets_of(*counts))
        profiles.add(tuple((tuple(t.shape), t.dtype) for t in saved))
    assert len(profiles) == 1


def tensors_within(value: object, depth: int = 6) -> Iterable[Tensor]:
    """Tensors that a Python object holds: in attributes, containers, closures, defaults, partials."""
    if isinstance(value, Tensor):
        yield value
    if depth == 0 or isinstance(value, Tensor | type | str | bytes):
        return
    inner: list[object] = []
    if isinstance(value, dict):
        inner = list(value.values())
    elif isinstance(value, list | tuple | set | frozenset):
        inner = list(value)
    elif isinstance(value, CellType):
        inner = [value.cell_contents]
    elif isinstance(value, partial):
        inner = [value.func, *value.args, *value.keywords.values()]
    elif isinstance(value, FunctionType):
        inner = [*(value.__closure__ or ()), *(value.__defaults__ or ())]
    elif hasattr(value, "__dict__"):
        inner = list(vars(value).values())
    for item in inner:
        yield from tensors_within(item, depth - 1)


def test_no_attribute_of_the_graph_node_holds_a_tensor():
    """`ctx` carries the format and the orientation, never a tensor: autograd would not see one there."""
    stack, _ = stack_and_control("nf4", True)
    y = frozen_grouped_linear(torch.randn(9, K, requires_grad=True), stack, offsets_of(*COUNTS))
    attributes = vars(y.grad_fn)
    assert attributes["quant_type"] == "nf4"  # else the node no longer shows its attributes, and this proves nothing
    assert list(tensors_within(attributes)) == []


@pytest.mark.parametrize(("quant_type", "double_quant"), storage_params())
def test_only_saved_tensors_keep_the_weights_alive(quant_type, double_quant):
    """With the saved tensors replaced by copies, as offloading hooks do, the graph holds on to no packed tensor."""
    stack, weights = stack_and_control(quant_type, double_quant)
    offsets = offsets_of(*COUNTS)
    references = [weakref.ref(t) for t in (*stack.tensors().values(), offsets)]
    x = torch.randn(9, K, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().clone(), lambda t: t):
        y = frozen_grouped_linear(x, stack, offsets)

    del stack, offsets

    assert [reference() for reference in references] == [None] * len(references)
    y.sum().backward()  # and the copies are all that backward needs
    theirs = x.detach().clone().requires_grad_()
    control(theirs, weights, offsets_of(*COUNTS)).sum().backward()
    assert_same_bits(x.grad, theirs.grad)


@pytest.mark.parametrize(
    ("quant_type", "double_quant", "operand"),
    [
        ("nf4", False, "packed"),
        ("nf4", False, "absmax"),
        ("nf4", False, "expert_offsets"),
        ("fp4", True, "packed"),
        ("fp4", True, "absmax"),
        ("fp4", True, "nested_absmax"),
        ("fp4", True, "nested_offset"),
        ("int8", False, "packed"),
        ("int8", False, "absmax"),
        ("fp8", True, "nested_absmax"),
        ("bf16", False, "packed"),
        ("fp16", False, "expert_offsets"),
    ],
)
@pytest.mark.parametrize("through_view", [False, True], ids=["itself", "view"])
def test_overwriting_an_operand_between_forward_and_backward_raises(quant_type, double_quant, operand, through_view):
    """Any saved operand that is written to before backward is noticed, also through a view of one expert."""
    stack, _ = stack_and_control(quant_type, double_quant)
    offsets = offsets_of(*COUNTS)
    x = torch.randn(9, K, requires_grad=True)
    y = frozen_grouped_linear(x, stack, offsets)
    written = offsets if operand == "expert_offsets" else stack.tensors()[operand]

    with torch.no_grad():
        (written[:1] if through_view else written).zero_()

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_writing_before_forward_is_no_reason_to_complain():
    """Filling a stack in place and then using it trains: only writes after forward are errors."""
    stack, _ = stack_and_control("nf4", True)
    other, weights = stack_and_control("nf4", True)
    for name, tensor in stack.tensors().items():
        tensor.copy_(other.tensors()[name])
    x = torch.randn(9, K, requires_grad=True)
    frozen_grouped_linear(x, stack, offsets_of(*COUNTS)).sum().backward()
    theirs = x.detach().clone().requires_grad_()
    control(theirs, weights, offsets_of(*COUNTS)).sum().backward()
    assert_same_bits(x.grad, theirs.grad)


# Recycled buffers: weights are copied into one of a few slots when a layer runs, and the slot is used again later.

LAYERS, SLOTS, WIDTH = 8, 2, 64
OFFSETS = (5, 0, 4)
Product = Callable[[Tensor, PackedStack, Tensor], Tensor]


def fill(slot: PackedStack, stack: PackedStack) -> None:
    """Copies bytes and scales into a slot, as a streaming runtime does."""
    with torch.no_grad():
        for name, tensor in slot.tensors().items():
            tensor.copy_(stack.tensors()[name])


def run_layers(
    stacks: list[PackedStack],
    slots: list[PackedStack] | None,
    use_reentrant: bool | None,
    product: Product = frozen_grouped_linear,
) -> tuple[Tensor, Tensor, Tensor]:
    """Output, and gradients of the input and of a scale trained in each layer; `use_reentrant=None`: no checkpoint."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(sum(OFFSETS) + 1, WIDTH, generator=generator).requires_grad_()
    scales = torch.rand(LAYERS, WIDTH, generator=generator).requires_grad_()
    offsets = offsets_of(*OFFSETS)

    def layer(hidden: Tensor, scale: Tensor, index: int) -> Tensor:
        stack = stacks[index]
        if slots is not None:
            stack = slots[index % SLOTS]
            fill(stack, stacks[index])
        # The product comes last: nothing saved behind it may start the recomputation before its own backward does.
        return hidden + product(torch.tanh(hidden * scale), stack, offsets) / 4

    hidden = x
    for index in range(LAYERS):
        if use_reentrant is None:
            hidden = layer(hidden, scales[index], index)
        else:
            hidden = checkpoint(layer, hidden, scales[index], index, use_reentrant=use_reentrant)
    hidden.square().sum().backward()
    return hidden.detach(), x.grad, scales.grad


def layer_stacks(quant_type: str, double_quant: bool) -> tuple[list[PackedStack], list[PackedStack]]:
    """Stacks of all layers, each of a scale of its own, and empty slots."""
    stacks = [
        PackedStack.from_float(torch.randn(3, WIDTH, WIDTH) * (1 + i / 4), quant_type, 64, double_quant)
        for i in range(LAYERS)
    ]
    return stacks, [PackedStack.empty(3, WIDTH, WIDTH, quant_type, 64, double_quant) for _ in range(SLOTS)]


@pytest.mark.parametrize("use_reentrant", [False, True], ids=["non-reentrant", "reentrant"])
@pytest.mark.parametrize(("quant_type", "double_quant"), storage_params())
def test_weights_copied_into_recycled_slots_give_exact_gradients(quant_type, double_quant, use_reentrant):
    """8 layers in 2 slots under checkpointing: output and all gradients equal the run with a buffer per layer."""
    stacks, slots = layer_stacks(quant_type, double_quant)
    private = run_layers(stacks, None, None)
    recycled = run_layers(stacks, slots, use_reentrant)

    for actual, expected in zip(recycled, private, strict=True):
        assert_same_bits(actual, expected)
    for name, tensor in slots[0].tensors().items():  # backward ended with layer 0: the slots really were recycled
        assert_same_bits(tensor, stacks[0].tensors()[name])


@pytest.mark.parametrize("use_reentrant", [False, True], ids=["non-reentrant", "reentrant"])
@pytest.mark.parametrize(
    ("quant_type", "double_quant"), storage_params([("nf4", False), ("nf4", True), ("bf16", False)])
)
def test_checkpointing_alone_changes_no_bit(quant_type, double_quant, use_reentrant):
    """With a buffer per layer, checkpointed and plain runs agree exactly."""
    stacks, _ = layer_stacks(quant_type, double_quant)
    for actual, expected in zip(run_layers(stacks, None, use_reentrant), run_layers(stacks, None, None), strict=True):
        assert_same_bits(actual, expected)


@pytest.mark.parametrize(("quant_type", "double_quant"), storage_params())
def test_recycled_slots_without_checkpointing_raise(quant_type, double_quant):
    """Without recomputation the overwritten weights are gone, and backward says so."""
    stacks, slots = layer_stacks(quant_type, double_quant)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        run_layers(stacks, slots, None)


class _ClosureProduct(torch.autograd.Function):
    """The same product with the weights on `ctx`, where autograd does not see them."""

    @staticmethod
    def forward(ctx, x, stack, offsets):
        ctx.stack, ctx.offsets = stack, offsets
        return operator(x, stack, offsets)

    @staticmethod
    def backward(ctx, gradient):
        return operator(gradient, ctx.stack, ctx.offsets, transpose=True), None, None


def test_the_recycling_harness_notices_weights_outside_of_saved_tensors():
    """The mistake that the tests above are for gives wrong gradients here: they can fail."""
    stacks, slots = layer_stacks("nf4", False)
    _, expected, _ = run_layers(stacks, None, None)
    _, wrong, _ = run_layers(stacks, slots, False, product=_ClosureProduct.apply)
    assert not torch.allclose(wrong, expected, rtol=0.1, atol=0.1)


def routed(tokens: int, top_k: int, experts: int = 5):
    """A random routing, with indices of no expert among them."""
    return route(torch.randint(0, experts + 2, (tokens, top_k)), experts)


@pytest.mark.parametrize(("tokens", "top_k"), [(5, 1), (4, 2), (3, 4), (1, 3)])
def test_row_moves_pass_gradcheck(tokens, top_k):
    """First and second derivatives of gathering rows equal finite differences."""
    routing = routed(tokens, top_k)
    x = torch.randn(tokens, 3, dtype=torch.float64, requires_grad=True)

    def gather(t):
        return gather_tokens(t, routing.perm, routing.inverse, top_k)

    assert torch.autograd.gradcheck(gather, (x,))
    assert torch.autograd.gradgradcheck(gather, (x,))


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize(("tokens", "top_k"), [(17, 2), (6, 8), (0, 2), (1, 1)])
def test_rows_move_to_their_expert(tokens, top_k, dtype, device):
    """Row `s` of the gathered rows is that of the token routed there."""
    routing = route(torch.randint(0, 6, (tokens, top_k), device=device), 4)
    x = torch.randn(tokens, 5, device=device).to(dtype)

    rows = gather_tokens(x, routing.perm, routing.inverse, top_k)

    expected = [x[pair // top_k] for pair in routing.perm.tolist()]
    assert rows.shape == (tokens * top_k, 5)
    assert all(torch.equal(row, e) for row, e in zip(rows, expected, strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize(("tokens", "top_k"), [(17, 2), (6, 8), (0, 2)])
def test_gathered_gradients_are_summed_once_and_rounded_once(tokens, top_k, dtype):
    """A token's gradient is the sum over its k rows in slot order with a single rounding, also in 16 bits."""
    routing = routed(tokens, top_k)
    x = torch.randn(tokens, 5).to(dtype).requires_grad_()
    upstream = torch.randn(tokens * top_k, 5).to(dtype)

    gather_tokens(x, routing.perm, routing.inverse, top_k).backward(upstream)

    wide = torch.float64 if dtype == torch.float64 else torch.float32
    per_token = upstream[routing.inverse].view(tokens, top_k, 5).to(wide)
    expected = torch.zeros(tokens, 5, dtype=wide)
    for slot in range(top_k):
        expected += per_token[:, slot]
    assert_same_bits(x.grad, expected.to(dtype))


def test_row_moves_save_indices_only():
    """Moving rows keeps no row: one index tensor, the memory of the routing itself."""
    routing = routed(6, 2)
    x = torch.randn(6, 5, requires_grad=True)
    with recorded_saves() as gathered:
        gather_tokens(x, routing.perm, routing.inverse, 2)
    assert [t.data_ptr() for t in gathered] == [routing.inverse.data_ptr()]


@pytest.mark.parametrize("move", ["gather", "combine"])
def test_overwriting_the_routing_before_backward_raises(move):
    """An index buffer that is used again for the next batch is noticed."""
    routing = routed(6, 2)
    x = torch.randn(6 if move == "gather" else 12, 5, requires_grad=True)
    if move == "gather":
        y = gather_tokens(x, routing.perm, routing.inverse, 2)
    else:
        y = combine_experts(x, torch.ones(6, 2), routing.inverse.view(6, 2), routing.offsets, x.dtype)
    routing.inverse.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
