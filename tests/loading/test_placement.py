"""Where `device_map="auto"` puts packed models (case 5): by their packed size, not by that of the float weights."""

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.integrations.accelerate import _get_device_map, compute_module_sizes

from hf_qmoe import QMoEConfig
from hf_qmoe.memory import storage_bytes
from hf_qmoe.quantizer import QMoEHfQuantizer
from tests.lora.families import CASES, build
from tests.support.models import FAMILIES, tiny_config


LAYERS = 24


def prepared(model: PreTrainedModel, config: QMoEConfig) -> tuple[PreTrainedModel, QMoEHfQuantizer]:
    """A model on the meta device as transformers places it, before it is loaded."""
    quantizer = QMoEHfQuantizer(config, pre_quantized=False)
    quantizer.preprocess_model(model, device_map=None, checkpoint_files=None)
    return model, quantizer


def meta_model(family: str) -> PreTrainedModel:
    """Deep enough that a layer is a small part of it."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(tiny_config(family, num_hidden_layers=LAYERS), dtype=torch.bfloat16)


@pytest.mark.parametrize("experts_module", ["nbit", "parametrize"])
@pytest.mark.parametrize("experts_quant_type", ["nf4", "int8"])
@pytest.mark.parametrize("quantize_linears", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_two_devices_of_little_more_than_the_packed_size(
    family: str, quantize_linears: bool, experts_quant_type: str, experts_module: str
) -> None:
    """Nothing goes to the CPU or the disk, though the float model would by far not fit."""
    model = meta_model(family)
    float_bytes = storage_bytes(model)
    config = QMoEConfig(
        experts_quant_type=experts_quant_type, quantize_linears=quantize_linears, experts_module=experts_module
    )
    model, quantizer = prepared(model, config)
    packed_bytes = compute_module_sizes(model, quantizer)[0][""]
    assert packed_bytes < 0.75 * float_bytes
    each = int(1.2 * packed_bytes / 2)
    device_map = _get_device_map(model, "auto", {0: each, 1: each, "cpu": 10**12}, quantizer)
    assert set(device_map.values()) == {0, 1}


@pytest.mark.parametrize("family", [name for name in CASES if name != "dense"])
def test_sizes_are_those_of_the_packed_experts(family: str) -> None:
    """For each family: what transformers counts before loading is what the loaded experts take."""
    with torch.device("meta"):
        model = build(family)
    model, quantizer = prepared(model, QMoEConfig(quantize_linears=False))
    counted = compute_module_sizes(model, quantizer)[0]
    assert counted[""] == storage_bytes(model)
