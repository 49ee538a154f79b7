"""Experts that a model ties: DiffusionGemma's encoder and decoder share theirs."""

import warnings
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import PreTrainedModel

from hf_qmoe import QMoEConfig, quantize_experts, report
from tests.support.checkpoints import assert_same_tensors, packed_state, tensors_on_disk
from tests.sweep.registry import decorated
from tests.sweep.tiny import build, find_models


ENCODER, DECODER = "model.encoder.language_model.layers.0.experts", "model.decoder.layers.0.experts"


@pytest.fixture(scope="module")
def source() -> PreTrainedModel:
    """The float model."""
    ((cls, config),) = find_models(decorated()["DiffusionGemmaTextExperts"]).items()
    return build(cls, config)


@pytest.fixture(scope="module")
def checkpoint(source: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its checkpoint."""
    path = tmp_path_factory.mktemp("tied")
    source.save_pretrained(path)
    return path


def assert_tied(model: PreTrainedModel) -> None:
    """Encoder and decoder hold the same tensors."""
    encoder, decoder = model.get_submodule(ENCODER), model.get_submodule(DECODER)
    for name, parameter in encoder.named_parameters():
        assert decoder.get_parameter(name) is parameter, name
    assert torch.equal(encoder.quant_metadata, decoder.quant_metadata)


@pytest.mark.parametrize(("quant_type", "double_quant"), [("nf4", False), ("nf4", True), ("bf16", False)])
def test_scales_are_tied_too(
    source: PreTrainedModel,
    checkpoint: Path,
    tmp_path: Path,
    warnings_logged: list[str],
    quant_type: str,
    double_quant: bool,
) -> None:
    config = QMoEConfig(quant_type, experts_double_quant=double_quant, quantize_linears=False)
    model, info = type(source).from_pretrained(checkpoint, quantization_config=config, output_loading_info=True)
    assert not info["missing_keys"]
    assert_tied(model)
    model.save_pretrained(tmp_path)
    stored = [name for name in tensors_on_disk(tmp_path) if name.endswith(("experts.gate_up_proj", "_absmax"))]
    assert stored
    assert not any("encoder" in name for name in stored)
    again = type(source).from_pretrained(tmp_path)
    assert_tied(again)
    assert_same_tensors(packed_state(again), packed_state(model))
    assert not warnings_logged
    assert report(again).parts


@pytest.mark.parametrize("how", ["from_pretrained", "quantize_experts"])
def test_back_to_float(source: PreTrainedModel, checkpoint: Path, how: str) -> None:
    config = QMoEConfig(quantize_linears=False)
    if how == "from_pretrained":
        model = type(source).from_pretrained(checkpoint, quantization_config=config)
    else:
        model = quantize_experts(type(source).from_pretrained(checkpoint), config)
    assert_tied(model)
    model.dequantize()
    assert model.get_submodule(ENCODER).gate_up_proj is model.get_submodule(DECODER).gate_up_proj


def test_both_are_adapted_without_a_warning(source: PreTrainedModel, checkpoint: Path) -> None:
    model = type(source).from_pretrained(checkpoint, quantization_config=QMoEConfig(quantize_linears=False))
    targets = [f"{path}.{name}" for path in (ENCODER, DECODER) for name in ("gate_up_proj", "down_proj")]
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        adapted = get_peft_model(model, LoraConfig(target_modules=[], target_parameters=targets))
    for path in (ENCODER, DECODER):
        found = [name for name, _ in adapted.named_parameters() if path in name and "lora_A" in name]
        assert len(found) == 2, path
