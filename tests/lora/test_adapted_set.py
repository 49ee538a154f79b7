"""The same config adapts on a packed model what it adapts on the float one: names, shapes, ranks, values, logits."""

import copy
import logging
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from peft import (
    AutoPeftModelForCausalLM,
    LoraConfig,
    PeftMixedModel,
    PeftModel,
    get_peft_model,
    get_peft_model_state_dict,
    inject_adapter_in_model,
    set_peft_model_state_dict,
)
from safetensors.torch import load_file
from torch import Tensor, nn

from hf_qmoe import QMoEConfig, quantize_experts
from hf_qmoe.lora.names import float_names
from hf_qmoe.lora.packed import packed_modules
from hf_qmoe.lora.targets import lora_targets
from hf_qmoe.lora.wrapper import ParamWrapper
from hf_qmoe.parametrize import parametrize_experts
from tests.lora.families import CASES, build
from tests.support.families import FAMILY_FORMS, family_pair, randomize_by_name, varied
from tests.support.lora import logits, lora_tensors, loss_and_gradients, relative_error
from tests.support.state import assert_same_state, snapshot


FAMILIES = [family for family in CASES if family not in ("dense", "deepseek_v32", "qwen3_vl_moe")]
#: Where PEFT takes ``gate_proj`` and the like, or ``w1``, for projections of routed experts, as transformers v4 had.
CONVERTED = ("qwen3_moe", "olmoe", "qwen3_next", "deepseek_v3", "afmoe")
EVERY_FAMILY = pytest.mark.parametrize("family", FAMILIES)
EVERY_FORM = pytest.mark.parametrize("form", FAMILY_FORMS)
PROJECTIONS = ["gate_proj", "up_proj", "down_proj"]
STACKS = ["experts.gate_up_proj", "experts.up_proj", "experts.down_proj"]


def stack_names(model: nn.Module) -> list[str]:
    """Full names of the experts' stacks in a float model."""
    return [n for n, p in model.named_parameters() if "experts." in n and p.ndim == 3]


def shared_linears(model: nn.Module) -> list[str]:
    """Full names of the linears of shared experts."""
    return [
        n
        for n, m in model.named_modules()
        if "shared_expert." in n or "shared_experts." in n
        if hasattr(m, "in_features")
    ]


Fields = dict[str, object]
#: Configs by name, each made for a float model.
CONFIGS: dict[str, Callable[[nn.Module], Fields]] = {
    "projections": lambda _: {"target_modules": PROJECTIONS},
    "projections-attention": lambda _: {"target_modules": ["q_proj", "v_proj", *PROJECTIONS]},
    "half-of-a-pair": lambda _: {"target_modules": ["q_proj", "gate_proj"]},
    "down-alone": lambda _: {"target_modules": ["q_proj", "down_proj"]},
    "mixtral-names": lambda _: {"target_modules": ["w1", "w2", "w3"]},
    "mixtral-names-router": lambda _: {"target_modules": ["w1", "w2", "w3", "gate", "k_proj"]},
    "stacks": lambda _: {"target_parameters": STACKS},
    "stacks-attention": lambda _: {"target_modules": ["q_proj"], "target_parameters": STACKS},
    "bare-stacks": lambda _: {"target_modules": ["q_proj"], "target_parameters": ["down_proj", "gate_up_proj"]},
    "one-stack-in-full": lambda m: {"target_parameters": stack_names(m)[-1:]},
    "last-layer-in-full": lambda m: {"target_modules": ["q_proj"], "target_parameters": stack_names(m)[-2:]},
    "stack-and-linear-as-parameters": lambda _: {"target_parameters": ["lm_head.weight", *STACKS[2:]]},
    "router-and-stacks": lambda _: {"target_parameters": ["gate.weight", "router.weight", *STACKS]},
    "biases-and-stacks": lambda _: {"target_parameters": ["experts.down_proj_bias", *STACKS]},
    "all-linear": lambda _: {"target_modules": "all-linear"},
    "all-linear-stacks": lambda _: {"target_modules": "all-linear", "target_parameters": STACKS},
    "all-linear-without-experts": lambda _: {"target_modules": "all-linear", "exclude_modules": ".*experts.*"},
    "regex-attention": lambda _: {"target_modules": r".*\.(q_proj|v_proj)"},
    "regex-experts": lambda _: {"target_modules": r".*experts\.(gate_proj|up_proj|down_proj)"},
    "regex-projections": lambda _: {"target_modules": r".*(gate_proj|up_proj|down_proj)"},
    "regex-down": lambda _: {"target_modules": r".*\.down_proj"},
    "regex-layer": lambda _: {"target_modules": r"model\.layers\.1\.mlp\..*(gate_proj|up_proj|down_proj)"},
    "regex-all-experts": lambda _: {"target_modules": r".*experts.*"},
    "regex-everything": lambda _: {"target_modules": r".*"},
    "experts-module": lambda _: {"target_modules": ["experts"]},
    "shared-in-full": lambda m: {"target_modules": shared_linears(m) or ["none"]},
    "excluded": lambda _: {
        "target_modules": ["q_proj", *PROJECTIONS],
        "exclude_modules": ["layers.1.self_attn.q_proj"],
    },
    "excluded-stacks": lambda _: {"target_modules": ["q_proj", *PROJECTIONS], "exclude_modules": ["down_proj"]},
    "layers": lambda _: {"target_modules": ["q_proj", "down_proj"], "layers_to_transform": [1]},
    "layers-stacks": lambda _: {"target_modules": ["q_proj"], "target_parameters": STACKS, "layers_to_transform": 1},
    "ranks": lambda _: {
        "target_modules": ["q_proj", "k_proj"],
        "target_parameters": STACKS,
        "rank_pattern": {r".*\.down_proj": 2, "q_proj": 1, r"layers\.1.*\.gate_up_proj": 6},
        "alpha_pattern": {"experts.down_proj": 3, "k_proj": 5},
    },
    "ranks-of-projections": lambda _: {
        "target_modules": PROJECTIONS,
        "rank_pattern": {"down_proj": 5},
    },
    "modules-to-save": lambda _: {
        "target_modules": ["q_proj"],
        "target_parameters": STACKS,
        "modules_to_save": ["lm_head"],
    },
    "defaults": lambda _: {},
    "nothing": lambda _: {"target_modules": ["no_such_module"]},
    "torch-internals": lambda _: {"target_modules": ["q_proj", "original", "parametrizations"]},
    "nothing-but-attention": lambda _: {"target_modules": ["q_proj"], "target_parameters": ["experts.no_such"]},
}


