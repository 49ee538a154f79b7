"""`lora_targets`: the names fed to PEFT adapt exactly what was meant, whatever form the experts have."""

import re
import warnings

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora.layer import LoraLayer
from torch import nn

from hf_qmoe.experts import ExpertsNbit
from hf_qmoe.layout import float_stack_shapes, follows_experts_interface
from hf_qmoe.lora.targets import LoraTargets, lora_targets
from hf_qmoe.parametrize import parametrize_experts
from tests.lora.families import CASES, build


EVERY_FAMILY = pytest.mark.parametrize("family", CASES)
#: Where PEFT takes a shared expert's ``gate_proj`` for the routed experts'.
RENAMING = ("deepseek_v3", "deepseek_v32", "qwen3_next", "afmoe")


def expected(model: nn.Module, *patterns: str) -> set[str]:
    """Names of the linears of a float model that a pattern matches as a whole."""
    linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    return {name for name in linears if any(re.fullmatch(pattern, name) for pattern in patterns)}


def expected_stacks(model: nn.Module, family: str) -> list[str]:
    """Full names of the routed experts' parameters, in the model's order."""
    return [name for name, _ in model.named_parameters() if name.endswith(tuple(CASES[family].experts or ["none"]))]


def adapted(model: nn.Module) -> tuple[set[str], list[str]]:
    """Names of linears and of stacks that hold an adapter, by the names of the base model; stacks in its order."""
    linears, stacks = set(), []
    for name, module in model.get_base_model().named_modules():
        if not isinstance(module, LoraLayer):
            continue
        name = name.replace(".base_layer", "")
        if type(module).__name__ == "ParamWrapper" and not isinstance(module.get_base_layer(), nn.Linear):
            stacks.append(f"{name}.{module.parameter_name}")
        else:
            linears.add(name)
    return linears, stacks


def attach(model: nn.Module, **targets: list[str]) -> nn.Module:
    """The model with an adapter, by stock PEFT."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return get_peft_model(model, LoraConfig(r=4, **targets))


@EVERY_FAMILY
def test_names_hit_what_they_name(family: str) -> None:
    """Attention and experts, and with them shared experts and dense MLPs, as PEFT matches the names."""
    case, model = CASES[family], build(family)
    targets = lora_targets(model)
    assert targets.experts == list(case.experts)
    assert set(targets.shared_experts) == expected(model, case.shared_experts)
    assert set(targets.dense) == expected(model, case.dense)
    assert targets.shared_stacks == []
    for more in ({}, {"shared_experts": True}, {"shared_experts": True, "dense": True}):
        model = build(family)
        patterns = [case.attention, *(getattr(case, part) for part in more)]
        linears, stacks = expected(model, *patterns), expected_stacks(model, family)
        assert expected(model, case.attention)
        found_linears, found_stacks = adapted(attach(model, **targets.config_arguments(**more)))
        assert found_linears == linears
        assert sorted(found_stacks) == sorted(stacks)


@pytest.mark.parametrize("family", [family for family in CASES if family not in RENAMING])
def test_plain_lists_do(family: str) -> None:
    """Where PEFT renames nothing, the lists can be used as they are."""
    model, case = build(family), CASES[family]
    targets = lora_targets(model)
    assert targets.renamed == []
    linears, stacks = expected(model, case.attention, case.shared_experts), expected_stacks(model, family)
    lists = {"target_modules": targets.attention + targets.shared_experts, "target_parameters": targets.experts}
    found_linears, found_stacks = adapted(attach(model, **lists))
    assert (found_linears, sorted(found_stacks)) == (linears, sorted(stacks))


@pytest.mark.parametrize("family", RENAMING)
def test_renamed_by_peft(family: str) -> None:
    """The names that PEFT would turn into the routed experts' are told, and exactly those."""
    model = build(family)
    targets = lora_targets(model)
    names = [*targets.attention, *targets.shared_experts, *targets.dense]
    kept, renamed = [], []
    for name in names:
        try:
            config = attach(build(family), target_modules=[name]).peft_config["default"]
        except ValueError:
            renamed.append(name)
        else:
            (kept if name in config.target_modules else renamed).append(name)
    assert targets.renamed == renamed
    assert all(name.endswith(("gate_proj", "up_proj", "down_proj")) for name in renamed)


