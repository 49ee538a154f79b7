"""What is prepared of a layer at its first call in inference, and the tensors that are read without the dispatcher."""

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.multiprocessing.reductions import StorageWeakRef
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from hf_qmoe import prepared
from hf_qmoe.experts import ExpertsNbit
from hf_qmoe.ops import formats, native_product
from tests.support.experts import Inputs, biased_layer, inputs, outputs, packed_experts, relative_error
from tests.support.oracle import assert_same_bits


def layer() -> ExpertsNbit:
    return packed_experts(Qwen3MoeExperts, compute_dtype=torch.float32)


def set_data(module: ExpertsNbit, other: ExpertsNbit) -> None:
    for mine, theirs in zip(module.parameters(), other.parameters(), strict=True):
        mine.data = theirs.data


def set_parameters(module: ExpertsNbit, other: ExpertsNbit) -> None:
    for name, parameter in list(other.named_parameters()):
        setattr(module, name, parameter)


def overwrite(module: ExpertsNbit, other: ExpertsNbit) -> None:
    for mine, theirs in zip(module.parameters(), other.parameters(), strict=True):
        mine.data.copy_(theirs)


def spread(module: ExpertsNbit, other: ExpertsNbit) -> None:
    """To memory that is in one run at the next call and, from the same address on, no longer at the one after it."""
    for together in (True, False):
        for mine, theirs in zip(module.parameters(), other.parameters(), strict=True):
            memory = mine.data.new_zeros(2 * theirs.numel())
            if together:
                mine.data, mine.memory = memory[: theirs.numel()].view(theirs.shape), memory
            else:
                mine.data = mine.memory.view(*theirs.shape, 2)[..., 0]
            mine.data.copy_(theirs)
        outputs(module, inputs())


@pytest.mark.parametrize(
    "replace",
    [
        set_data,
        set_parameters,
        overwrite,
        spread,
        lambda module, other: module.load_state_dict(other.state_dict()),
        lambda module, other: module.load_state_dict(other.state_dict(), assign=True),
    ],
    ids=["data", "parameters", "in-place", "spread", "load", "load-assign"],
)
@pytest.mark.parametrize("double_quant", [False, True], ids=["nf4", "nf4-double"])
def test_replaced_weights_are_read_anew(
    replace: Callable[[ExpertsNbit, ExpertsNbit], object], double_quant: bool
) -> None:
    """What was prepared at the first call is not used for other memory."""
    torch.manual_seed(0)
    options = {"compute_dtype": torch.float32, "double_quant": double_quant}
    module, other = (packed_experts(Qwen3MoeExperts, **options).eval() for _ in range(2))
    arguments = inputs()
    before, expected = outputs(module, arguments), outputs(other, arguments)
    assert not torch.equal(before, expected)
    replace(module, other)
    for _ in range(2):
        assert_same_bits(outputs(module, arguments), expected)


def test_what_is_prepared_keeps_no_weight_alive(calls: list[str]) -> None:
    """Weights that are offloaded, or whose module is gone, are freed."""
    module = layer().eval()
    outputs(module, inputs())
    weight = weakref.ref(module.gate_up_proj)
    module.gate_up_proj = nn.Parameter(module.gate_up_proj.data.clone(), requires_grad=False)
    gc.collect()
    assert weight() is None
    assert id(module) in prepared._KNOWN
    kept = len(prepared._KNOWN)
    del module
    gc.collect()
    assert len(prepared._KNOWN) == kept - 1
    assert calls == ["hf_qmoe_experts"]


def test_copies_and_pickles_of_a_prepared_module(calls: list[str]) -> None:
    """They have memory of their own."""
    module, arguments = layer().eval(), inputs()
    expected = outputs(module, arguments)
    copies = copy.deepcopy(module), pickle.loads(pickle.dumps(module))
    for parameter in module.parameters():
        parameter.data.zero_()
    for other in copies:
        assert_same_bits(outputs(other, arguments), expected)
    assert calls == ["hf_qmoe_experts"] * 3


def test_who_watches_sees_the_operator(calls: list[str]) -> None:
    """A profiler, a dispatch mode: the same operator as in a compiled graph, with the same bits."""
    module, arguments = layer().eval(), inputs()
    expected = outputs(module, arguments)
    with torch.profiler.profile() as profile:
        assert_same_bits(outputs(module, arguments), expected)
    assert any(event.key == "hf_qmoe::fused_experts" for event in profile.key_averages())
    seen = []

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    with Watching():
        assert_same_bits(outputs(module, arguments), expected)
    assert "hf_qmoe.fused_experts.default" in seen


