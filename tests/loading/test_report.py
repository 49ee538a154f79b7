"""`report` accounts for every weight and byte of a model, and says what stayed in full precision."""

import json

import pytest
import torch
from torch import nn

from hf_qmoe import QMoEConfig, parametrize_experts, quantize_experts, report
from hf_qmoe.memory import storage_bytes
from tests.support.models import FAMILIES, tiny_model


@pytest.mark.parametrize("quantize_linears", [True, False], ids=["linears", "experts-alone"])
@pytest.mark.parametrize("form", ["nbit", "parametrize"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_weight_is_counted_once(family: str, form: str, quantize_linears: bool) -> None:
    """Weights and bytes of all parts are those of the model, and the forms are named."""
    config = QMoEConfig(experts_module=form, experts_double_quant=True, quantize_linears=quantize_linears)
    model = quantize_experts(tiny_model(family), config)
    found = report(model)
    assert sum(part.parameters for part in found.parts) == model.num_parameters()
    metadata = sum(b.nbytes for name, b in model.named_buffers() if name.endswith("quant_metadata"))
    others = sum(b.nbytes for name, b in model.named_buffers() if not name.endswith("quant_metadata"))
    assert sum(part.nbytes for part in found.parts) == storage_bytes(model) - metadata - others
    forms = {part.form for part in found.parts}
    expected = {"ExpertsNbit" if form == "nbit" else "parametrized", "float"}
    assert forms == expected | ({"Linear4bit"} if quantize_linears else set())
    packed = [part for part in found.parts if part.name.endswith(("gate_up_proj", "down_proj"))]
    assert len(packed) == 4
    assert all(part.quant_type == "nf4" and part.form in expected for part in packed)
    assert all(("arithmetic" in part.note) == (form == "parametrize") for part in packed)


def test_experts_left_in_full_precision_are_said_to_be() -> None:
    """A stack that a skip list left out is a float part with a note; the printed table has it too."""
    model = quantize_experts(tiny_model("qwen3_moe"), QMoEConfig(modules_to_not_convert=["layers.1.mlp.experts"]))
    found = report(model)
    (left,) = [part for part in found.parts if "full precision" in part.note]
    assert (left.name, left.form, left.quant_type) == ("model.layers.1.mlp.experts", "float", "float32")
    assert left.nbytes == 4 * left.parameters == 4 * (4 * 192 * 64 + 4 * 64 * 96)
    assert "routed experts in full precision" in str(found)
    assert "ExpertsNbit" in str(found)


def test_a_module_of_ones_own() -> None:
    """Parameters packed by `parametrize_experts` are listed beside the float ones of their module."""
    module = nn.Bilinear(64, 64, 8, dtype=torch.bfloat16)
    parametrize_experts(module, "weight", "int8")
    parts = {part.name: part for part in report(module).parts}
    assert parts["weight"].quant_type == "int8"
    assert parts["weight"].parameters == 8 * 64 * 64
    assert parts["weight"].nbytes == 8 * 64 * 64 + 4 * 8 * 64
    assert (parts[""].form, parts[""].quant_type, parts[""].parameters) == ("float", "bfloat16", 8)


def test_tied_weights_are_one_part() -> None:
    model = quantize_experts(tiny_model("qwen3_moe", tie_word_embeddings=True), QMoEConfig())
    found = report(model)
    assert found.parameters == model.num_parameters()
    assert [part.name for part in found.parts if part.parameters == 128 * 64] == ["model.embed_tokens"]


@pytest.mark.parametrize("form", ["nbit", "parametrize"])
def test_share_of_experts_in_full_precision(form: str) -> None:
    """By weights; the biases of packed experts are no experts in full precision."""
    config = QMoEConfig(experts_module=form)
    assert report(quantize_experts(tiny_model("gpt_oss"), config)).experts_in_full_precision == 0
    config = QMoEConfig(experts_module=form, modules_to_not_convert=["layers.1.mlp.experts"])
    assert report(quantize_experts(tiny_model("qwen3_moe"), config)).experts_in_full_precision == 0.5
    assert report(tiny_model("mixtral")).experts_in_full_precision == 1
    assert report(nn.Linear(64, 64)).experts_in_full_precision is None


def test_json() -> None:
    """Totals are those of the parts."""
    model = quantize_experts(tiny_model("gpt_oss"), QMoEConfig(modules_to_not_convert=["layers.1.mlp.experts"]))
    found = report(model)
    content = json.loads(found.to_json())
    assert content == found.to_dict()
    assert content["parts"] == [vars(part) for part in found.parts]
    totals = content["totals"]
    assert totals["parameters"] == model.num_parameters()
    assert set(totals["forms"]) == {"float", "Linear4bit", "ExpertsNbit"}
    for name in ("parameters", "nbytes"):
        assert (
            totals[name]
            == sum(form[name] for form in totals["forms"].values())
            == sum(p[name] for p in content["parts"])
        )
    assert 0.5 < totals["experts_in_full_precision"] < 0.51  # biases of those left out are counted with them