def pack(model: nn.Module, form: str) -> None:
    """Packs the experts of a float model in place."""
    for name, module in list(model.named_modules()):
        if follows_experts_interface(module) and form == "nbit":
            ExpertsNbit.from_experts(module)
        elif form == "parametrize" and name.endswith("experts") and float_stack_shapes(module):
            for stack in float_stack_shapes(module):
                parametrize_experts(module, stack)
        elif form == "bf16" and name.endswith("experts") and float_stack_shapes(module):
            for stack in float_stack_shapes(module):
                parametrize_experts(module, stack, "bf16")


@pytest.mark.parametrize("form", ["nbit", "parametrize", "bf16"])
@EVERY_FAMILY
def test_same_for_packed_experts(family: str, form: str) -> None:
    """Packing changes no name."""
    model = build(family)
    before = lora_targets(model)
    pack(model, form)
    assert lora_targets(model) == before


@EVERY_FAMILY
def test_same_for_an_adapted_model(family: str) -> None:
    """Nor does an adapter, on anything, or modules that are trained in full."""
    model = build(family)
    before = lora_targets(model)
    arguments = before.config_arguments(shared_experts=True, dense=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrapped = get_peft_model(model, LoraConfig(r=4, modules_to_save=["lm_head"], **arguments))
    assert lora_targets(wrapped) == before
    assert lora_targets(wrapped.get_base_model()) == before


def test_suffix_that_would_hit_more_is_longer() -> None:
    """Names are lengthened until they hit nothing else, down to the full name."""
    model = build("qwen3_moe")
    model.add_module("q_proj", nn.Linear(4, 4))
    assert lora_targets(model).attention == ["self_attn.q_proj", "k_proj", "v_proj", "o_proj"]
    tower = nn.Module()
    tower.add_module("self_attn", nn.Module())
    tower.self_attn.add_module("q_proj", nn.Linear(4, 4))
    model.add_module("tower", tower)
    attention = lora_targets(model).attention
    assert attention == [
        *("model.layers.0.self_attn.q_proj", "k_proj", "v_proj", "o_proj"),
        "model.layers.1.self_attn.q_proj",
    ]


def test_ambiguous_experts_are_fully_qualified() -> None:
    """A module elsewhere with a parameter of the same name takes the suffix away."""
    model = build("qwen3_moe")
    other = nn.Module()
    other.register_parameter("gate_up_proj", nn.Parameter(torch.zeros(2, 2)))
    model.add_module("mlp", nn.Module())
    model.mlp.add_module("experts", other)
    assert lora_targets(model).experts == [
        *("model.layers.0.mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
        "model.layers.1.mlp.experts.gate_up_proj",
    ]


def test_half_packed_experts() -> None:
    """A module with one stack packed and one float keeps both, whichever that is."""
    for name in ("gate_up_proj", "down_proj"):
        model = build("qwen3_moe")
        for layer in model.model.layers:
            parametrize_experts(layer.mlp.experts, name)
        assert lora_targets(model).experts == list(CASES["qwen3_moe"].experts)


def test_what_lies_outside_decides_nothing() -> None:
    """A class of layers called after its attention, and an MLP called shared where nothing is routed."""
    model = build("dense")
    before = lora_targets(model)
    layer = model.model.layers[0]
    layer.__class__ = type("LlamaAttentionDecoderLayer", (type(layer),), {})
    layer.add_module("projection", nn.Linear(4, 4))
    assert lora_targets(model) == before
    model.model.layers[1].add_module("shared_mlp", type(layer.mlp)(model.config))
    added = [f"model.layers.1.shared_mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj")]
    assert lora_targets(model) == before._replace(dense=before.dense + added)


def test_module_without_anything() -> None:
    """A module that is no model has empty lists."""
    assert lora_targets(nn.Linear(4, 4)) == LoraTargets([], [], [], [], [], [])
