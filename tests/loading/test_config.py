"""`QMoEConfig`: defaults, what it refuses, and what survives ``config.json``."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, BitsAndBytesConfig
from transformers.quantizers.auto import AutoHfQuantizer, AutoQuantizationConfig

from hf_qmoe import QMoEConfig
from hf_qmoe.quantizer import QMoEHfQuantizer
from tests.support.checkpoints import load


FULL = {
    "experts_quant_type": "int8",
    "experts_blocksize": 128,
    "experts_double_quant": True,
    "experts_exact": False,
    "experts_overrides": {"layers.0.mlp.experts": "fp8", r"layers\.\d+": "nf4"},
    "quantize_linears": False,
    "modules_to_not_convert": ["layers.1.mlp.experts", "q_proj"],
    "bnb_4bit_quant_type": "fp4",
    "bnb_4bit_compute_dtype": "float16",
    "bnb_4bit_use_double_quant": True,
    "bnb_4bit_quant_storage": "bfloat16",
    "llm_int8_skip_modules": ["v_proj"],
    "llm_int8_enable_fp32_cpu_offload": True,
}
CONFIGS = {"defaults": {}, "every_field": FULL}


def test_defaults() -> None:
    """The defaults are nf4 at block size 64 for experts and linears alike, in the dtype of the model."""
    config = QMoEConfig()
    assert isinstance(config, BitsAndBytesConfig)
    assert config.to_dict() == {
        "quant_method": "qmoe",
        "experts_quant_type": "nf4",
        "experts_blocksize": 64,
        "experts_double_quant": False,
        "experts_module": "auto",
        "experts_exact": None,
        "experts_overrides": None,
        "quantize_linears": True,
        "modules_to_not_convert": None,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_compute_dtype": None,
        "bnb_4bit_use_double_quant": False,
        "bnb_4bit_quant_storage": "uint8",
        "llm_int8_skip_modules": None,
        "llm_int8_enable_fp32_cpu_offload": False,
    }
    assert config.load_in_4bit
    assert not config.load_in_8bit
    assert config.is_quantizable()
    assert config.quantization_method() == "nf4"


@pytest.mark.parametrize("fields", CONFIGS.values(), ids=CONFIGS)
def test_round_trip(fields: dict[str, object]) -> None:
    """A dict, JSON text, and transformers' own registry give back an equal config of this class."""
    config = QMoEConfig(**fields)
    values = config.to_dict()
    assert json.loads(json.dumps(values)) == values
    for restored in (QMoEConfig.from_dict(values), AutoQuantizationConfig.from_dict(json.loads(json.dumps(values)))):
        assert type(restored) is QMoEConfig
        assert restored.to_dict() == values
        assert restored.bnb_4bit_compute_dtype == config.bnb_4bit_compute_dtype
        assert restored.bnb_4bit_quant_storage == config.bnb_4bit_quant_storage
    for name, value in fields.items():
        assert values[name] == value


def test_json_file(tmp_path: Path) -> None:
    """`to_json_file` writes every field, so that the file reads back as the same config."""
    file = tmp_path / "config.json"
    QMoEConfig(**FULL).to_json_file(file)
    assert QMoEConfig.from_dict(json.loads(file.read_text())).to_dict() == QMoEConfig(**FULL).to_dict()


def test_dtypes_as_objects_and_as_names() -> None:
    """A dtype and its name are the same setting, written as a name."""
    by_object = QMoEConfig(bnb_4bit_compute_dtype=torch.bfloat16, bnb_4bit_quant_storage=torch.float16)
    by_name = QMoEConfig(bnb_4bit_compute_dtype="bfloat16", bnb_4bit_quant_storage="float16")
    assert by_object.bnb_4bit_compute_dtype is by_name.bnb_4bit_compute_dtype is torch.bfloat16
    assert by_object.to_dict() == by_name.to_dict()
    assert by_object.to_dict()["bnb_4bit_compute_dtype"] == "bfloat16"


@pytest.mark.parametrize("fields", CONFIGS.values(), ids=CONFIGS)
def test_never_mentions_load_in_4bit(fields: dict[str, object]) -> None:
    """No written form carries ``load_in_4bit`` or ``load_in_8bit``: transformers would take it for bitsandbytes'."""
    config = QMoEConfig(**fields)
    for text in (
        json.dumps(config.to_dict()),
        json.dumps(config.to_diff_dict()),
        config.to_json_string(),
        repr(config),
    ):
        assert "load_in" not in text