ATTENTION_AND_STACKS: Fields = {"target_modules": ["q_proj"], "target_parameters": STACKS}


def lora(**changes: object) -> LoraConfig:
    """A fresh config."""
    return LoraConfig(**({"r": 3, "lora_alpha": 6} | ATTENTION_AND_STACKS | changes))


def attach(model: nn.Module, fields: Fields) -> tuple[PeftModel, LoraConfig]:
    """The model with a seeded adapter, and its config as PEFT left it."""
    config = LoraConfig(r=3, lora_alpha=6, **copy.deepcopy(fields))
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return get_peft_model(model, config), config


def attempt(action: Callable[[], object]) -> object:
    """Result of `action`, or what it raised."""
    try:
        return action()
    except Exception as error:
        return error


def parameter_names(model: nn.Module) -> list[str]:
    """Names of all parameters."""
    return [name for name, _ in model.named_parameters()]


def assert_same_adapter(ours: nn.Module, stock: nn.Module) -> None:
    """Names in order, shapes, dtypes, flags, values."""
    mine, theirs = lora_tensors(ours), lora_tensors(stock)
    assert list(mine) == list(theirs)
    for name, tensor in mine.items():
        assert tensor.requires_grad == theirs[name].requires_grad, name
        assert tensor.shape == theirs[name].shape, name
        assert torch.equal(tensor, theirs[name]), name
    wrapped = [
        [(n, m.r, m.scaling) for n, m in model.named_modules() if hasattr(m, "lora_A")] for model in (ours, stock)
    ]
    assert wrapped[0] == wrapped[1]


def assert_same_logits(ours: nn.Module, stock: nn.Module) -> None:
    """With random factors; what stock cannot run, neither do we."""
    randomize_by_name(ours, stock)
    mine, theirs = attempt(lambda: logits(ours)), attempt(lambda: logits(stock))
    if isinstance(theirs, Exception):
        assert type(mine) is type(theirs)
        return
    assert isinstance(mine, Tensor), mine
    assert relative_error(mine, theirs) < 1e-5


