"""What a loaded model says about itself: bytes, parameters, flags."""

import gc
import weakref
from pathlib import Path

import pytest
import torch
from bitsandbytes.nn import Linear4bit
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from hf_qmoe import QMoEConfig, quantize_experts
from hf_qmoe.quantizer import QMoEHfQuantizer
from tests.support.checkpoints import load, packed_modules
from tests.support.models import FAMILIES, save_tiny


VARIANTS: dict[str, dict[str, object]] = {
    "nf4": {},
    "double_quant": {"experts_double_quant": True, "bnb_4bit_use_double_quant": True},
    "int8": {"experts_quant_type": "int8"},
    "bf16_experts_only": {"experts_quant_type": "bf16", "quantize_linears": False},
    "bf16_storage": {"bnb_4bit_quant_storage": "bfloat16"},
    "skipped": {"modules_to_not_convert": ["layers.0.mlp.experts", "v_proj"]},
}


def _tensors_in(value: object) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [t for v in vars(value).values() for t in _tensors_in(v)] if type(value).__name__ == "QuantState" else []


def bytes_held(model: nn.Module, buffers: bool = True) -> int:
    """Bytes of every distinct storage that the modules hold, found by looking at all there is."""
    held: list[Tensor] = []
    for module in model.modules():
        held += module._parameters.values()
        held += module._buffers.values() if buffers else []
        if isinstance(module, Linear4bit):
            held += _tensors_in(module.weight.quant_state)
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held if t is not None}
    return sum(storages.values())


def quantized(how: str, checkpoint: Path, config: QMoEConfig, path: Path) -> PreTrainedModel:
    """`checkpoint` packed while it is read, reloaded from a packed checkpoint, or packed in memory."""
    if how == "quantize_experts":
        return quantize_experts(load(checkpoint), config)
    model = load(checkpoint, config)
    if how == "reloaded":
        model.save_pretrained(path)
        return load(path)
    return model


