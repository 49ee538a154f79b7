"""What autograd keeps of adapted experts: activations, factors, packed parameters. Never a weight, never an update."""

import gc
from collections.abc import Callable, Iterator

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.utils._pytree import tree_leaves

from hf_qmoe.experts import ExpertsNbit
from hf_qmoe.factors import split_lora_A, split_lora_B
from hf_qmoe.lazy_weight import LazyWeight
from hf_qmoe.lora_weight import LoraWeight
from hf_qmoe.ops import torch_ops
from hf_qmoe.packed import PackedStack
from hf_qmoe.pending import PendingParametrization
from tests.support.experts import Inputs, Layout, float_experts, inputs, layout_class
from tests.support.heap import live_tensors, small_heap  # noqa: F401
from tests.support.lora import FORMS, lora_tensors, randomize
from tests.support.oracle import assert_same_bits, recorded_saves, storage_params


# No activation, factor or product of factors with activations is as large as an expert: 14 pairs of 7 tokens, rank 2.
EXPERTS, HIDDEN, INTERMEDIATE, TOKENS, TOP_K, RANK = 3, 128, 192, 7, 2, 2
SIZES = {"hidden": HIDDEN, "intermediate": INTERMEDIATE, "num_experts": EXPERTS}
STACKS = {"gate_up_proj": (2 * INTERMEDIATE, HIDDEN), "down_proj": (HIDDEN, INTERMEDIATE)}
SMALLEST = min(rows * columns for rows, columns in STACKS.values())
LARGEST = max(rows * columns for rows, columns in STACKS.values())
LAYOUT = Layout(has_bias=True)
LAZY = (LazyWeight, LoraWeight)

BOTH_FORMS = pytest.mark.parametrize("form", FORMS)
EVERY_DTYPE = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
DROPOUTS = pytest.mark.parametrize("dropout", [0.0, 0.1], ids=["", "dropout"])
by_storage = pytest.mark.parametrize(("quant_type", "double_quant"), storage_params())
#: One format of each kind of storage.
by_kind = pytest.mark.parametrize(
    ("quant_type", "double_quant"), storage_params((("nf4", True), ("int8", False), ("bf16", False)))
)


class Model(nn.Module):
    """Nothing but an experts module, for PEFT to wrap."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.experts = experts

    def forward(self, *args: Tensor) -> Tensor:
        return self.experts(*args)


def adapted(
    form: str,
    quant_type: str = "nf4",
    double_quant: bool = False,
    dropout: float = 0.0,
    dtype: torch.dtype = torch.float32,
    implementation: str = "eager",
) -> PeftModel:
    """An adapted layer of the sizes above, with frozen biases."""
    module = float_experts(layout_class(LAYOUT), **SIZES)
    module.config = type(module.config)(**vars(module.config) | {"_experts_implementation": implementation})
    if form == "nbit":
        ExpertsNbit.from_experts(module, quant_type, double_quant=double_quant)
    else:
        module = PendingParametrization.pack(module, quant_type, double_quant=double_quant).parametrize()
    names = [f"experts.{name}" for name in STACKS]
    config = LoraConfig(r=RANK, target_modules=[], target_parameters=names, lora_dropout=dropout)
    model = get_peft_model(Model(module), config)
    randomize(model)
    return model.to(dtype).train()


def arguments_for(index: Tensor | None = None, dtype: torch.dtype = torch.float32) -> Inputs:
    """Trainable inputs, routed as `index` says if it is given."""
    found = inputs(TOKENS, TOP_K, EXPERTS, HIDDEN, dtype)
    return Inputs(found[0], found[1] if index is None else index, found[2]).requires_grad_()


def trained(model: PeftModel, arguments: Inputs) -> list[Tensor]:
    """Everything that gets a gradient."""
    return [arguments.hidden_states, arguments.top_k_weights, *lora_tensors(model).values()]


def weight_sized(saved: list[Tensor]) -> list[tuple[int, ...]]:
    """Shapes of saved float tensors that are, or are views into, something as large as an expert."""
    return [
        tuple(tensor.shape)
        for tensor in saved
        if tensor.is_floating_point()
        and type(tensor) not in LAZY
        and (tensor.numel() >= SMALLEST or tensor.untyped_storage().nbytes() >= 2 * SMALLEST)
    ]


def packed_parameters(model: nn.Module) -> dict[int, str]:
    """Names of packed bytes and scales by address."""
    found = {n: p for n, p in model.named_parameters() if not p.is_floating_point()}
    return {p.untyped_storage().data_ptr(): name for name, p in found.items()}


def test_the_sizes_tell_weights_from_activations() -> None:
    """No activation or factor of this layer is as large as an expert, in elements or bytes; double precision too."""
    activations = TOKENS * TOP_K * 2 * INTERMEDIATE
    factors = EXPERTS * RANK * 2 * INTERMEDIATE
    assert 8 * max(activations, factors) < 2 * SMALLEST


@DROPOUTS
@EVERY_DTYPE
@BOTH_FORMS
@by_storage
def test_no_weight_is_saved(
    quant_type: str, double_quant: bool, form: str, dtype: torch.dtype, dropout: float
) -> None:
    """No saved float tensor has the size of an expert, a stack or an update of one; forward and backward."""
    model = adapted(form, quant_type, double_quant, dropout, dtype)
    arguments = arguments_for(dtype=dtype)
    with recorded_saves() as saved:
        out = model(*arguments)
    assert len(saved) > 10
    assert weight_sized(saved) == []
    if form == "nbit":  # its backward is differentiable
        with recorded_saves() as saved:
            torch.autograd.grad(out.sum(), trained(model, arguments), create_graph=True)
        assert weight_sized(saved) == []


@BOTH_FORMS
@by_kind
def test_saved_operands_are_the_parameters(quant_type: str, double_quant: bool, form: str) -> None:
    """Packed bytes, scales and factors that are saved share memory with the module's parameters: nothing is copied."""
    model = adapted(form, quant_type, double_quant)
    packed = packed_parameters(model)
    with recorded_saves() as saved:
        model(*arguments_for())
    saved = [t for s in saved for t in (operands(s) if type(s) in LAZY else [s])]
    addresses = {t.untyped_storage().data_ptr() for t in saved}
    assert set(packed) <= addresses
    assert {p.untyped_storage().data_ptr() for p in lora_tensors(model).values()} <= addresses
    assert [t.shape for t in saved if t.dtype == torch.uint8 and t.untyped_storage().data_ptr() not in packed] == []