def test_diff_holds_only_what_differs() -> None:
    """`to_diff_dict` names the method and the fields that are not defaults."""
    assert QMoEConfig().to_diff_dict() == {"quant_method": "qmoe"}
    config = QMoEConfig(experts_quant_type="int8", bnb_4bit_compute_dtype=torch.bfloat16)
    assert config.to_diff_dict() == {
        "quant_method": "qmoe",
        "experts_quant_type": "int8",
        "bnb_4bit_compute_dtype": "bfloat16",
    }
    assert QMoEConfig.from_dict(config.to_diff_dict()).to_dict() == config.to_dict()


def test_repr_shows_the_fields() -> None:
    """The representation names the class and every value."""
    text = repr(QMoEConfig(**FULL))
    assert text.startswith("QMoEConfig")
    assert json.loads(text.removeprefix("QMoEConfig")) == QMoEConfig(**FULL).to_dict()


def test_equal_fields_do_not_share_state() -> None:
    """Changing what was passed in, or what `to_dict` returned, does not change the config."""
    overrides, skipped, more = {"layers.0": "int8"}, ["q_proj"], ["v_proj"]
    config = QMoEConfig(experts_overrides=overrides, modules_to_not_convert=skipped, llm_int8_skip_modules=more)
    before = json.dumps(config.to_dict())
    overrides["layers.1"] = "fp4"
    skipped.append("k_proj")
    more.append("o_proj")
    written = config.to_dict()
    written["experts_overrides"]["layers.2"] = "fp4"
    written["modules_to_not_convert"].append("lm_head")
    assert json.dumps(config.to_dict()) == before


@pytest.mark.parametrize(
    "fields",
    [
        {"experts_blocksize": 64.0},
        {"experts_blocksize": "64"},
        {"experts_blocksize": True},
        {"experts_double_quant": 1},
        {"quantize_linears": "no"},
        {"experts_overrides": ["layers.0"]},
        {"experts_overrides": "layers.0"},
        {"modules_to_not_convert": "q_proj"},
        {"modules_to_not_convert": ("q_proj",)},
        {"llm_int8_skip_modules": "q_proj"},
        {"llm_int8_enable_fp32_cpu_offload": 1},
        {"bnb_4bit_use_double_quant": "yes"},
        {"bnb_4bit_quant_type": 4},
    ],
    ids=lambda fields: "-".join(f"{k}={v}" for k, v in fields.items()),
)
def test_wrong_type(fields: dict[str, object]) -> None:
    """A field of the wrong type is refused by name."""
    with pytest.raises(TypeError, match=next(iter(fields))):
        QMoEConfig(**fields)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"experts_quant_type": "int4"}, "int4.*nf4, fp4, int8, fp8, bf16, fp16"),
        ({"experts_quant_type": None}, "None.*nf4"),
        ({"experts_quant_type": ["nf4"]}, "nf4"),
        ({"experts_overrides": {"layers.0": "q4"}}, "q4.*nf4"),
        ({"experts_blocksize": 48}, "48.*32, 64, 128"),
        ({"experts_blocksize": 0}, "0.*32, 64, 128"),
        ({"experts_blocksize": 8192}, "8192.*4096"),
        ({"experts_quant_type": "int8", "experts_blocksize": 32}, "32.*int8.*64"),
        ({"experts_blocksize": 32, "experts_overrides": {"layers.0": "fp8"}}, "32.*fp8.*64"),
        ({"bnb_4bit_quant_type": "int4"}, "int4"),
        ({"bnb_4bit_compute_dtype": "float17"}, "bnb_4bit_compute_dtype.*float17"),
        ({"bnb_4bit_compute_dtype": "nn"}, "bnb_4bit_compute_dtype.*nn"),
        ({"bnb_4bit_compute_dtype": torch.int8}, "bnb_4bit_compute_dtype.*int8"),
        ({"bnb_4bit_compute_dtype": 16}, "bnb_4bit_compute_dtype.*16"),
        ({"bnb_4bit_quant_storage": "int4"}, "bnb_4bit_quant_storage"),
        ({"modules_to_not_convert": [""]}, "non-empty"),
        ({"modules_to_not_convert": [3]}, "3"),
        ({"modules_to_not_convert": ["layers.(0"]}, r"layers\.\(0.*regular expression"),
        ({"llm_int8_skip_modules": ["*_proj"]}, r"\*_proj.*regular expression"),
        ({"experts_overrides": {"": "nf4"}}, "non-empty"),
        ({"experts_overrides": {"[": "nf4"}}, "regular expression"),
        ({"load_in_8bit": True}, "load_in_8bit.*int8"),
        ({"load_in_4bit": False}, "load_in_4bit.*quantize_linears=False"),
        ({"quant_method": "bitsandbytes"}, "quant_method"),
        ({"expert_quant_type": "nf4"}, "expert_quant_type.*experts_quant_type"),
        ({"llm_int8_threshold": 6.0}, "llm_int8_threshold"),
    ],
    ids=lambda value: "-".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else "",
)
def test_bad_value(fields: dict[str, object], says: str) -> None:
    """A value outside what is allowed is refused, with the value and what may stand in its place."""
    with pytest.raises(ValueError, match=f"(?s){says}"):
        QMoEConfig(**fields)