@pytest.mark.parametrize("wrong", ["hidden", "index"])
def test_sizes_are_checked_at_every_call(wrong: str) -> None:
    """The first call was right; of the second, the kernels would read beyond the memory."""
    module, arguments = layer().eval(), inputs()
    outputs(module, arguments)
    if wrong == "hidden":
        arguments = arguments._replace(hidden_states=arguments.hidden_states[:, :-2].contiguous())
    else:
        arguments = arguments._replace(top_k_index=-arguments.top_k_index - 1)
    with pytest.raises((RuntimeError, ValueError)):
        outputs(module, arguments)


def test_weights_live_through_a_call_that_another_thread_takes_them_from(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels run without the interpreter's lock."""
    module, arguments = biased_layer(), inputs()
    expected, run, checked = outputs(module, arguments), native_product._run, []

    def replaced(name: str, *arguments: object) -> bool:
        for parameter in module.parameters():
            memory = StorageWeakRef(parameter.untyped_storage())
            parameter.data = torch.zeros_like(parameter)
            checked.append(memory.expired())
        return run(name, *arguments)

    monkeypatch.setattr(native_product, "_run", replaced)
    assert_same_bits(outputs(module, arguments), expected)
    assert checked == [False] * 6


def test_tables_live_as_long_as_their_address_is_known(calls: list[str]) -> None:
    """Whoever else forgets them."""
    module, arguments = layer().eval(), inputs()
    tables = [StorageWeakRef(formats.codebook(quant_type, "cpu").untyped_storage()) for quant_type in ("int8", "nf4")]
    outputs(module, arguments)
    formats._codebook.cache_clear()
    gc.collect()
    assert not any(table.expired() for table in tables)
    assert calls == ["hf_qmoe_experts"]


def exactly(module: ExpertsNbit, arguments: Inputs) -> Tensor:
    module.exact = True
    out = outputs(module, arguments)
    module.exact = None
    return out


#: Tensors whose memory does not hold their numbers, from ordinary ones.
LAZY: dict[str, Callable[[Tensor], Tensor]] = {
    "negation": torch._neg_view,
    "zeros": lambda tensor: torch._efficientzerotensor(tensor.shape, dtype=tensor.dtype),
    "functional": torch._to_functional_tensor,
    "subclass": lambda tensor: TwoTensor(tensor, tensor),
}


@pytest.mark.parametrize("kind", LAZY)
@pytest.mark.parametrize("which", ["hidden_states", "top_k_weights", "gate_up_proj_bias", "down_proj_bias"])
def test_tensors_whose_memory_does_not_hold_their_numbers(which: str, kind: str) -> None:
    """They are read as what they stand for, at the first call and at a later one."""
    module, arguments = biased_layer(), inputs()
    for _ in range(2):
        if which in arguments._fields:
            given = arguments._replace(**{which: LAZY[kind](getattr(arguments, which))})
        else:
            given = arguments
            bias = LAZY[kind](getattr(biased_layer(), which).detach())
            delattr(module, which)
            setattr(module, which, bias)
        out, expected = outputs(module, given), exactly(module, given)
        if kind == "functional" and which in arguments._fields:
            out, expected = (
                torch._from_functional_tensor(t) if torch._is_functional_tensor(t) else t for t in (out, expected)
            )
        if kind == "subclass" and which in arguments._fields:
            out, expected = (t.a if isinstance(t, TwoTensor) else t for t in (out, expected))
        assert relative_error(out, expected) < 1e-6
    outputs(module, arguments)


@pytest.mark.parametrize("exact", [None, True])
@pytest.mark.parametrize("name", ["gate_up_proj", "gate_up_proj_absmax", "down_proj"])
def test_packed_weights_of_another_class(name: str, exact: bool | None) -> None:
    """A wrapper has no memory of its own; operators see what it wraps."""
    module, arguments = biased_layer(), inputs()
    expected = exactly(module, arguments) if exact else outputs(module, arguments)
    module.exact = exact
    weight = getattr(module, name).detach()
    setattr(module, name, nn.Parameter(TwoTensor(weight, weight), requires_grad=False))
    assert relative_error(outputs(module, arguments).a, expected) < 1e-6


def test_a_negated_weight_of_one_token() -> None:
    """The imaginary part of a conjugate is contiguous, and lazily negated."""
    module, arguments = biased_layer(), Inputs(*(tensor[:1] for tensor in inputs()))
    arguments = Inputs(arguments[0], arguments[1][:, :1], arguments[2][:, :1])
    weights = torch.complex(torch.zeros(1, 1), arguments.top_k_weights).conj().imag
    assert weights.is_neg()
    assert weights.is_contiguous()
    expected = outputs(module, arguments._replace(top_k_weights=-arguments.top_k_weights))
    assert_same_bits(outputs(module, arguments._replace(top_k_weights=weights)), expected)


@pytest.mark.parametrize("seen", [False, True], ids=["first-call", "later-call"])
@pytest.mark.parametrize("double_quant", [False, True], ids=["nf4", "nf4-double"])
def test_freed_storage_is_refused(double_quant: bool, seen: bool, calls: list[str]) -> None:
    """FSDP1 frees the memory of a parameter and keeps the tensor; so may an offloader."""
    options = {"compute_dtype": torch.float32, "double_quant": double_quant}
    arguments = inputs()
    for name in [name for name, _ in packed_experts(**options).named_parameters()]:
        module = packed_experts(**options).eval()
        if seen:
            outputs(module, arguments)
        getattr(module, name).untyped_storage().resize_(0)
        with pytest.raises(RuntimeError, match="no memory"):
            outputs(module, arguments)
    assert len(calls) == seen * len(list(module.parameters()))


@pytest.mark.parametrize("which", Inputs._fields)
def test_freed_inputs_are_refused(which: str, calls: list[str]) -> None:
    """A view into freed storage has an address: its offset."""
    module = layer().eval()
    for start in (0, 1):
        arguments = Inputs(*(tensor.clone() for tensor in inputs()))
        given = Inputs(*(tensor[start:] for tensor in arguments))
        getattr(arguments, which).untyped_storage().resize_(0)
        with pytest.raises(RuntimeError, match="no memory"):
            outputs(module, given)
    assert calls == []


@pytest.mark.parametrize("exact", [None, True])
@pytest.mark.parametrize("name", ["gate_up_proj", "gate_up_proj_absmax", "down_proj_bias"])
def test_weights_on_meta_that_are_no_parameters(name: str, exact: bool | None) -> None:
    """FSDP1 puts plain tensors in the place of parameters; one without numbers must not be taken for no bias."""
    module = biased_layer()
    module.exact = exact
    tensor = getattr(module, name).detach().to("meta")
    delattr(module, name)
    setattr(module, name, tensor)
    with pytest.raises(RuntimeError, match="move them to one device"):
        outputs(module, inputs())


@pytest.mark.parametrize("exact", [None, True])
def test_a_missing_bias_is_an_error(exact: bool | None) -> None:
    """`has_bias` says that there is one."""
    module = biased_layer()
    module.exact, module.down_proj_bias = exact, None
    with pytest.raises(RuntimeError, match="one of them is None"):
        outputs(module, inputs())


@pytest.mark.parametrize("pre_dispatch", [False, True])
@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_a_traced_graph_holds_the_layer(mode: str, pre_dispatch: bool, calls: list[str]) -> None:
    """Tracers of every kind see operators, one or, of fake weights, those of the exact path."""
    module, arguments = layer().eval(), inputs()
    expected = outputs(module, arguments)
    with torch.no_grad():
        graph = make_fx(
            lambda *given: module(*given), tracing_mode=mode, pre_dispatch=pre_dispatch, _allow_non_fake_inputs=True
        )(*arguments)
        operators = {str(node.target) for node in graph.graph.nodes}
        assert operators & {"hf_qmoe.fused_experts.default", "hf_qmoe.grouped_linear.default"}
        other = Inputs(2 * arguments.hidden_states, *arguments[1:])
        assert relative_error(graph(*arguments), expected) < 1e-6
        assert relative_error(graph(*other), outputs(module, other)) < 1e-6


def test_modules_that_cannot_be_hashed() -> None:
    """A class may say when two of its modules are equal."""

    class Comparable(ExpertsNbit):
        def __eq__(self, other: object) -> bool:
            return isinstance(other, Comparable)

    torch.manual_seed(0)
    weights = torch.randn(2, 4, 128, 64), torch.randn(2, 4, 64, 64)
    modules = [Comparable.from_float(up, down).eval() for up, down in zip(*weights, strict=True)]
    arguments = inputs()
    for module in modules * 2:
        assert relative_error(outputs(module, arguments), exactly(module, arguments)) < 1e-6


@pytest.mark.parametrize("bits", [0x7FFFFFFF, -1, 0x7FC00000, 0x7F800001], ids=hex)
@pytest.mark.parametrize("part", ["weight", "bias", "hidden"])
def test_any_nan_stays_one(part: str, bits: int) -> None:
    """Rounding one whose bits are all set to bfloat16 would carry over into zero."""
    module, arguments = biased_layer(), inputs(dtype=torch.bfloat16)
    nan = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
    weights = arguments.top_k_weights.float()
    if part == "weight":
        weights[:] = nan
    elif part == "bias":
        module.gate_up_proj_bias.data.view(torch.int32)[:] = bits
    else:
        arguments.hidden_states.view(torch.int16)[:] = bits >> 16
    out = outputs(module, Inputs(*arguments[:2], weights))
    assert out.dtype == torch.bfloat16
    assert out.isnan().all()
