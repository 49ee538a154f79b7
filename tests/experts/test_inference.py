"""Which products are exact: in training all, where no gradient is asked for none need be, and `exact` overrides it."""

import pytest
import torch
from torch import nn
from transformers.activations import GELUTanh
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.muse_spark.modeling_muse_spark import MuseSparkExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from hf_qmoe.experts import ExpertsNbit
from hf_qmoe.ops import native_product
from tests.support.experts import (
    Inputs,
    decorated_classes,
    float_experts,
    inputs,
    outputs,
    packed_and_twin,
    packed_experts,
    relative_error,
)
from tests.support.oracle import assert_same_bits


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


@pytest.mark.parametrize("exact", [True, None])
def test_a_gate_that_was_put_into_the_class(exact: bool | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Someone's patch of `ExpertsNbit` is called, on either path."""
    module, arguments = ExpertsNbit.from_float(torch.ones(2, 128, 64), torch.ones(2, 64, 64)).eval(), one_token()
    module.exact = exact
    assert outputs(module, arguments).any()
    monkeypatch.setattr(ExpertsNbit, "_apply_gate", lambda self, values: torch.zeros_like(values[:, ::2]))
    assert not outputs(module, arguments).any()


@pytest.mark.parametrize("exact", [True, None])
def test_the_function_within_an_activation_may_be_another(exact: bool | None) -> None:
    """transformers' GELU holds the function that it calls."""
    module = ExpertsNbit.from_float(torch.ones(2, 128, 64), torch.ones(2, 64, 64), activation="gelu_pytorch_tanh")
    module.eval().exact = exact
    assert outputs(module, one_token()).any()
    module.act_fn.act = torch.zeros_like
    assert not outputs(module, one_token()).any()


def test_either_function_of_transformers_gelu_is_fused(calls: list[str]) -> None:
    """The module holds one of two that compute the same."""
    for python in (False, True):
        module = ExpertsNbit.from_float(
            torch.ones(2, 128, 64), torch.ones(2, 64, 64), activation=GELUTanh(use_gelu_tanh_python=python)
        )
        outputs(module.eval(), one_token())
    assert calls == ["hf_qmoe_experts"] * 2


@pytest.mark.parametrize("exact", [True, None])
@pytest.mark.parametrize("activation", [None, "gelu_pytorch_tanh"], ids=["silu", "gelu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_activations_of_large_negative_numbers_are_zero(
    dtype: torch.dtype, activation: str | None, exact: bool | None
) -> None:
    """However large what they are multiplied with."""
    up = torch.zeros(1, 128, 64)
    up[0, :64, 0], up[0, 64:, 1] = -1, 1
    module = ExpertsNbit.from_float(up, torch.eye(64)[None], activation=activation).eval()
    module.exact = exact
    for gate, factor in ((200.0, 1e38), (1e38, 1.0), (100.0, 1e38)):
        x = torch.zeros(1, 64, dtype=dtype)
        x[0, 0], x[0, 1] = gate, factor
        out = outputs(module, Inputs(x, torch.zeros(1, 1, dtype=torch.long), torch.ones(1, 1)))
        assert (out.abs() < 1e-3).all()


def one_token() -> Inputs:
    return Inputs(torch.ones(1, 64), torch.zeros(1, 1, dtype=torch.long), torch.ones(1, 1))
