"""What autograd keeps of an experts layer: activations, and the packed parameters themselves. Never a weight."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear
from torch.utils._python_dispatch import TorchDispatchMode

from hf_qmoe.experts import ExpertsNbit
from hf_qmoe.ops import torch_ops
from hf_qmoe.packed import PackedStack
from tests.support.experts import Inputs, Layout, float_experts, gradients, inputs, layout_class
from tests.support.heap import live_tensors
from tests.support.oracle import assert_same_bits, recorded_saves, storage_params


# E·N·K, N·K and every activation [S, .] differ, in elements and in shape: S = 14 pairs of 7 tokens.
EXPERTS, HIDDEN, INTERMEDIATE, TOKENS, TOP_K = 3, 128, 192, 7, 2
STACKS = {"gate_up_proj": (2 * INTERMEDIATE, HIDDEN), "down_proj": (HIDDEN, INTERMEDIATE)}
by_storage = pytest.mark.parametrize(("quant_type", "double_quant"), storage_params())

#: What a dequantized weight could be saved as: an expert or a stack, in elements.
FORBIDDEN = {count * rows * columns for rows, columns in STACKS.values() for count in range(1, EXPERTS + 1)}
SMALLEST = min(FORBIDDEN)


def packed_layer(quant_type: str = "nf4", double_quant: bool = False, gate: str = "concatenated") -> ExpertsNbit:
    """A packed layer of the sizes above, with biases and a norm."""
    cls = layout_class(Layout(gate, has_bias=True, has_norm=True))
    sizes = {"hidden": HIDDEN, "intermediate": INTERMEDIATE, "num_experts": EXPERTS}
    return ExpertsNbit.from_experts(float_experts(cls, **sizes), quant_type, double_quant=double_quant)


def arguments_for(index: Tensor | None = None, dtype: torch.dtype = torch.float32) -> Inputs:
    """Trainable inputs, routed as `index` says if it is given."""
    found = inputs(TOKENS, TOP_K, EXPERTS, HIDDEN, dtype)
    return Inputs(found[0], found[1] if index is None else index, found[2]).requires_grad_()


def weight_sized(saved: list[Tensor]) -> list[tuple[int, ...]]:
    """Shapes of saved float tensors that are, or are views into, something as large as an expert."""
    return [
        tuple(tensor.shape)
        for tensor in saved
        if tensor.is_floating_point()
        and (tensor.numel() >= SMALLEST or tensor.untyped_storage().nbytes() >= 2 * SMALLEST)
    ]


def plain_grouped_linear(x: Tensor, stack: PackedStack, expert_offsets: Tensor, exact: bool) -> Tensor:
    """The control: dequantize, then `linear`, in plain autograd."""
    assert exact
    weights, bounds = stack.dequantize(x.dtype), expert_offsets.tolist()
    return torch.cat([linear(x[bounds[e] : bounds[e + 1]], w) for e, w in enumerate(weights)])


def test_the_sizes_tell_weights_from_activations() -> None:
    """No activation of this layer is as large as an expert, in elements or bytes."""
    activations = {TOKENS * TOP_K * width for width in (HIDDEN, INTERMEDIATE, 2 * INTERMEDIATE)}
    assert 8 * max(activations) < 2 * SMALLEST


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@by_storage
def test_no_dequantized_weight_is_saved(quant_type: str, double_quant: bool, dtype: torch.dtype) -> None:
    """No saved float tensor has an expert's or a stack's size, in either orientation, in forward or backward."""
    packed = packed_layer(quant_type, double_quant)
    arguments = arguments_for(dtype=dtype)
    with recorded_saves() as saved:
        trained = (arguments.hidden_states, arguments.top_k_weights, packed.down_proj_bias)
        torch.autograd.grad(
            packed(*arguments).sum(), trained, create_graph=True
        )  # backward saves for its own backward
    assert len(saved) > 10
    assert weight_sized(saved) == []


@by_storage
def test_saved_bytes_are_the_parameters(quant_type: str, double_quant: bool) -> None:
    """Packed bytes and scales that are saved share memory with the module's parameters: nothing is copied."""
    packed = packed_layer(quant_type, double_quant)
    with recorded_saves() as saved:
        packed(*arguments_for())
    frozen = {p.untyped_storage().data_ptr(): name for name, p in packed.named_parameters() if not p.requires_grad}
    shared = {frozen[t.untyped_storage().data_ptr()] for t in saved if t.untyped_storage().data_ptr() in frozen}
    assert shared == set(frozen.values())
    copied = [t for t in saved if t.dtype == torch.uint8 and t.untyped_storage().data_ptr() not in frozen]
    assert copied == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@by_storage