@pytest.mark.parametrize("how", ["from_pretrained", "reloaded", "quantize_experts"])
@pytest.mark.parametrize("fields", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_memory_footprint(
    family: str, fields: dict[str, object], how: str, tiny_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """`get_memory_footprint` is the bytes of all tensors, the scales that bitsandbytes hides included."""
    model = quantized(how, tiny_checkpoints[family], QMoEConfig(**fields), tmp_path)
    assert model.get_memory_footprint() == bytes_held(model)
    assert model.get_memory_footprint(return_buffers=False) == bytes_held(model, buffers=False)
    assert model.get_memory_footprint() > model.get_memory_footprint(return_buffers=False)


@pytest.mark.parametrize("how", ["from_pretrained", "reloaded", "quantize_experts"])
@pytest.mark.parametrize("fields", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_num_parameters(
    family: str, fields: dict[str, object], how: str, tiny_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """`num_parameters` is that of the float model; what is packed is not trainable."""
    plain = load(tiny_checkpoints[family])
    model = quantized(how, tiny_checkpoints[family], QMoEConfig(**fields), tmp_path)
    for arguments in ({}, {"exclude_embeddings": True}):
        assert model.num_parameters(**arguments) == plain.num_parameters(**arguments)
        assert model.model.num_parameters(**arguments) == plain.model.num_parameters(**arguments)
    packed = set()
    for path, module in model.named_modules():
        if isinstance(module, Linear4bit):
            packed.add(f"{path}.weight")
    for path, module in packed_modules(model).items():
        packed |= {f"{path}.{name}" for name in module.stack_names}
    trainable = {name: p.numel() for name, p in plain.named_parameters() if name not in packed}
    assert model.num_parameters(only_trainable=True) <= sum(trainable.values())
    if how != "quantize_experts":
        assert model.num_parameters(only_trainable=True) == sum(trainable.values())
        trainable.pop("model.embed_tokens.weight")
        assert model.num_parameters(only_trainable=True, exclude_embeddings=True) == sum(trainable.values())


def test_num_parameters_follows_requires_grad(tiny_checkpoints: dict[str, Path]) -> None:
    """Freezing and thawing parameters shows in the count of trainable ones."""
    model = load(tiny_checkpoints["gpt_oss"], QMoEConfig())
    model.requires_grad_(False)
    assert model.num_parameters(only_trainable=True) == 0
    model.lm_head.requires_grad_(True)
    assert model.num_parameters(only_trainable=True) == 128 * 64


@pytest.mark.parametrize("family", ["qwen3_moe", "olmoe", "mixtral"])
def test_tied_embeddings(family: str, tmp_path: Path) -> None:
    """A tied matrix counts once, in parameters and in bytes."""
    save_tiny(tmp_path / "float", family, tie_word_embeddings=True)
    plain, model = load(tmp_path / "float"), load(tmp_path / "float", QMoEConfig())
    for arguments in ({}, {"exclude_embeddings": True}):
        assert model.num_parameters(**arguments) == plain.num_parameters(**arguments)
    assert model.get_memory_footprint() == bytes_held(model)
    untied = load(save_tiny(tmp_path / "untied", family), QMoEConfig())
    assert untied.num_parameters() == model.num_parameters() + 128 * 64
    assert untied.get_memory_footprint() == model.get_memory_footprint() + 128 * 64 * 2


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_bytes_are_counted(family: str, tiny_checkpoints: dict[str, Path]) -> None:
    """The footprint of the packed model is that of the float one less what packing saves."""
    plain = load(tiny_checkpoints[family])
    model = load(tiny_checkpoints[family], QMoEConfig(quantize_linears=False))
    saved = 0
    for path, module in packed_modules(model).items():
        experts = plain.get_submodule(path)
        saved += sum(getattr(experts, name).nbytes for name in module.stack_names)
        saved -= sum(stack.nbytes for stack in module.stacks().values()) + module.quant_metadata.nbytes
    assert saved > 0
    assert model.get_memory_footprint() == plain.get_memory_footprint() - saved


def test_adapter_adds_its_own_parameters(tiny_checkpoints: dict[str, Path]) -> None:
    """With an adapter in place, exactly its parameters are added and trainable."""
    model = load(tiny_checkpoints["qwen3_moe"], QMoEConfig())
    before, footprint = model.num_parameters(), model.get_memory_footprint()
    peft_model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    added = [p for name, p in peft_model.named_parameters() if "lora_" in name]
    assert model.num_parameters() == before + sum(p.numel() for p in added)
    assert model.num_parameters(only_trainable=True) == sum(p.numel() for p in added)
    assert model.get_memory_footprint() == footprint + sum(p.nbytes for p in added)
    assert peft_model.get_nb_trainable_parameters()[0] == sum(p.numel() for p in added)


@pytest.mark.parametrize("how", ["from_pretrained", "reloaded", "quantize_experts"])
@pytest.mark.parametrize("family", FAMILIES)
def test_flags(family: str, how: str, tiny_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """The flags that transformers, PEFT, accelerate and TRL look at say "4-bit, trainable with adapters"."""
    model = quantized(how, tiny_checkpoints[family], QMoEConfig(), tmp_path)
    assert model.is_quantized
    assert model.is_loaded_in_4bit
    assert model.quantization_method == "qmoe"
    assert type(model.hf_quantizer) is QMoEHfQuantizer
    assert model.hf_quantizer.is_trainable
    assert model.hf_quantizer.is_serializable()
    assert not model.hf_quantizer.is_qat_trainable
    assert model.hf_quantizer.pre_quantized is (how == "reloaded")
    assert type(model.config.quantization_config) is QMoEConfig
    assert model.config._is_quantized
    assert not model.training or how == "quantize_experts"


def test_casts_are_refused(tiny_checkpoints: dict[str, Path]) -> None:
    """As for any quantized model, `half` and `float` raise."""
    model = load(tiny_checkpoints["qwen3_moe"], QMoEConfig())
    for cast in (model.half, model.float):
        with pytest.raises(ValueError, match="not supported for quantized"):
            cast()


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_another_head(family: str, tiny_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """A classification model loads from the same checkpoint, leaves its head alone, and counts, saves and reloads."""
    arguments = {"num_labels": 3, "experts_implementation": "eager"}
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(
        tiny_checkpoints[family], quantization_config=QMoEConfig(), **arguments
    )
    assert type(model.score) is nn.Linear
    assert len(packed_modules(model)) == 2
    plain = AutoModelForSequenceClassification.from_pretrained(tiny_checkpoints[family], **arguments)
    assert model.num_parameters() == plain.num_parameters()
    model.save_pretrained(tmp_path)
    reloaded = AutoModelForSequenceClassification.from_pretrained(tmp_path, **arguments)
    ids = torch.arange(3, 15)[None]
    with torch.no_grad():
        assert torch.equal(reloaded(ids).logits, model(ids).logits)


def test_counting_neither_keeps_a_model_alive_nor_needs_it_kept(tiny_checkpoints: dict[str, Path]) -> None:
    """In one expression with the load; and a deleted model is freed at once, without a garbage collection."""
    path = tiny_checkpoints["qwen3_moe"]
    expected = load(path).num_parameters()
    assert load(path, QMoEConfig()).num_parameters() == expected
    assert load(path, QMoEConfig()).get_memory_footprint() < load(path).get_memory_footprint()
    gc.collect()
    gc.disable()
    try:
        model = load(path, QMoEConfig())
        parameter = weakref.ref(model.model.layers[0].mlp.experts.gate_up_proj)
        assert model.num_parameters() == expected
        del model
        assert parameter() is None
    finally:
        gc.enable()


def test_reload_wraps_once() -> None:
    from transformers import PreTrainedModel

    from hf_qmoe.memory import install_counters

    original = PreTrainedModel.num_parameters._qmoe_original
    install_counters()
    assert PreTrainedModel.num_parameters._qmoe_original is original
    assert not hasattr(original, "_qmoe_original")
