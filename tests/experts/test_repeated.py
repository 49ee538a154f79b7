"""A call in inference like the one before takes a short way; whatever has changed in between is seen.

The oracle is a copy of the module that has not been called: it knows nothing of a call before, and checks all.
"""

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.nn.utils import parametrize

from hf_qmoe import inference, prepared
from hf_qmoe.experts import ExpertsNbit
from hf_qmoe.factors import LoraFactors
from hf_qmoe.ops import native_library, native_product
from tests.support.experts import Inputs, biased_layer, inputs
from tests.support.oracle import assert_same_bits


Arguments = dict[str, object]


@pytest.fixture
def again(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each call of a module, whether it was repeated."""
    if not native_library.has_products():
        pytest.skip("the CPU kernels in use do not multiply")
    seen: list[bool] = []
    forward_again = inference.forward_again

    def counted(*arguments: object) -> Tensor | None:
        out = forward_again(*arguments)
        seen.append(out is not None)
        return out

    monkeypatch.setattr("hf_qmoe.experts.forward_again", counted)
    return seen


def layer(**options: object) -> ExpertsNbit:
    return biased_layer(**options).requires_grad_(False)


def arguments_of(given: Inputs) -> Arguments:
    return given._asdict()


def call(module: nn.Module, given: Arguments) -> Tensor:
    with torch.no_grad():
        out: Tensor = module(**given)
    return out


@pytest.mark.parametrize("grad", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("weights_dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("double_quant", [False, True])
def test_the_same_bits(
    double_quant: bool,
    dtype: torch.dtype,
    weights_dtype: torch.dtype,
    grad: Callable[[], AbstractContextManager[None]],
    again: list[bool],
) -> None:
    """Other numbers of the same sizes; kernels read the weights of tokens in three dtypes as they are."""
    module, fresh = layer(double_quant=double_quant), layer(double_quant=double_quant)
    with grad():
        for seed in range(3):
            torch.manual_seed(seed)
            given = inputs(dtype=dtype)
            given = given._replace(top_k_weights=given.top_k_weights.to(weights_dtype))
            out = module(*given)
            assert out.dtype == dtype
            assert_same_bits(out, copy.deepcopy(fresh)(*given))
            # The weights of a token count as what they are, in any of the dtypes.
            assert_same_bits(out, copy.deepcopy(fresh)(*given[:2], given.top_k_weights.float()))
    # With gradients enabled, a parameter that nothing has been computed with yet may need one.
    repeatable = weights_dtype != torch.float64 and grad is not torch.enable_grad
    assert again[::3] == [False, repeatable, repeatable]


def test_nothing_is_called_that_was_called_once(again: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """No hook either: a module that has one takes torch's long way."""
    module, given = layer(), arguments_of(inputs())
    expected = call(module, given)
    monkeypatch.setattr(module, "_check_call", None)
    assert_same_bits(call(module, given), expected)
    assert again == [False, True]
    assert not module._forward_hooks


def in_dtype(dtype: torch.dtype) -> Callable[[ExpertsNbit, Arguments], None]:
    def change(module: ExpertsNbit, given: Arguments) -> None:
        given["hidden_states"] = given["hidden_states"].to(dtype)

    return change


def fewer_tokens(module: ExpertsNbit, given: Arguments) -> None:
    given.update({name: tensor[:3] for name, tensor in given.items()})


def spread_tokens(module: ExpertsNbit, given: Arguments) -> None:
    tokens = given["hidden_states"]
    given["hidden_states"] = torch.stack([tokens, -tokens], dim=-1)[..., 0]


def spread_index(module: ExpertsNbit, given: Arguments) -> None:
    index = given["top_k_index"]
    given["top_k_index"] = torch.stack([index, index + 1], dim=-1)[..., 0]


def spread_weights(module: ExpertsNbit, given: Arguments) -> None:
    given["top_k_weights"] = given["top_k_weights"].t().contiguous().t()


def short_index(module: ExpertsNbit, given: Arguments) -> None:
    given["top_k_index"] = given["top_k_index"].to(torch.int32)


def negated(module: ExpertsNbit, given: Arguments) -> None:
    given["hidden_states"] = torch._neg_view(given["hidden_states"])


def other_names(module: ExpertsNbit, given: Arguments) -> None:
    given["router_indices"], given["routing_weights"] = given.pop("top_k_index"), given.pop("top_k_weights")


def with_lora(module: ExpertsNbit, given: Arguments) -> None:
    generator = torch.Generator().manual_seed(1)
    factors = (torch.randn(*shape, generator=generator) for shape in ((8, 128), (64, 8)))
    given["lora_factors"] = {"down_proj": [LoraFactors(*factors, 1.0, None)]}


def assign(name: str, value: object) -> Callable[[ExpertsNbit, Arguments], None]:
    return lambda module, given: setattr(module, name, value)


def hear(module: ExpertsNbit, given: Arguments) -> None:
    module.act_fn.register_forward_hook(lambda activation, args, out: 2 * out)


def replace_activation(module: ExpertsNbit, given: Arguments) -> None:
    del module.act_fn
    module.act_fn = torch.tanh


def patch_activation(module: ExpertsNbit, given: Arguments) -> None:
    module.act_fn.forward = torch.tanh


def patch_gate(module: ExpertsNbit, given: Arguments) -> None:
    module._apply_gate = lambda rows: rows[:, :128]


def cut_experts(module: ExpertsNbit, given: Arguments) -> None:
    """The same address, another shape; the last expert is another rank's now."""
    for tensor in module.parameters():
        tensor.data = tensor.data[:3]
    module.num_experts = 3


def drop_biases(module: ExpertsNbit, given: Arguments) -> None:
    module.has_bias = False


def cast_bias(module: ExpertsNbit, given: Arguments) -> None:
    module.down_proj_bias.data = module.down_proj_bias.data.bfloat16()


def overwrite(module: ExpertsNbit, given: Arguments) -> None:
    module.gate_up_proj.data.zero_()


CHANGES: dict[str, Callable[[ExpertsNbit, Arguments], None]] = {
    **{str(dtype): in_dtype(dtype) for dtype in (torch.bfloat16, torch.float16, torch.float64)},
    "tokens": fewer_tokens,
    "strided-hidden": spread_tokens,
    "strided-index": spread_index,
    "strided-weights": spread_weights,
    "int32-index": short_index,
    "negated": negated,
    "gpt-oss-names": other_names,
    "lora": with_lora,
    "exact": assign("exact", True),
    "train": lambda module, given: module.train(),
    "compute-dtype": assign("compute_dtype", torch.bfloat16),
    "interleaved": assign("is_concatenated", False),
    "activation": assign("act_fn", nn.ReLU()),
    "function": replace_activation,
    "hook": hear,
    "patched-activation": patch_activation,
    "patched-gate": patch_gate,
    "no-bias": drop_biases,
    "bias-dtype": cast_bias,
    "fewer-experts": cut_experts,
    "in-place": overwrite,
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_seen(change: str, again: list[bool]) -> None:
    """Of the inputs, of the module, of what it is made of."""
    module, given = layer(), arguments_of(inputs())
    fresh = copy.deepcopy(module)
    before = [call(module, given) for _ in range(2)]
    assert again == [False, True]
    CHANGES[change](module, given)
    other = dict(given)
    CHANGES[change](fresh, other) if change not in INPUT_CHANGES else None
    expected = call(fresh, other)
    assert_same_bits(call(module, given), expected)
    assert_same_bits(call(module, given), expected)
    if change not in SAME_NUMBERS:
        assert expected.shape != before[1].shape or not torch.equal(expected, before[1])


#: Those that the inputs carry already, and those that leave the result as it is.
INPUT_CHANGES = {
    *(str(dtype) for dtype in (torch.bfloat16, torch.float16, torch.float64)),
    *("tokens", "strided-hidden", "strided-index", "strided-weights", "int32-index", "negated", "gpt-oss-names"),
    "lora",
}
SAME_NUMBERS = {"strided-hidden", "strided-index", "strided-weights", "int32-index", "gpt-oss-names"}


def test_classes_that_are_patched(again: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """Libraries of kernels put functions into classes: of the activation, of the module."""
    module, given = layer(), arguments_of(inputs())
    for patch in ((type(module.act_fn), "forward"), (ExpertsNbit, "_apply_gate")):
        for _ in range(2):
            assert call(module, given).any()
        with monkeypatch.context() as patched:
            patched.setattr(*patch, lambda self, rows: torch.zeros_like(rows[:, :128]))
            drop_biases(module, given)
            assert not call(module, given).any()
            module.has_bias = True
    assert any(again)


def test_a_hook_on_every_module(again: list[bool]) -> None:
    """It hears the activation, too."""
    module, given = layer(), arguments_of(inputs())
    for _ in range(2):
        call(module, given)
    heard = []
    handle = nn.modules.module.register_module_forward_hook(lambda called, *_: heard.append(called))
    try:
        call(module, given)
    finally:
        handle.remove()
    assert heard == [module.act_fn, module]


@pytest.mark.parametrize("name", ["hidden_states", "top_k_weights", "down_proj_bias"])
def test_a_gradient_that_is_asked_for_later(name: str, again: list[bool]) -> None:
    """Under `no_grad` it was not, whether a tensor requires one or not."""
    module, given = layer(), arguments_of(inputs())
    for _ in range(2):
        call(module, given)
    for _ in range(2):
        module(**given)
    assert again == [False, True, False, False]
    call(module, given)
    leaf = given[name].clone() if name in given else getattr(module, name)
    leaf.requires_grad_()
    if name in given:
        given[name] = leaf
    for _ in range(2):
        call(module, given)
    assert again[-1] is True
    out = module(**given)
    assert again[-1] is False
    out.sum().backward()
    assert leaf.grad.any()


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def generic_kernels() -> Iterator[None]:
    name = native_library.instruction_set()
    native_library.use_instruction_set("generic")
    try:
        yield
    finally:
        native_library.use_instruction_set(name)


@pytest.mark.parametrize(
    ("within", "is_repeated"),
    [
        (lambda: threads(3), True),
        (lambda: torch.autocast("cpu", torch.bfloat16), False),
        (lambda: torch.profiler.profile(), False),
        (FakeTensorMode, None),
        (generic_kernels, False),
    ],
    ids=["threads", "autocast", "profiler", "fake", "generic"],
)
def test_where_it_is_called(
    within: Callable[[], AbstractContextManager[object]], is_repeated: bool | None, again: list[bool]
) -> None:
    """Threads, autocast, who watches, and which kernels there are."""
    module, given = layer(), arguments_of(inputs())
    fresh = copy.deepcopy(module)
    for _ in range(2):
        call(module, given)
    if is_repeated is None:  # real tensors under a mode of fake ones are an error
        with within(), pytest.raises(AssertionError, match="convert all Tensors to FakeTensors"):
            call(module, given)
        assert again[-1] is False
        return
    with within():
        out = call(module, given)
        assert again[-1] is is_repeated
        expected = call(fresh, given)
    assert_same_bits(out, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_to_another_dtype(dtype: torch.dtype, again: list[bool]) -> None:
    """Than at the last call, or to the one that inputs have."""
    module, given = layer(), arguments_of(inputs(dtype=dtype))
    fresh = copy.deepcopy(module)
    for cast in (torch.bfloat16, torch.float16, None, torch.float16, torch.bfloat16):
        for _ in range(2):
            with torch.autocast("cpu", cast or torch.bfloat16, enabled=cast is not None):
                assert_same_bits(call(module, given), call(copy.deepcopy(fresh), given))


def test_a_parameter_that_was_added(again: list[bool]) -> None:
    """Whoever adds one that needs a gradient wants the products of training."""
    module, given = layer(), arguments_of(inputs())
    for _ in range(2):
        call(module, given)
        module(**given)
    module.extra = nn.Parameter(torch.ones(1))
    fresh = copy.deepcopy(module)
    assert_same_bits(module(**given), fresh(**given))


@pytest.mark.parametrize("name", ["gate_up_proj_bias", "act_fn"])
def test_attributes_before_parameters_and_submodules(name: str, again: list[bool]) -> None:
    """Python finds what lies in the module's `__dict__` first."""
    module, given = layer(), arguments_of(inputs())
    for _ in range(2):
        call(module, given)
    module.__dict__[name] = torch.relu if name == "act_fn" else torch.zeros_like(module.gate_up_proj_bias)
    fresh = copy.deepcopy(module)
    for _ in range(2):
        assert_same_bits(call(module, given), call(fresh, given))


def test_an_activation_that_is_a_property(again: list[bool]) -> None:
    """It is asked for at every call."""

    functions = {"now": torch.nn.functional.silu}

    class Switched(ExpertsNbit):
        act_fn = property(lambda self: functions["now"], lambda self, value: None)

    torch.manual_seed(0)
    module = Switched.from_float(torch.randn(4, 256, 64) / 8, torch.randn(4, 64, 128) / 8).eval()
    given = arguments_of(inputs())
    before = [call(module, given) for _ in range(2)]
    functions["now"] = torch.relu
    after = call(module, given)
    assert not torch.equal(after, before[1])
    assert_same_bits(after, call(copy.deepcopy(module), given))


def test_transforms(again: list[bool]) -> None:
    """What a transform of functions does not wrap goes the same way as at a first call, too."""
    module, given = layer(), arguments_of(inputs())
    fresh = copy.deepcopy(module)
    for _ in range(2):
        call(module, given)

    for called in (fresh, module):
        result = torch.func.vmap(lambda factor, called=called: factor * called(**given))(torch.ones(2))
        assert_same_bits(result[1], call(fresh, given))
    assert again[-2] is False
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(given["hidden_states"], torch.ones_like(given["hidden_states"]))
        with pytest.raises(NotImplementedError, match="forward mode AD"):
            module(**given | {"hidden_states": dual})


def test_a_parametrization_that_was_put_on(again: list[bool]) -> None:
    """As PEFT would, were it not for the package's hooks."""
    module, given = layer(), arguments_of(inputs())
    for _ in range(2):
        call(module, given)
    parametrize.register_parametrization(module, "down_proj", nn.Identity(), unsafe=True)
    with pytest.raises(RuntimeError, match="a parametrization was put on"):
        call(module, given)


@pytest.mark.parametrize("wrong", ["negative", "missing", "floats", "meta", "shape"])
def test_wrong_inputs(wrong: str, again: list[bool]) -> None:
    """They are refused as at the first call."""
    module, given = layer(), arguments_of(inputs())
    for _ in range(2):
        call(module, given)
    index = given["top_k_index"]
    given["top_k_index"] = {
        "negative": -1 - index,
        "missing": None,
        "floats": index.double(),
        "meta": index.to("meta"),
        "shape": index[:, :1].contiguous(),
    }[wrong]
    with pytest.raises((ValueError, RuntimeError)) as later:
        call(module, given)
    with pytest.raises(type(later.value)) as first:
        call(layer(), given)
    assert str(later.value) == str(first.value)


def test_a_torch_without_its_private_class(again: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call takes the long way."""
    monkeypatch.setattr(prepared, "TensorGuards", None)
    module, given = layer(), arguments_of(inputs())
    expected = call(layer(), given)
    for _ in range(3):
        assert_same_bits(call(module, given), expected)
    assert not any(again)


def test_many_threads_at_once(again: list[bool]) -> None:
    """Each gets the result of its own tokens."""
    module = layer()
    given = []
    for seed in range(8):
        torch.manual_seed(seed)
        given.append(arguments_of(inputs()))
    expected = [call(copy.deepcopy(module), arguments) for arguments in given]
    wrong: list[int] = []

    def work(number: int) -> None:
        for _ in range(200):
            if not torch.equal(call(module, given[number]), expected[number]):
                wrong.append(number)

    workers = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong
    assert sum(again) > 1000


@pytest.mark.parametrize("which", ["weights", "exact"])
def test_a_module_that_changes_during_its_first_call(
    which: str, again: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By another thread: kernels run without the interpreter's lock. The next call is of the module as it is then."""
    module, given = layer(), arguments_of(inputs())
    run, pending = native_product._run, [True]

    def changed(name: str, *arguments: object) -> bool:
        if pending and pending.pop():
            if which == "exact":
                module.exact = True
            else:
                for parameter in module.parameters():
                    parameter.data = parameter.data.flip(0).contiguous()
        return run(name, *arguments)

    monkeypatch.setattr(native_product, "_run", changed)
    assert_same_bits(call(module, given), call(layer(), given))
    for _ in range(2):
        assert_same_bits(call(module, given), call(copy.deepcopy(module), given))


def test_compiled_after_it_was_called(again: list[bool]) -> None:
    """The compiler sees the operator, not what is known of the module."""
    module, given = layer(), arguments_of(inputs())
    expected = call(module, given)
    assert_same_bits(call(module, given), expected)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    assert_same_bits(call(compiled, given), expected)
    assert_same_bits(call(compiled, given), expected)


def test_what_is_known_is_forgotten_with_the_module(again: list[bool]) -> None:
    """The next module at its address starts anew."""
    given = arguments_of(inputs())
    for _ in range(20):
        module = layer()
        call(module, given)
        number = id(module)
        assert number in prepared._KNOWN
        del module
        assert number not in prepared._KNOWN
    assert again == [False] * 20


@pytest.mark.parametrize("between", [nullcontext, torch.inference_mode])
def test_a_loop_of_decoding(between: Callable[[], AbstractContextManager[object]], again: list[bool]) -> None:
    """Prefill and then token by token, as `generate` does: every token but the first is a repetition."""
    module = layer()
    torch.manual_seed(5)
    tokens = inputs()
    with between():
        call(module, arguments_of(tokens))
        for token in range(len(tokens.hidden_states)):
            one = {name: tensor[token : token + 1].clone() for name, tensor in tokens._asdict().items()}
            assert_same_bits(call(module, one), call(copy.deepcopy(module), one))
    assert again[:2] == [False, False]
    assert again[3::2] == [True] * (len(tokens.hidden_states) - 1)