def operands(weight: Tensor) -> list[Tensor]:
    """What a saved lazy weight is made of."""
    if isinstance(weight, LoraWeight):
        factors = [f for term in weight._terms for f in (term.left, term.right)]
        return [*factors, *operands(weight._constant)]
    assert isinstance(weight, LazyWeight)
    return list(weight._source.watched.tensors().values())


# -- the control ------------------------------------------------------------------------------------------------------


def dense_grouped_linear(x: Tensor, stack: PackedStack, expert_offsets: Tensor, exact: bool) -> Tensor:
    """Dequantize, then `linear`, in plain autograd."""
    assert exact
    weights, bounds = stack.dequantize(x.dtype), expert_offsets.tolist()
    return torch.cat([linear(x[bounds[e] : bounds[e + 1]], w) for e, w in enumerate(weights)])


def dense_lora(
    rows: Tensor, x: Tensor, lora_A: Tensor, lora_B: Tensor, expert_offsets: Tensor, scaling: float
) -> Tensor:
    """The update multiplied out."""
    updates, bounds = split_lora_B(lora_B, EXPERTS) @ split_lora_A(lora_A, EXPERTS), expert_offsets.tolist()
    return rows + scaling * torch.cat([linear(x[bounds[e] : bounds[e + 1]], w) for e, w in enumerate(updates)])