@pytest.mark.parametrize("fields", [{"load_in_4bit": True}, {"load_in_8bit": False}, {"quant_method": "qmoe"}])
def test_redundant_fields_are_accepted(fields: dict[str, object]) -> None:
    """What a script that was written for `BitsAndBytesConfig` also passes, and what it says already, is no error."""
    assert QMoEConfig(**fields).to_dict() == QMoEConfig().to_dict()


def test_unknown_field_in_a_saved_config_asks_to_upgrade() -> None:
    """A field that a newer version wrote is refused with that hint rather than ignored."""
    with pytest.raises(ValueError, match=r"'experts_codebook'.*upgrade hf_qmoe"):
        AutoQuantizationConfig.from_dict(QMoEConfig().to_dict() | {"experts_codebook": "learned"})


def test_transformers_finds_the_quantizer() -> None:
    """transformers' registry leads from the config, or its dict, to this package's quantizer."""
    for config in (QMoEConfig(), QMoEConfig().to_dict()):
        assert type(AutoHfQuantizer.from_config(config, pre_quantized=False)) is QMoEHfQuantizer


@pytest.mark.parametrize("fields", CONFIGS.values(), ids=CONFIGS)
def test_config_of_a_saved_model(fields: dict[str, object], tiny_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """``config.json`` of a saved model holds exactly the fields, and the reloaded model has an equal config."""
    config = QMoEConfig(**(fields | ({"llm_int8_enable_fp32_cpu_offload": False} if fields else {})))
    expected = config.to_dict()
    model = load(tiny_checkpoints["qwen3_moe"], config)
    assert config.to_dict() == expected
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["quantization_config"] == expected
    assert AutoConfig.from_pretrained(tmp_path).quantization_config == expected
    reloaded = load(tmp_path)
    assert type(reloaded.config.quantization_config) is QMoEConfig
    assert reloaded.config.quantization_config.to_dict() == expected


def test_one_config_for_two_models(tiny_checkpoints: dict[str, Path]) -> None:
    """A config object is not changed by a load, so that a second load with it follows its own model's dtype."""
    config = QMoEConfig()
    first = load(tiny_checkpoints["qwen3_moe"], config, dtype=torch.bfloat16)
    second = load(tiny_checkpoints["olmoe"], config, dtype=torch.float32)
    for model, dtype in ((first, torch.bfloat16), (second, torch.float32)):
        layer = model.model.layers[0]
        assert layer.mlp.experts.compute_dtype is dtype
        assert layer.self_attn.q_proj.compute_dtype is dtype
    assert config.bnb_4bit_compute_dtype is None


def test_compute_dtype_is_the_one_asked_for(tiny_checkpoints: dict[str, Path]) -> None:
    """`bnb_4bit_compute_dtype` holds for experts and linears, whatever the dtype of the model."""
    model = load(tiny_checkpoints["qwen3_moe"], QMoEConfig(bnb_4bit_compute_dtype="float32"), dtype=torch.bfloat16)
    layer = model.model.layers[0]
    assert layer.mlp.experts.compute_dtype is layer.self_attn.q_proj.compute_dtype is torch.float32
    assert layer.mlp.gate.weight.dtype is torch.bfloat16


def test_dict_as_quantization_config(tiny_checkpoints: dict[str, Path]) -> None:
    """`from_pretrained` takes the dict form too."""
    model = load(tiny_checkpoints["qwen3_moe"], {"quant_method": "qmoe", "experts_quant_type": "fp4"})
    assert {layer.mlp.experts.quant_type for layer in model.model.layers} == {"fp4"}