@pytest.mark.parametrize("config", CONFIGS)
@EVERY_FORM
@EVERY_FAMILY
def test_same_set(family: str, form: str, config: str) -> None:
    """Names and order, shapes, the config after PEFT converted it, initial values, logits; or the same exception."""
    packed, plain = family_pair(family, form)
    fields = CONFIGS[config](plain)
    names = [parameter_names(model) for model in (packed, plain)]
    ours = attempt(lambda: attach(packed, fields))
    if config == "shared-in-full" and family in CONVERTED:  # PEFT would take the names for routed experts'
        fields = {"target_modules": [], "target_parameters": [f"{name}.weight" for name in fields["target_modules"]]}
    stock = attempt(lambda: attach(plain, fields))
    if isinstance(ours, Exception):
        unmatched = "match no parameter of the model" in str(ours)
        assert unmatched or type(ours) is type(stock), (ours, stock)
        assert "ParametrizationList" not in str(ours).partition("(")[0]
        if unmatched:
            assert not any(name.endswith(tuple(fields["target_parameters"])) for name in names[1])
        if unmatched or parameter_names(plain) == names[1]:  # PEFT can also fail half-way
            assert parameter_names(packed) == names[0]
        return
    assert not isinstance(stock, Exception), stock
    (ours, our_config), (stock, stock_config) = ours, stock
    assert our_config.to_dict() == stock_config.to_dict()
    assert_same_adapter(ours, stock)
    assert_same_logits(ours, stock)


def adapted_stacks(model: nn.Module) -> list[str]:
    """Full names of the packed stacks that are adapted, by the names of the float model."""
    base = model.get_base_model()
    wrappers = [(n, m) for n, m in base.named_modules() if isinstance(m, ParamWrapper)]
    return [f"{n.replace('.base_layer', '')}.{m.parameter_name}" for n, m in wrappers]


@EVERY_FORM
@EVERY_FAMILY
def test_what_is_meant_is_adapted(family: str, form: str) -> None:
    """By suffix all stacks, by full name that one; by the linears' names all of them where PEFT converts those."""
    packed, plain = family_pair(family, form)
    stacks = stack_names(plain)
    assert len(stacks) == 2 * len(list(packed_modules(packed)))
    assert sorted(adapted_stacks(attach(packed, {"target_parameters": STACKS})[0])) == sorted(stacks)
    packed, _ = family_pair(family, form)
    assert adapted_stacks(attach(packed, {"target_parameters": stacks[-1:]})[0]) == stacks[-1:]
    names = ["w1", "w2", "w3"] if family == "mixtral" else ["q_proj", *PROJECTIONS]
    packed, _ = family_pair(family, form)
    adapter, config = attach(packed, {"target_modules": names})
    expected = stacks if family in (*CONVERTED, "mixtral") else []
    assert sorted(adapted_stacks(adapter)) == sorted(expected)
    assert bool(config.target_parameters) == bool(expected)
    assert all(
        m.r["default"] == 6
        for n, m in adapter.named_modules()
        if isinstance(m, ParamWrapper) and m.parameter_name == "gate_up_proj"
    )


@EVERY_FORM
@pytest.mark.parametrize("family", ["deepseek_v3", "qwen2_moe", "qwen3_5_moe", "llama4", "nemotron_h"])
def test_shared_experts_by_full_name(family: str, form: str) -> None:
    """Exactly those linears, also where PEFT takes the names for the routed experts' (huggingface/peft#3711)."""
    packed, plain = family_pair(family, form)
    names = shared_linears(plain)
    assert names
    fields = {"target_modules": names}
    ours = attach(packed, fields)[0]
    if family in CONVERTED:
        fields = {"target_modules": [], "target_parameters": [f"{name}.weight" for name in names]}
    stock = attach(plain, fields)[0]
    expected = {f"base_model.model.{name}.lora_{f}.default.weight" for name in names for f in "AB"}
    assert set(lora_tensors(ours)) == expected
    assert_same_adapter(ours, stock)
    assert_same_logits(ours, stock)


@EVERY_FORM
@EVERY_FAMILY
def test_names_of_lora_targets(family: str, form: str) -> None:
    """`lora_targets` of the packed model: attention, experts, shared experts, dense MLPs, as on the float model."""
    packed, plain = family_pair(family, form)
    fields = lora_targets(packed).config_arguments(shared_experts=True, dense=True)
    assert fields == lora_targets(plain).config_arguments(shared_experts=True, dense=True)
    ours, stock = (attach(model, dict(fields))[0] for model in (packed, plain))
    assert adapted_stacks(ours)
    assert_same_adapter(ours, stock)
    assert_same_logits(ours, stock)