@pytest.mark.parametrize(
    ("name", "control"), [("frozen_grouped_linear", dense_grouped_linear), ("add_expert_lora", dense_lora)]
)
def test_the_control_saves_weights_and_agrees(name: str, control: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dense weights or updates are noticed, so the measures work, and their gradients are ours."""
    model = adapted("nbit")
    arguments = arguments_for()
    expected = torch.autograd.grad(model(*arguments).sum(), trained(model, arguments))
    monkeypatch.setattr(f"hf_qmoe.experts.{name}", control)
    with recorded_saves() as saved:
        out = model(*arguments)
    assert len(weight_sized(saved)) >= 2 * EXPERTS
    for actual, gradient in zip(torch.autograd.grad(out.sum(), trained(model, arguments)), expected, strict=True):
        torch.testing.assert_close(actual, gradient, rtol=1e-4, atol=1e-4 * gradient.abs().max().item())


# -- routing ----------------------------------------------------------------------------------------------------------


ROUTINGS = {
    "spread": lambda i: i,
    "one-expert": torch.zeros_like,
    "last-expert": lambda i: torch.full_like(i, EXPERTS - 1),
    "two-experts": lambda i: i.clamp(max=1),
    "sentinels": lambda i: i.masked_fill(i == 0, EXPERTS),
    "only-sentinels": lambda i: torch.full_like(i, EXPERTS),
}


def profile(saved: list[Tensor]) -> tuple[object, ...]:
    """What checkpointing compares, and strides."""
    return tuple((type(t), tuple(t.shape), t.stride(), t.dtype) for t in saved)


@DROPOUTS
@by_storage
def test_saved_tensors_do_not_depend_on_routing(quant_type: str, double_quant: bool, dropout: float) -> None:
    """Number, order, shapes, dtypes and strides of saved tensors are the same whichever experts are hit."""
    model = adapted("nbit", quant_type, double_quant, dropout)
    profiles = set()
    for change in ROUTINGS.values():
        with recorded_saves() as saved:
            out = model(*arguments_for(change(inputs(TOKENS, TOP_K, EXPERTS).top_k_index)))
        profiles.add(profile(saved))
        out.sum().backward()
        assert all(p.grad is not None for p in lora_tensors(model).values())
    assert len(profiles) == 1


@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm"])
def test_nor_in_forwards_without_a_loop(implementation: str) -> None:
    """The same of the parametrized form under transformers' forwards whose shapes do not depend on the routing."""
    model = adapted("parametrize", implementation=implementation)
    profiles = set()
    for name in ("spread", "one-expert", "last-expert", "two-experts"):
        with recorded_saves() as saved:
            model(*arguments_for(ROUTINGS[name](inputs(TOKENS, TOP_K, EXPERTS).top_k_index)))
        profiles.add(profile(saved))
    assert len(profiles) == 1


# -- nodes ------------------------------------------------------------------------------------------------------------


def attributes(node: object) -> Iterator[tuple[str, object]]:
    """What a Python autograd node holds beside its saved tensors."""
    for name, value in getattr(node, "__dict__", {}).items():
        for leaf in tree_leaves(value):
            yield name, leaf
            for cell in getattr(leaf, "__closure__", None) or ():
                yield name, cell.cell_contents


@DROPOUTS
@BOTH_FORMS
@by_kind
def test_no_tensor_hides_on_a_node(quant_type: str, double_quant: bool, form: str, dropout: float) -> None:
    """No autograd node holds a tensor as an attribute or in a closure, unseen by saved-tensor hooks."""
    model = adapted(form, quant_type, double_quant, dropout)
    seen, todo, hidden = set(), [model(*arguments_for()).grad_fn], []
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        hidden += [(node.name(), name) for name, value in attributes(node) if isinstance(value, Tensor | PackedStack)]
        todo += [child for child, _ in node.next_functions]
    if form == "nbit":
        assert sum("expert_lora" in node.name().lower() for node in seen) == 2
    assert hidden == []


# -- what is alive, and what is made ----------------------------------------------------------------------------------


def largest_allocation(step: Callable[[], object]) -> int:
    """Bytes of the largest tensor that any operation allocates in `step`, those inside of lazy weights included."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiled:
        step()
    return max(event.self_cpu_memory_usage for event in profiled.events())


@BOTH_FORMS
@by_kind
def test_at_most_one_expert_is_unpacked_at_a_time(quant_type: str, double_quant: bool, form: str) -> None:
    """Forward and backward never make a tensor larger than one expert, so no ``[E, N, K]`` update either."""
    model = adapted(form, quant_type, double_quant)
    arguments = arguments_for()
    assert 0 < largest_allocation(lambda: model(*arguments).sum().backward()) <= 4 * LARGEST
    weight = torch.randn(EXPERTS, *STACKS["down_proj"])
    assert largest_allocation(lambda: weight * 2) > 4 * LARGEST


def large_floats() -> set[tuple[int, tuple[int, ...]]]:
    """Address and shape of each live float tensor that is as large as an expert."""
    plain = (
        t
        for t in live_tensors()
        if type(t) not in LAZY and t.is_floating_point() and not t.is_meta and t.numel() >= SMALLEST
    )
    return {(t.data_ptr(), tuple(t.shape)) for t in plain}


@BOTH_FORMS
def test_nothing_large_is_alive_between_forward_and_backward(form: str, device: str) -> None:
    """Once the reused buffer is given back, forward and backward have left nothing of an expert's size behind."""
    model = adapted(form).to(device)
    arguments = Inputs(*(t.detach().to(device) for t in arguments_for())).requires_grad_()
    before = large_floats()
    out = model(*arguments)
    torch_ops.release_scratch()
    assert large_floats() <= before
    out.sum().backward()
    torch_ops.release_scratch()
    assert large_floats() <= before


@BOTH_FORMS
def test_weights_are_given_back_with_the_output(form: str) -> None:
    """No lazy weight outlives its graph: there are no reference cycles that would wait for a collection."""
    model = adapted(form)
    model(*arguments_for())
    gc.collect()
    gc.disable()
    try:
        before = sum(type(o) in LAZY for o in gc.get_objects())
        out = model(*arguments_for())
        out.sum().backward()
        del out
        assert sum(type(o) in LAZY for o in gc.get_objects()) == before
    finally:
        gc.enable()


@BOTH_FORMS
def test_second_forward_is_the_first(form: str) -> None:
    """Nothing that a forward leaves behind changes the next."""
    model = adapted(form)
    arguments = arguments_for()
    assert_same_bits(model(*arguments), model(*arguments))