def test_the_control_saves_weights_and_agrees(
    quant_type: str, double_quant: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plain dequantize and `linear` saves weights, so the measure works, and its gradients are ours bit for bit."""
    packed = packed_layer(quant_type, double_quant)
    arguments = arguments_for(dtype=dtype)
    expected_out = packed(*arguments)
    expected = gradients(packed, arguments.to(dtype))
    expected = {name: gradient.clone() for name, gradient in expected.items()}

    monkeypatch.setattr("hf_qmoe.experts.frozen_grouped_linear", plain_grouped_linear)
    with recorded_saves() as saved:
        out = packed(*arguments)
    assert len(weight_sized(saved)) >= 2 * EXPERTS
    assert_same_bits(out, expected_out)
    for name, gradient in gradients(packed, arguments.to(dtype)).items():
        assert_same_bits(gradient, expected[name])


ROUTINGS = {
    "spread": lambda i: i,
    "one-expert": torch.zeros_like,
    "last-expert": lambda i: torch.full_like(i, EXPERTS - 1),
    "two-experts": lambda i: i.clamp(max=1),
    "sentinels": lambda i: i.masked_fill(i == 0, EXPERTS),
    "only-sentinels": lambda i: torch.full_like(i, EXPERTS),
}


@pytest.mark.parametrize("gate", ["concatenated", "interleaved", "none"])
@by_storage
def test_saved_tensors_do_not_depend_on_routing(quant_type: str, double_quant: bool, gate: str) -> None:
    """Number, order, shapes, dtypes and strides of saved tensors are the same whichever experts are hit."""
    packed = packed_layer(quant_type, double_quant, gate)
    profiles = set()
    for change in ROUTINGS.values():
        index = change(inputs(TOKENS, TOP_K, EXPERTS).top_k_index)
        with recorded_saves() as saved:
            packed(*arguments_for(index))
        profiles.add(tuple((tuple(t.shape), t.stride(), t.dtype) for t in saved))
    assert len(profiles) == 1


def attributes(node: object) -> Iterator[tuple[str, object]]:
    """What a Python autograd node holds beside its saved tensors."""
    for name, value in getattr(node, "__dict__", {}).items():
        yield name, value
        for cell in getattr(value, "__closure__", None) or ():
            yield name, cell.cell_contents


@by_storage
def test_no_tensor_hides_on_a_node(quant_type: str, double_quant: bool) -> None:
    """No autograd node of the layer holds a tensor as an attribute or in a closure, unseen by saved-tensor hooks."""
    packed = packed_layer(quant_type, double_quant)
    seen, todo, hidden = set(), [packed(*arguments_for()).grad_fn], []
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        hidden += [(node.name(), name) for name, value in attributes(node) if isinstance(value, Tensor | PackedStack)]
        todo += [child for child, _ in node.next_functions]
    assert sum("grouped_linear" in node.name().lower() for node in seen) == 2
    assert hidden == []


class LargestFloat(TorchDispatchMode):
    """Records the elements of the largest float tensor that any operator returns."""

    elements = 0

    def __torch_dispatch__(self, func: object, types: object, args: tuple = (), kwargs: dict | None = None) -> object:
        out = func(*args, **(kwargs or {}))
        for value in out if isinstance(out, tuple | list) else (out,):
            if isinstance(value, Tensor) and value.is_floating_point():
                self.elements = max(self.elements, value.numel())
        return out


@by_storage
def test_at_most_one_expert_is_unpacked_at_a_time(quant_type: str, double_quant: bool) -> None:
    """Forward and backward never make a float tensor larger than one expert."""
    packed = packed_layer(quant_type, double_quant)
    arguments = arguments_for()
    with LargestFloat() as seen:
        packed(*arguments).sum().backward()
    assert seen.elements <= max(rows * columns for rows, columns in STACKS.values())


def large_floats() -> set[tuple[int, tuple[int, ...]]]:
    """Address and shape of each live float tensor that has the size of an expert or a stack."""
    return {(t.data_ptr(), tuple(t.shape)) for t in live_tensors() if t.is_floating_point() and t.numel() in FORBIDDEN}


def test_nothing_large_is_alive_between_forward_and_backward(device: str) -> None:
    """Once the reused buffer is given back, forward has left no float tensor of an expert's size behind."""
    packed = packed_layer().to(device)
    arguments = Inputs(*(t.to(device) for t in arguments_for()))
    before = large_floats()
    out = packed(*arguments)
    torch_ops.release_scratch()
    assert large_floats() <= before
    out.sum().backward()
    torch_ops.release_scratch()
    assert large_floats() <= before
