"""`enable`: what plain `BitsAndBytesConfig` users get, and how it is undone."""

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from bitsandbytes.nn import Linear4bit
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, pipeline
from transformers.quantizers import auto
from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer

import hf_qmoe
from hf_qmoe import ExpertsNbit, QMoEConfig, disable, enable
from tests.sources.checkpoints import bitsandbytes_checkpoint, fp8_checkpoint, mxfp4_checkpoint
from tests.support.checkpoints import assert_same_tensors, load, logits, packed_modules, packed_state
from tests.support.models import FAMILIES, experts_of


@pytest.fixture
def enabled() -> Iterator[None]:
    """`enable()` for one test."""
    enable()
    yield
    disable()


def bnb_config(**changes: Any) -> BitsAndBytesConfig:
    """As scripts write it."""
    fields = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.bfloat16} | changes
    return BitsAndBytesConfig(load_in_4bit=True, **fields)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("double_quant", [False, True])
@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
@pytest.mark.usefixtures("enabled")
def test_equals_our_config(
    tiny_checkpoints: dict[str, Path], tmp_path: Path, family: str, double_quant: bool, quant_type: str
) -> None:
    path = tiny_checkpoints[family]
    config = bnb_config(bnb_4bit_use_double_quant=double_quant, bnb_4bit_quant_type=quant_type)
    model = load(path, config)
    both = {"quant_type": quant_type, "double_quant": double_quant}
    expected = load(
        path,
        QMoEConfig(
            **{f"experts_{name}": value for name, value in both.items()},
            bnb_4bit_quant_type=quant_type,
            bnb_4bit_use_double_quant=double_quant,
            bnb_4bit_compute_dtype=torch.bfloat16,
        ),
    )
    assert_same_tensors(packed_state(model), packed_state(expected))
    assert torch.equal(logits(model), logits(expected))
    assert model.is_loaded_in_4bit
    model.save_pretrained(tmp_path)
    disable()
    again = load(tmp_path)
    assert again.config.quantization_config.quant_method == "qmoe"
    assert_same_tensors(packed_state(again), packed_state(model))


@pytest.mark.usefixtures("enabled")
def test_default_config(tiny_checkpoints: dict[str, Path]) -> None:
    """bitsandbytes' defaults: fp4, and computing in the dtype of the input."""
    model = load(tiny_checkpoints["qwen3_moe"], BitsAndBytesConfig(load_in_4bit=True))
    assert {module.quant_type for module in packed_modules(model).values()} == {"fp4"}
    assert {module.compute_dtype for module in packed_modules(model).values()} == {torch.bfloat16}


def test_is_reversible(tiny_checkpoints: dict[str, Path]) -> None:
    before = dict(auto.AUTO_QUANTIZER_MAPPING)
    enable()
    enable(experts_quant_type="int8")
    model = load(tiny_checkpoints["qwen3_moe"], bnb_config())
    assert {module.quant_type for module in packed_modules(model).values()} == {"int8"}
    disable()
    disable()
    assert before == auto.AUTO_QUANTIZER_MAPPING
    stock = load(tiny_checkpoints["qwen3_moe"], bnb_config())
    assert not packed_modules(stock)
    assert all(module.gate_up_proj.is_floating_point() for module in experts_of(stock).values())
    assert logits(model).isfinite().all()


@pytest.mark.usefixtures("enabled")
def test_models_without_experts_are_left_to_bitsandbytes(dense_checkpoint: Path) -> None:
    model = load(dense_checkpoint, bnb_config())
    assert isinstance(model.hf_quantizer, Bnb4BitHfQuantizer)
    assert type(model.config.quantization_config) is BitsAndBytesConfig
    disable()
    stock = load(dense_checkpoint, bnb_config())
    assert type(model.lm_head) is type(stock.lm_head)
    assert torch.equal(logits(model), logits(stock))


@pytest.mark.usefixtures("enabled")
def test_skip_list(tiny_checkpoints: dict[str, Path]) -> None:
    config = bnb_config(llm_int8_skip_modules=["lm_head", "layers.0.mlp.experts", "q_proj"])
    model = load(tiny_checkpoints["qwen3_moe"], config)
    assert [isinstance(m, ExpertsNbit) for m in experts_of(model).values()] == [False, True]
    assert not any(isinstance(m, Linear4bit) for n, m in model.named_modules() if n.endswith("q_proj"))


