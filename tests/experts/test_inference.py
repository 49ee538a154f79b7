"""Which products are exact: in training all, where no gradient is asked for none need be, and `exact` overrides it."""

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.muse_spark.modeling_muse_spark import MuseSparkExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from hf_qmoe import inference
from hf_qmoe.experts import ExpertsNbit
from hf_qmoe.ops import native_library, native_product
from tests.support.experts import (
    Inputs,
    decorated_classes,
    float_experts,
    inputs,
    packed_and_twin,
    packed_experts,
    relative_error,
)
from tests.support.oracle import assert_same_bits


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the fused kernels that were used."""
    if not native_library.available():
        pytest.skip(str(native_library.why_not()))
    used: list[str] = []
    run = native_product._run

    def counted(name: str, call: object) -> None:
        used.append(name)
        run(name, call)

    monkeypatch.setattr(native_product, "_run", counted)
    return used


def outputs(module: nn.Module, arguments: Inputs) -> torch.Tensor:
    with torch.no_grad():
        return module(*arguments)


def layer(cls: type[nn.Module] = Qwen3MoeExperts) -> ExpertsNbit:
    return packed_experts(cls, compute_dtype=torch.float32)


def test_a_model_in_eval_mode_runs_the_whole_layer_at_once(calls: list[str]) -> None:
    """One call; in training mode, or where a gradient flows, none."""
    packed, arguments = layer(), inputs()
    outputs(packed.train(), arguments)
    assert calls == []
    outputs(packed.eval(), arguments)
    assert calls == ["hf_qmoe_experts"]
    packed(*arguments)  # nothing asks for a gradient here either
    assert calls == ["hf_qmoe_experts"] * 2
    packed(arguments.hidden_states.clone().requires_grad_(True), *arguments[1:])
    packed(*arguments[:2], arguments.top_k_weights.clone().requires_grad_(True))
    assert calls == ["hf_qmoe_experts"] * 2


@pytest.mark.parametrize("part", ["activation", "norm", "bias"])
def test_any_trainable_parameter_makes_products_exact(part: str) -> None:
    """A gradient may be asked for by parameters between and after the products alone."""
    cls = {"activation": Qwen3MoeExperts, "norm": MuseSparkExperts, "bias": GptOssExperts}[part]
    packed, arguments = layer(cls).eval(), inputs()
    if part == "activation":
        packed.act_fn = nn.PReLU()
    assert any(parameter.requires_grad for parameter in packed.parameters())
    out = packed(*arguments)
    assert out.requires_grad
    packed.exact = True
    assert_same_bits(out, packed(*arguments))


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_an_activation_whose_class_was_patched(training: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Libraries of kernels replace `forward` of a class."""
    packed, arguments = layer().train(training), inputs()
    monkeypatch.setattr(type(packed.act_fn), "forward", lambda self, values: torch.zeros_like(values))
    assert not outputs(packed, arguments).any()


def test_forward_mode_is_refused_as_in_training() -> None:
    """Tangents would be lost in silence: the operators have no forward-mode gradients."""
    packed, arguments = layer().eval(), inputs()
    with pytest.raises(NotImplementedError, match="forward mode AD"):
        torch.func.jvp(lambda x: packed(x, *arguments[1:]), (arguments.hidden_states,), (arguments.hidden_states,))


def test_a_gate_of_the_models_own_runs_between_two_products(calls: list[str]) -> None:
    """gpt-oss clamps; an activation that someone listens to is called."""
    outputs(layer(GptOssExperts).eval(), inputs())
    assert calls == ["hf_qmoe_grouped_linear"] * 2
    heard = []
    packed = layer().eval()
    packed.act_fn.register_forward_hook(lambda *_: heard.append(True))
    outputs(packed, inputs())
    assert calls == ["hf_qmoe_grouped_linear"] * 4
    assert heard == [True]
    packed = layer().eval()
    packed.act_fn.forward = lambda values: values  # someone's patch
    outputs(packed, inputs())
    assert calls == ["hf_qmoe_grouped_linear"] * 6