@pytest.mark.parametrize("name", ["gate_up_proj", "down_proj"])
def test_half_packed_experts(name: str) -> None:
    """A float stack beside a packed one is adapted too, in the order of the float model."""
    _, plain = family_pair("qwen3_moe")
    packed = copy.deepcopy(plain)  # its weights are values of the format, which packing keeps
    for layer in packed.model.layers:
        parametrize_experts(layer.mlp.experts, name)
    ours, stock = (attach(model, CONFIGS["stacks-attention"](model))[0] for model in (packed, plain))
    assert_same_adapter(ours, stock)
    assert_same_logits(ours, stock)


@EVERY_FORM
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_some_layers_left_float(family: str, form: str) -> None:
    """Packed and float experts in one model, adapted together or the float ones alone."""
    skipped = "model.layers.1.mlp.experts"
    config = QMoEConfig(quantize_linears=False, experts_module=form, llm_int8_skip_modules=[skipped])
    for fields in (ATTENTION_AND_STACKS, {"target_parameters": [f"{skipped}.down_proj"]}):
        packed, plain = quantize_experts(varied(build(family)), config), varied(build(family))
        plain.load_state_dict(copy.deepcopy(packed).dequantize().state_dict())
        assert len(list(packed_modules(packed))) == 1
        ours, stock = (attach(model, fields)[0] for model in (packed, plain))
        assert_same_adapter(ours, stock)
        assert_same_logits(ours, stock)


OPTIONS: dict[str, Fields] = {
    "bias-all": {"bias": "all"},
    "bias-lora-only": {"bias": "lora_only"},
    "replicated-layers": {"layer_replication": [[0, 2], [1, 2]]},
    "embeddings": {"target_modules": ["embed_tokens", "lm_head"]},
    "tokens": {"trainable_token_indices": [3, 5]},
    "router-in-full": {"modules_to_save": ["gate", "router"]},
    "down-in-full": {"modules_to_save": ["down_proj"]},
    "gaussian": {"init_lora_weights": "gaussian"},
}


@pytest.mark.parametrize("option", OPTIONS)
@EVERY_FORM
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "llama4"])
def test_options_beside_targets(family: str, form: str, option: str) -> None:
    """What else a config trains or changes is the same, and nothing packed is among it."""
    fields = ATTENTION_AND_STACKS | OPTIONS[option]
    ours, stock = (attach(model, fields)[0] for model in family_pair(family, form))
    trainable = [{n for n, p in model.named_parameters() if p.requires_grad} for model in (ours, stock)]
    assert trainable[0] == trainable[1]
    assert_same_adapter(ours, stock)
    assert_same_logits(ours, stock)


@pytest.mark.parametrize("names", [["experts"], ["mlp"], ["lm_head", "layers.1"]], ids="-".join)
@EVERY_FORM
@pytest.mark.parametrize("targets", [ATTENTION_AND_STACKS, {"target_modules": ["q_proj"]}], ids=["stacks", "linears"])
def test_packed_experts_cannot_be_saved_in_full(targets: Fields, form: str, names: list[str]) -> None:
    """``modules_to_save`` around packed experts: one clear error, and the model as it was."""
    packed, _ = family_pair("qwen3_moe", form)
    before = parameter_names(packed)
    with pytest.raises(ValueError, match=r"asks to train all of model\.layers\.\d.* but its experts are packed"):
        attach(packed, targets | {"modules_to_save": names})
    assert parameter_names(packed) == before


@EVERY_FORM
@pytest.mark.parametrize("family", ["qwen3_moe", "llama4"])
def test_experts_that_are_the_whole_model(family: str, form: str) -> None:
    """PEFT cannot wrap a parameter of the module that it is given; the experts stay as they were."""
    for model in family_pair(family, form):
        experts = next(m for n, m in model.named_modules() if n.endswith(".experts"))
        before = [n for n, _ in experts.named_modules()]
        with pytest.raises(ValueError, match="top-level module is not supported"):
            get_peft_model(experts, LoraConfig(target_parameters=["down_proj"]))
        assert [n for n, _ in experts.named_modules()] == before


@EVERY_FORM
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "llama4"])
def test_dtypes_in_bfloat16(family: str, form: str) -> None:
    """Adapters of a bfloat16 model: float32 by default, bfloat16 without autocast, bfloat16 by transformers."""
    packed = quantize_experts(
        varied(build(family)).bfloat16(), QMoEConfig(quantize_linears=False, experts_module=form)
    )
    plain = copy.deepcopy(packed).dequantize()
    for make, expected in (
        (lambda model: get_peft_model(model, lora()), torch.float32),
        (lambda model: get_peft_model(model, lora(), autocast_adapter_dtype=False), torch.bfloat16),
        (lambda model: model.add_adapter(lora()) or model, torch.bfloat16),
    ):
        for model in (packed, plain):
            dtypes = {p.dtype for p in lora_tensors(make(copy.deepcopy(model))).values()}
            assert dtypes == {expected}