@pytest.mark.usefixtures("enabled")
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("passed", ["nothing", "a config"])
def test_checkpoints_of_bitsandbytes(
    tiny_checkpoints: dict[str, Path], tmp_path: Path, nested: bool, passed: str
) -> None:
    """What stock transformers fails to load, or initialises at random."""
    path = bitsandbytes_checkpoint(
        tiny_checkpoints["qwen3_moe"], tmp_path / "v4", "fp4", nested, chosen=lambda name: "_proj" in name
    )
    kwargs = {"quantization_config": bnb_config()} if passed == "a config" else {}
    model = AutoModelForCausalLM.from_pretrained(path, **kwargs)
    expected = load(path, QMoEConfig(experts_quant_type="fp4"))
    assert len(packed_modules(model)) == 2
    assert_same_tensors(packed_state(model), packed_state(expected))


@pytest.mark.usefixtures("enabled")
def test_checkpoints_of_others(tiny_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    fp8, _ = fp8_checkpoint(tiny_checkpoints["qwen3_moe"], tmp_path / "fp8")
    mxfp4, _ = mxfp4_checkpoint(tiny_checkpoints["gpt_oss"], tmp_path / "mxfp4")
    for path in (fp8, mxfp4):
        expected = packed_state(load(path, QMoEConfig(bnb_4bit_compute_dtype=torch.bfloat16)))
        assert_same_tensors(packed_state(load(path, bnb_config())), expected)
        assert_same_tensors(packed_state(load(path, bnb_config().to_dict())), expected)


class OwnConfig(BitsAndBytesConfig):
    """A subclass of somebody's."""


@pytest.mark.usefixtures("enabled")
@pytest.mark.parametrize("kind", ["config", "subclass", "dict"])
def test_our_checkpoint_under_a_script_that_passes_its_config(packed_checkpoint: Path, kind: str) -> None:
    config: Any = {"config": bnb_config, "subclass": lambda: OwnConfig(load_in_4bit=True)}.get(kind, lambda: None)()
    config = config or {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    model = load(packed_checkpoint, config)
    assert_same_tensors(packed_state(model), packed_state(load(packed_checkpoint)))


@pytest.mark.usefixtures("enabled")
def test_pipeline(tiny_checkpoints: dict[str, Path], word_tokenizer: Any) -> None:
    generate = pipeline(
        "text-generation",
        model=str(tiny_checkpoints["mixtral"]),
        tokenizer=word_tokenizer,
        model_kwargs={"quantization_config": bnb_config()},
    )
    assert len(packed_modules(generate.model)) == 2
    (answer,) = generate("a b c", max_new_tokens=3, do_sample=False)
    assert answer["generated_text"].startswith("a b c")


@pytest.mark.usefixtures("enabled")
def test_trl_load_in_4bit(tiny_checkpoints: dict[str, Path]) -> None:
    """The config that ``--load_in_4bit`` of TRL's scripts builds."""
    from trl import ModelConfig, get_quantization_config

    arguments = ModelConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", use_bnb_nested_quant=True, dtype="bfloat16")
    model = load(tiny_checkpoints["olmoe"], get_quantization_config(arguments), dtype=torch.bfloat16)
    assert {m.stack("down_proj").double_quant for m in packed_modules(model).values()} == {True}


def test_bad_fields_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown quant_type 'nf5'"):
        enable(experts_quant_type="nf5")
    with pytest.raises(ValueError, match="no field 'expert_quant_type'"):
        enable(expert_quant_type="nf4")
    assert auto.AUTO_QUANTIZER_MAPPING["bitsandbytes_4bit"].__name__ == "HintingBnb4BitHfQuantizer"


def test_a_quantizer_of_others_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    class Another(Bnb4BitHfQuantizer):
        pass

    monkeypatch.setitem(auto.AUTO_QUANTIZER_MAPPING, "bitsandbytes_4bit", Another)
    with pytest.raises(RuntimeError, match=r"was replaced by .*Another"):
        enable()
    assert auto.AUTO_QUANTIZER_MAPPING["bitsandbytes_4bit"] is Another


def test_8_bit_is_left_alone(tiny_checkpoints: dict[str, Path]) -> None:
    before = auto.AUTO_QUANTIZER_MAPPING["bitsandbytes_8bit"]
    enable()
    try:
        assert auto.AUTO_QUANTIZER_MAPPING["bitsandbytes_8bit"] is before
    finally:
        disable()


def test_public_names() -> None:
    assert inspect.isfunction(hf_qmoe.enable)
    assert inspect.isfunction(hf_qmoe.disable)