@pytest.mark.parametrize("exact", [None, True])
def test_bits_of_training_do_not_depend_on_grad_mode(exact: bool | None) -> None:
    """What reentrant checkpointing computes without grad and again with it is the same."""
    packed, arguments = layer().train(), inputs()
    packed.exact = exact
    expected = packed(arguments.hidden_states.clone().requires_grad_(True), *arguments[1:])
    assert_same_bits(outputs(packed, arguments), expected)


def test_exact_in_eval_mode_gives_the_bits_of_training(calls: list[str]) -> None:
    """`exact=True` turns the kernels off."""
    packed, arguments = layer(), inputs()
    expected = outputs(packed.train(), arguments)
    packed.exact = True
    assert_same_bits(outputs(packed.eval(), arguments), expected)
    assert calls == []


def test_training_may_use_them_too(calls: list[str]) -> None:
    """`exact=False`: fused products forward, exact ones backward."""
    packed, twin = packed_and_twin(float_experts(), compute_dtype=torch.float32)
    packed.exact = False
    arguments = inputs()
    gradients = []
    for module, dtype in ((packed.train(), torch.float32), (twin, torch.float64)):
        hidden = arguments.hidden_states.to(dtype, copy=True).requires_grad_(True)
        weights = arguments.top_k_weights.to(dtype, copy=True).requires_grad_(True)
        module(hidden, arguments.top_k_index, weights).square().sum().backward()
        gradients.append((hidden.grad, weights.grad))
    assert calls == ["hf_qmoe_grouped_linear"] * 2
    for ours, expected in zip(*gradients, strict=True):
        assert relative_error(ours, expected) < 1e-5


@pytest.mark.parametrize("name", sorted(decorated_classes()))
def test_every_experts_class(name: str) -> None:
    """Without a gradient, each agrees with the model's own eager code."""
    packed, twin = packed_and_twin(float_experts(decorated_classes()[name]), compute_dtype=torch.float32)
    arguments = inputs()
    assert relative_error(outputs(packed.eval(), arguments), outputs(twin, arguments.to(torch.float64))) < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=["no-autocast", "autocast"])
def test_dtypes(autocast: torch.dtype | None, dtype: torch.dtype, calls: list[str]) -> None:
    """The result has the dtype of the hidden states, its error is at most 1.1 times that of the exact path."""
    packed, twin = packed_and_twin(float_experts(), compute_dtype=None)
    arguments = inputs(dtype=dtype)
    expected = outputs(twin, arguments.to(torch.float64))
    errors = []
    for exact in (True, False):
        packed.eval().exact = exact
        with torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None):
            out = outputs(packed, arguments)
        assert out.dtype == dtype
        errors.append((out.double() - expected).norm())
    assert calls == ["hf_qmoe_experts"]
    assert errors[1] <= 1.1 * errors[0]


def test_without_kernels_the_other_path_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing multiplies, results are those of training."""
    monkeypatch.setattr(native_product, "multiplies", lambda *_: False)
    packed, arguments = layer(), inputs()
    assert_same_bits(outputs(packed.eval(), arguments), outputs(packed.train(), arguments))


def test_a_config_can_ask_for_it() -> None:
    """`experts_exact` of a `QMoEConfig` reaches the modules."""
    from hf_qmoe import QMoEConfig, quantize_experts
    from tests.support.models import experts_of, tiny_model

    for value in (None, True, False):
        model = quantize_experts(tiny_model("qwen3_moe"), QMoEConfig(experts_exact=value))
        assert {experts.exact for experts in experts_of(model).values()} == {value}
    with pytest.raises(TypeError, match="experts_exact"):
        QMoEConfig(experts_exact="yes")


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
    assert module in inference._PREPARED
    kept = len(inference._PREPARED)
    del module
    gc.collect()
    assert len(inference._PREPARED) == kept - 1
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