# -- names while PEFT works -----------------------------------------------------------------------------------------


@EVERY_FORM
@EVERY_FAMILY
def test_float_names(family: str, form: str) -> None:
    """The float model's names and nothing else, also of an adapted model, with a prefix, and back after an error."""
    packed, plain = family_pair(family, form)
    own_names = parameter_names(packed)
    for adapted in (False, True):
        if adapted:
            packed, plain = (attach(model, ATTENTION_AND_STACKS)[0].base_model.model for model in (packed, plain))
            own_names = parameter_names(packed)
        with suppress(KeyError), float_names(packed):
            assert sorted(parameter_names(packed)) == sorted(parameter_names(plain))
            assert [n for n, _ in packed.named_modules()] == [n for n, _ in plain.named_modules()]
            names = [n for n, _ in packed.named_parameters(prefix="outer")]
            assert sorted(names) == sorted(f"outer.{n}" for n in parameter_names(plain))
            assert (
                dict(packed.named_modules(prefix="outer")).keys() == dict(plain.named_modules(prefix="outer")).keys()
            )
            raise KeyError
        assert parameter_names(packed) == own_names


# -- training and saving --------------------------------------------------------------------------------------------


@EVERY_FORM
@pytest.mark.parametrize("family", ["llama4", "nemotron_h", "deepseek_v3", "gemma4"])
def test_training_follows_stock(family: str, form: str) -> None:
    """Loss and every gradient of three steps, weights updated in between; packed tensors keep their bits."""
    packed, plain = family_pair(family, form)
    ours, stock = (attach(model, CONFIGS["stacks-attention"](model))[0] for model in (packed, plain))
    randomize_by_name(ours, stock)
    before = snapshot(ours)
    optimizers = [torch.optim.SGD(lora_tensors(model).values(), lr=0.5) for model in (ours, stock)]
    for step in range(3):
        (loss, grads), (expected, wanted) = (loss_and_gradients(model, seed=step) for model in (ours, stock))
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
        for name, grad in grads.items():
            assert relative_error(grad, wanted[name]) < 1e-4, (step, name)
            assert grad.any()
        for optimizer in optimizers:
            optimizer.step()
    assert_same_state(ours, before)


@pytest.mark.parametrize("config", ["stacks-attention", "projections-attention", "all-linear"])
@EVERY_FORM
@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in ("qwen3_moe", "gpt_oss")])
def test_adapters_are_interchangeable(family: str, form: str, config: str, tmp_path: Path) -> None:
    """Files are the same to the byte, and load on the other model with stock PEFT and back."""
    packed, plain = family_pair(family, form)
    attached = [attempt(lambda model=model: attach(model, CONFIGS[config](model))[0]) for model in (packed, plain)]
    if isinstance(attached[1], Exception):
        pytest.skip(f"PEFT: {str(attached[1])[:60]}")
    randomize_by_name(*attached)
    expected = attempt(lambda: logits(attached[1]))
    for model, name in zip(attached, ("ours", "stock"), strict=True):
        model.save_pretrained(tmp_path / name)
    configs = [(tmp_path / name / "adapter_config.json").read_bytes() for name in ("ours", "stock")]
    assert configs[0] == configs[1]
    saved = [load_file(tmp_path / name / "adapter_model.safetensors") for name in ("ours", "stock")]
    assert list(saved[0]) == list(saved[1])
    assert all(torch.equal(saved[0][key], saved[1][key]) for key in saved[0])
    packed, plain = family_pair(family, form)
    for base, source in ((plain, "ours"), (packed, "stock")):
        loaded = PeftModel.from_pretrained(base, tmp_path / source)
        restored = lora_tensors(loaded)
        assert len(restored) == len(saved[0])
        for name, tensor in lora_tensors(attached[1]).items():
            assert torch.equal(restored[name], tensor), name
        if isinstance(expected, Tensor):
            assert relative_error(logits(loaded), expected) < 1e-5


# -- nothing of the experts is adapted ------------------------------------------------------------------------------


HINT = "No packed experts are adapted"


