"""Case 5 through `from_pretrained`, over many families: two devices of little more than the packed size, and "gate".

More families and formats on a prepared model: tests/loading/test_placement.py; "gate" in qwen3_moe:
tests/loading/test_selection.py.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from hf_qmoe import QMoEConfig, quantize_experts
from tests.cases.helpers import tensors_of
from tests.lora.families import CASES, build


FAMILIES = ("qwen3_moe", "gpt_oss", "deepseek_v3", "qwen3_5_moe", "llama4", "nemotron_h", "gemma4")
#: Each with everything in 4 bit; two with experts alone, in the other form.
PLACED = [*((family, "auto", True) for family in FAMILIES), *((f, "parametrize", False) for f in FAMILIES[:2])]
#: Layers, so many that one is a small part of the model.
DEPTH = 16
#: Fields that follow from the number of layers, to be computed anew.
_DERIVED = {"layer_types": None, "no_rope_layers": None, "moe_layers": None, "mlp_layer_types": None}


def deep_config(family: str) -> PreTrainedConfig:
    """The family's tiny config with `DEPTH` layers."""
    config = CASES[family].config()
    values = config.to_dict()
    if family == "nemotron_h":
        changes: dict[str, Any] = {"layers_block_type": ["mamba", "moe", "attention", "moe"] * (DEPTH // 4)}
        values.pop("num_hidden_layers", None)
        values.pop("layer_types", None)
    else:
        kinds = list(dict.fromkeys(values.get("layer_types") or []))
        changes = {n: v for n, v in _DERIVED.items() if n in values} | {"num_hidden_layers": DEPTH}
        if len(kinds) > 1:
            changes["layer_types"] = kinds * (DEPTH // len(kinds))
    return type(config).from_dict(values | changes)


class Placed(Exception):
    """Carries the device map that a load arrived at."""


def device_map_of(
    cls: type[PreTrainedModel], path: Path, each: int, monkeypatch: pytest.MonkeyPatch, **kwargs: object
) -> dict[str, object]:
    """What ``device_map="auto"`` becomes over two devices of `each` bytes, taken where weights would be read."""

    def stop(model: PreTrainedModel, state_dict: Any, checkpoint_files: Any, load_config: Any, *rest: Any) -> None:
        raise Placed(load_config.device_map)

    monkeypatch.setattr(PreTrainedModel, "_load_pretrained_model", staticmethod(stop))
    max_memory = {0: each, 1: each, "cpu": 10**12}
    with pytest.raises(Placed) as placed:
        cls.from_pretrained(path, device_map="auto", max_memory=max_memory, **kwargs)
    return placed.value.args[0]


@pytest.fixture(scope="module")
def deep_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[type[PreTrainedModel], Path]]:
    """Class and bf16 checkpoint of a deep model, made when it is first asked for."""

    @cache
    def make(family: str) -> tuple[type[PreTrainedModel], Path]:
        model = AutoModelForCausalLM.from_config(deep_config(family), dtype=torch.bfloat16)
        path = tmp_path_factory.mktemp(family)
        model.save_pretrained(path)
        return type(model), path

    return make


@pytest.mark.parametrize(("family", "form", "quantize_linears"), PLACED)
def test_no_layer_leaves_two_fake_devices(
    family: str,
    form: str,
    quantize_linears: bool,
    deep_checkpoint: Callable[[str], tuple[type[PreTrainedModel], Path]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`max_memory` is 1.2 times the bytes that the model takes once it is loaded, in halves."""
    cls, path = deep_checkpoint(family)
    config = QMoEConfig(experts_module=form, quantize_linears=quantize_linears)
    packed = tensors_of(cls.from_pretrained(path, quantization_config=config))
    packed_bytes = sum({t.data_ptr(): t.untyped_storage().nbytes() for t in packed.values()}.values())
    assert packed_bytes < 0.75 * sum(f.stat().st_size for f in path.glob("*.safetensors"))
    for slack, expected in ((1.2, {0, 1}), (0.8, {0, 1, "cpu"})):
        kwargs = {"llm_int8_enable_fp32_cpu_offload": True} if slack < 1 and quantize_linears else {}
        wanted = QMoEConfig(experts_module=form, quantize_linears=quantize_linears, **kwargs)
        placed = device_map_of(cls, path, int(slack * packed_bytes / 2), monkeypatch, quantization_config=wanted)
        assert set(placed.values()) == expected


@pytest.mark.parametrize(
    ("family", "form"),
    [*((family, "auto") for family in CASES if family != "dense"), *((f, "parametrize") for f in FAMILIES)],
)
def test_gate_is_not_gate_up_proj(family: str, form: str) -> None:
    """With ``"gate"`` in the skip list the same tensors are packed as without; only a module of that name stays."""
    packed = []
    for skip in (None, ["gate"]):
        model = quantize_experts(build(family), QMoEConfig(experts_module=form, modules_to_not_convert=skip))
        packed.append({n for n, tensor in tensors_of(model).items() if tensor.dtype == torch.uint8})
    assert packed[0] == packed[1]
    assert any(name.endswith(("gate_up_proj", "experts.up_proj")) for name in packed[1])