@pytest.fixture
def messages(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    """Warnings that this package logs."""
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    caplog.set_level(logging.WARNING)
    return caplog


@EVERY_FORM
@pytest.mark.parametrize("family", ["gpt_oss", "llama4", "nemotron_h", "qwen2_moe", "gemma4", "qwen3_5_moe"])
def test_hint_where_linears_names_miss_the_experts(family: str, form: str, messages: pytest.LogCaptureFixture) -> None:
    """Named as the linears they were, and adapted nowhere: said once."""
    for fields in ({"target_modules": ["q_proj", *PROJECTIONS]}, {"target_modules": "all-linear"}):
        packed, _ = family_pair(family, form)
        messages.clear()
        attempt(lambda model=packed, fields=fields: attach(model, fields))
        assert messages.text.count(HINT) == 1, fields


HINTED: dict[str, Fields] = {
    "regex": {"target_modules": r".*(q_proj|up_proj)"},
    "regex-by-path": {"target_modules": r".*(self_attn|experts)\.\w+_proj"},
    "regex-v4": {"target_modules": r".*(k_proj|experts\.\d+\.w1)"},
    "fused-names": {"target_modules": ["q_proj", "gate_up_proj"]},
    "path": {"target_modules": ["q_proj", "experts.gate_proj"]},
    "layers": {"target_modules": ["q_proj", "up_proj"], "layers_to_transform": [1]},
}
NOT_HINTED: dict[str, Fields] = {
    "regex": {"target_modules": r".*\.(q_proj|v_proj)"},
    "shared": {"target_modules": [f"model.layers.1.mlp.shared_expert.{name}" for name in PROJECTIONS]},
    "shared-suffix": {"target_modules": ["shared_expert.gate_proj"]},
    "other-layer": {"target_modules": ["q_proj", "up_proj"], "layers_to_transform": [0]},
    "excluded": {"target_modules": "all-linear", "exclude_modules": r".*experts.*"},
    "stacks": {"target_modules": ["q_proj", "up_proj"], "target_parameters": STACKS},
}


@pytest.mark.parametrize("case", HINTED)
def test_hint(case: str, messages: pytest.LogCaptureFixture) -> None:
    """However the experts' linears are named."""
    packed, _ = family_pair("qwen2_moe")
    attach(packed, HINTED[case])
    assert messages.text.count(HINT) == 1


@pytest.mark.parametrize("case", NOT_HINTED)
def test_no_hint(case: str, messages: pytest.LogCaptureFixture) -> None:
    """Nothing of the routed experts was meant, or they are adapted."""
    packed, _ = family_pair("qwen2_moe")  # the first layer is dense
    attach(packed, NOT_HINTED[case])
    assert HINT not in messages.text


@pytest.mark.parametrize("family", CONVERTED)
def test_no_hint_where_peft_converts(family: str, messages: pytest.LogCaptureFixture) -> None:
    """There the experts are adapted."""
    for fields in ({"target_modules": ["q_proj", *PROJECTIONS]}, {"target_modules": "all-linear"}):
        packed, _ = family_pair(family)
        attach(packed, fields)
        assert HINT not in messages.text


@EVERY_FORM
@EVERY_FAMILY
def test_parameters_that_match_nothing(family: str, form: str) -> None:
    """Raises, although PEFT would go on with attention alone; the model is as it was."""
    packed, _ = family_pair(family, form)
    names, expected = parameter_names(packed), logits(packed)
    for parameters in (["experts.gate_proj"], ["absmax", "original"], ["experts.down_proj_absmax"]):
        with pytest.raises(ValueError, match="match no parameter of the model"):
            attach(packed, {"target_modules": ["q_proj"], "target_parameters": parameters})
    assert parameter_names(packed) == names
    assert torch.equal(logits(packed), expected)


# -- other entrances ------------------------------------------------------------------------------------------------


ENTERED = ("qwen3_moe", "gpt_oss", "llama4", "nemotron_h")
EVERY_ENTERED = pytest.mark.parametrize("family", ENTERED)


@EVERY_FORM
@EVERY_ENTERED
def test_injected(family: str, form: str) -> None:
    """`inject_adapter_in_model`, and the model's own `add_adapter`."""
    for enter in (lambda model: inject_adapter_in_model(lora(), model), lambda model: model.add_adapter(lora())):
        models = family_pair(family, form)
        for model in models:
            torch.manual_seed(0)
            enter(model)
        assert any(isinstance(module, ParamWrapper) for module in models[0].modules())
        assert_same_adapter(*models)
        assert_same_logits(*models)


@EVERY_FORM
@EVERY_ENTERED
def test_injected_empty_and_filled(family: str, form: str) -> None:
    """`inject_adapter_in_model` on the meta device, then `set_peft_model_state_dict`, as diffusers does."""
    packed, plain = family_pair(family, form)
    stock, _ = attach(plain, ATTENTION_AND_STACKS)
    randomize_by_name(stock)
    tensors = {n.removeprefix("base_model.model."): t for n, t in get_peft_model_state_dict(stock).items()}
    inject_adapter_in_model(lora(), packed, low_cpu_mem_usage=True)
    assert all(tensor.is_meta for tensor in lora_tensors(packed).values())
    set_peft_model_state_dict(packed, tensors, low_cpu_mem_usage=True)
    assert relative_error(logits(packed), logits(stock)) < 1e-5


@EVERY_FORM
@EVERY_ENTERED
def test_transformers_integration(family: str, form: str, tmp_path: Path) -> None:
    """``add_adapter`` twice, ``save_pretrained``, ``load_adapter`` of transformers, set and disabled."""
    packed, plain = family_pair(family, form)
    base = logits(plain)
    for model in (packed, plain):
        model.add_adapter(lora(), "one")
        model.add_adapter(lora(r=2), "two")
    randomize_by_name(packed, plain)
    outputs = []
    for name in ("one", "two"):
        packed.set_adapter(name)
        plain.set_adapter(name)
        outputs.append(logits(plain))
        assert relative_error(logits(packed), outputs[-1]) < 1e-5
        packed.save_pretrained(tmp_path / name)
    packed.disable_adapters()
    assert relative_error(logits(packed), base) < 1e-5
    for fresh in family_pair(family, form):
        for name, expected in zip(("one", "two"), outputs, strict=True):
            fresh.load_adapter(tmp_path / name, name)
            fresh.set_adapter(name)
            assert relative_error(logits(fresh), expected) < 1e-5


@pytest.mark.parametrize("low_cpu_mem_usage", [False, True])
@EVERY_FORM
@EVERY_ENTERED
def test_second_adapter(family: str, form: str, low_cpu_mem_usage: bool, tmp_path: Path) -> None:
    """Loaded beside the first, added beside it, each alone and both at once, one deleted; all as in stock."""
    packed, _ = family_pair(family, form)
    saved = attach(packed, ATTENTION_AND_STACKS)[0]
    randomize_by_name(saved)
    saved.save_pretrained(tmp_path)
    pair = []
    for base in family_pair(family, form):
        model, _ = attach(base, ATTENTION_AND_STACKS)
        torch.manual_seed(1)
        model.add_adapter("added", lora(r=2), low_cpu_mem_usage=False)
        model.load_adapter(tmp_path, "loaded", low_cpu_mem_usage=low_cpu_mem_usage)
        pair.append(model)
    assert_same_adapter(*pair)
    assert not any(parameter.is_meta for parameter in pair[0].parameters())
    for model in pair:
        model.set_adapter("loaded")
    assert relative_error(logits(pair[0]), logits(saved)) < 1e-5
    for names in ("added", "default", ["default", "loaded"], ["added", "loaded", "default"]):
        for model in pair:
            model.base_model.set_adapter(names)
        assert_same_logits(*pair)
    for model in pair:
        model.delete_adapter("added")
    assert_same_adapter(*pair)
    assert_same_logits(*pair)


@EVERY_FORM
@EVERY_ENTERED
def test_second_adapter_of_other_parameters(family: str, form: str) -> None:
    """PEFT refuses it, and so it is here; the first adapter stays. One of linears alone is fine."""
    pair = [attach(model, ATTENTION_AND_STACKS)[0] for model in family_pair(family, form)]
    before = list(lora_tensors(pair[0]))
    for model in pair:
        with pytest.raises(ValueError, match="same set of parameters"):
            model.add_adapter("other", lora(target_parameters=STACKS[2:]))
    assert list(lora_tensors(pair[0])) == before
    for model in pair:
        torch.manual_seed(0)
        model.add_adapter("linears", LoraConfig(r=2, target_modules=["v_proj", "q_proj"]))
    assert_same_adapter(*pair)
    for name in ("linears", "default"):
        for model in pair:
            model.set_adapter(name)
        assert_same_logits(*pair)


@EVERY_FORM
def test_mixed_model(form: str) -> None:
    """`PeftMixedModel` takes no model that says it is quantized, and leaves this one as it was."""
    packed, plain = family_pair("qwen3_moe", form)
    assert isinstance(get_peft_model(plain, lora(), mixed=True), PeftMixedModel)
    names = parameter_names(packed)
    with pytest.raises(ValueError, match="4bit quantization not supported"):
        get_peft_model(packed, lora(), mixed=True)
    assert parameter_names(packed) == names


@EVERY_FORM
@EVERY_ENTERED
def test_again_after_unload(family: str, form: str) -> None:
    """Another adapter after the first was taken off finds the model as it was."""
    packed, plain = family_pair(family, form)
    names, expected, before = parameter_names(packed), logits(packed), snapshot(packed)
    for fields in (ATTENTION_AND_STACKS, {"target_modules": "all-linear"}, {"target_parameters": STACKS[2:]}):
        pair = [attempt(lambda model=model, fields=fields: attach(model, fields)[0]) for model in (packed, plain)]
        if isinstance(pair[1], Exception):  # PEFT fails half-way in NemotronH, and leaves what it has done
            assert isinstance(pair[0], type(pair[1]))
            packed, plain = family_pair(family, form)
            continue
        assert_same_adapter(*pair)
        assert_same_logits(*pair)
        assert pair[0].unload() is packed
        assert pair[1].unload() is plain
        assert parameter_names(packed) == names
        assert torch.equal(logits(packed), expected)
        assert_same_state(packed, before)


def test_models_side_by_side() -> None:
    """Adapters of several models in one process know nothing of each other, forms mixed and in any order."""
    keys = [("qwen3_moe", "auto"), ("llama4", "auto"), ("qwen3_moe", "parametrize"), ("gpt_oss", "auto")]
    pairs = [family_pair(*key) for key in keys]
    packed = [attach(pair[0], ATTENTION_AND_STACKS)[0] for pair in pairs]
    plain = [attach(pair[1], ATTENTION_AND_STACKS)[0] for pair in reversed(pairs)][::-1]
    randomize_by_name(*packed, *plain)
    expected = [logits(model) for model in plain]
    for order in (range(len(keys)), reversed(range(len(keys)))):
        for i in order:
            assert relative_error(logits(packed[i]), expected[i]) < 1e-5


@pytest.mark.parametrize("low_cpu_mem_usage", [False, True])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "mixtral"])
def test_auto_class_quantizes_the_base(family: str, low_cpu_mem_usage: bool, tmp_path: Path) -> None:
    """`AutoPeftModelForCausalLM`, with the base's path in the adapter's config and our config as an argument."""
    _, plain = family_pair(family)
    plain.save_pretrained(tmp_path / "base")
    config = QMoEConfig(quantize_linears=False)
    base = type(plain).from_pretrained(tmp_path / "base")
    model, _ = attach(base, ATTENTION_AND_STACKS)
    randomize_by_name(model)
    model.save_pretrained(tmp_path / "adapter")
    assert str(tmp_path / "base") in (tmp_path / "adapter" / "adapter_config.json").read_text()
    loaded = AutoPeftModelForCausalLM.from_pretrained(
        tmp_path / "adapter", quantization_config=config, low_cpu_mem_usage=low_cpu_mem_usage
    )
    assert adapted_stacks(loaded)
    again = PeftModel.from_pretrained(
        type(plain).from_pretrained(tmp_path / "base", quantization_config=config), tmp_path / "adapter"
    )
    assert torch.equal(logits(loaded), logits(again))
    dequantized = copy.deepcopy(again.unload()).dequantize()
    control = PeftModel.from_pretrained(dequantized, tmp_path / "adapter")
    assert relative_error(logits(loaded), logits(control)) < 1e-5


@EVERY_FORM
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_transformers_loads_base_and_adapter(family: str, form: str, tmp_path: Path) -> None:
    """``from_pretrained`` with an adapter's folder, whose base is quantized while it is loaded."""
    _, plain = family_pair(family, form)
    plain.save_pretrained(tmp_path / "base")
    config = QMoEConfig(quantize_linears=False, experts_module=form)
    model, _ = attach(type(plain).from_pretrained(tmp_path / "base"), ATTENTION_AND_STACKS)
    randomize_by_name(model)
    model.save_pretrained(tmp_path / "adapter")
    loaded = type(plain).from_pretrained(tmp_path / "adapter", quantization_config=config)
    assert any(isinstance(module, ParamWrapper) for module in loaded.modules())
    assert relative_error(logits(loaded), logits(model)) < 1e-5  # its weights are values of the format
