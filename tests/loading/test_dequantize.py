"""`model.dequantize()`: an ordinary float model again, in memory and on disk."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from bitsandbytes.nn import Linear4bit
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_qmoe import QMoEConfig, quantize_experts
from tests.support.checkpoints import (
    assert_same_tensors,
    float_twin,
    load,
    logits,
    packed_modules,
    packed_state,
    tensors_on_disk,
    unpacked_stack,
)
from tests.support.models import FAMILIES, save_tiny, tiny_config, tiny_model, token_ids


LINEARS = pytest.mark.parametrize("linears", [True, False], ids=["linears", "experts_only"])


def _read(checkpoint: Path, config: QMoEConfig, path: Path, **kwargs: object) -> PreTrainedModel:
    return load(checkpoint, config, **kwargs)


def _reread(checkpoint: Path, config: QMoEConfig, path: Path, **kwargs: object) -> PreTrainedModel:
    load(checkpoint, config, **kwargs).save_pretrained(path)
    return load(path)


def _made(checkpoint: Path, config: QMoEConfig, path: Path, **kwargs: object) -> PreTrainedModel:
    return quantize_experts(load(checkpoint, **kwargs), config)


def _saved_before(checkpoint: Path, config: QMoEConfig, path: Path, **kwargs: object) -> PreTrainedModel:
    model = load(checkpoint, config, **kwargs)
    model.save_pretrained(path)
    return model


WAYS: dict[str, Callable[..., PreTrainedModel]] = {
    "from_pretrained": _read,
    "reloaded": _reread,
    "quantize_experts": _made,
    "after_saving": _saved_before,
}
EVERY_WAY = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


@LINEARS
@EVERY_WAY
@pytest.mark.parametrize("family", FAMILIES)
def test_plain_model_again(
    family: str, way: Callable[..., PreTrainedModel], linears: bool, tiny_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """Parameters have the float model's names, shapes, dtype and classes; nothing tells that it was quantized."""
    plain = load(tiny_checkpoints[family])
    model = way(tiny_checkpoints[family], QMoEConfig(quantize_linears=linears), tmp_path)
    assert model.dequantize() is model
    assert {n: (t.shape, t.dtype) for n, t in model.state_dict().items()} == {
        n: (t.shape, t.dtype) for n, t in plain.state_dict().items()
    }
    assert {n: type(m) for n, m in model.named_modules()} == {n: type(m) for n, m in plain.named_modules()}
    assert not hasattr(model.config, "quantization_config")
    assert "quantization" not in json.dumps(model.config.to_dict())
    assert getattr(model, "hf_quantizer", None) is None
    assert not getattr(model, "is_quantized", False)
    assert not getattr(model, "is_loaded_in_4bit", False)
    assert not hasattr(model, "quantization_method")
    assert model.num_parameters() == plain.num_parameters()
    assert model.num_parameters(exclude_embeddings=True) == plain.num_parameters(exclude_embeddings=True)
    assert model.get_memory_footprint() == plain.get_memory_footprint()
    model.half().float()  # a quantized model refuses both


@LINEARS
@EVERY_WAY
@pytest.mark.parametrize("family", FAMILIES)
def test_logits(
    family: str, way: Callable[..., PreTrainedModel], linears: bool, tiny_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """Logits in float32 are those of before."""
    config = QMoEConfig(quantize_linears=linears)
    model = way(tiny_checkpoints[family], config, tmp_path, dtype=torch.float32)
    expected = logits(model)
    actual = logits(model.dequantize())
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("quant_type", ["nf4", "fp4", "int8", "fp8", "bf16", "fp16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_weights(family: str, quant_type: str, tiny_checkpoints: dict[str, Path]) -> None:
    """Each stack holds the documented value of its packed weights, in the model's own layout."""
    model = load(tiny_checkpoints[family], QMoEConfig(experts_quant_type=quant_type), dtype=torch.float32)
    expected = {
        f"{path}.{name}": unpacked_stack(module, name)
        for path, module in packed_modules(model).items()
        for name in module.stack_names
    }
    model.dequantize()
    assert len(expected) == 4
    for name, weights in expected.items():
        parameter = model.get_parameter(name)
        assert parameter.is_contiguous()
        torch.testing.assert_close(parameter.detach(), weights, rtol=1e-6, atol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_equals_the_twin_made_by_hand(family: str, tiny_checkpoints: dict[str, Path]) -> None:
    """Every tensor equals the one of a float model into which the packed values were put by hand."""
    config = QMoEConfig(experts_blocksize=32)
    model = load(tiny_checkpoints[family], config, dtype=torch.float32)
    twin = float_twin(model, tiny_checkpoints[family]).state_dict()
    assert_same_tensors(model.dequantize().state_dict(), twin)


@LINEARS
@EVERY_WAY
@pytest.mark.parametrize("family", FAMILIES)
def test_saved_in_the_original_layout(
    family: str, way: Callable[..., PreTrainedModel], linears: bool, tiny_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """The saved float model has exactly the source checkpoint's keys, shapes and dtypes, and reloads as itself."""
    model = way(tiny_checkpoints[family], QMoEConfig(quantize_linears=linears), tmp_path / "packed")
    expected = logits(model.dequantize())
    model.save_pretrained(tmp_path / "float")
    saved, source = tensors_on_disk(tmp_path / "float"), tensors_on_disk(tiny_checkpoints[family])
    assert {n: (t.shape, t.dtype) for n, t in saved.items()} == {n: (t.shape, t.dtype) for n, t in source.items()}
    unpacked = {name for name in source if not torch.equal(saved[name], source[name])}
    touched = {name for name in source if ".experts." in name and "bias" not in name}
    if linears:
        touched |= {name for name in source if "self_attn" in name and name.endswith("proj.weight")}
    assert unpacked == touched
    reloaded = load(tmp_path / "float")
    assert not packed_modules(reloaded)
    assert torch.equal(logits(reloaded), expected)


def test_from_config_model(tmp_path: Path) -> None:
    """A model that was never on disk saves, after both steps, what the float model saves."""
    for family in FAMILIES:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(tiny_config(family), dtype=torch.bfloat16)
        model.save_pretrained(tmp_path / family / "before")
        quantize_experts(model, QMoEConfig(experts_quant_type="bf16", quantize_linears=False)).dequantize()
        model.save_pretrained(tmp_path / family / "after")
        before, after = (tensors_on_disk(tmp_path / family / name) for name in ("before", "after"))
        assert_same_tensors(after, before)


_STOCK = """
import sys, torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], experts_implementation="eager")
ids = torch.load(sys.argv[2])
torch.save(model(ids).logits.detach(), sys.argv[3])
assert not any(name.startswith(("hf_qmoe", "bitsandbytes")) for name in sys.modules)
"""


def test_reloads_without_this_package(tiny_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """A process that never imports this package reads the dequantized checkpoint and gets the same logits."""
    torch.save(token_ids(), tmp_path / "ids.pt")
    model = load(tiny_checkpoints["mixtral"], QMoEConfig())
    expected = logits(model.dequantize())
    model.save_pretrained(tmp_path / "float")
    arguments = [str(tmp_path / name) for name in ("float", "ids.pt", "logits.pt")]
    result = subprocess.run([sys.executable, "-c", _STOCK, *arguments], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert torch.equal(torch.load(tmp_path / "logits.pt"), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["float32", "float16"])
def test_dtype_argument(dtype: torch.dtype, tiny_checkpoints: dict[str, Path]) -> None:
    """`dtype` is that of the whole model then, which runs in it."""
    model = load(tiny_checkpoints["gpt_oss"], QMoEConfig())
    model.dequantize(dtype=dtype)
    assert {p.dtype for p in model.parameters()} == {dtype}
    assert model.config.dtype is model.dtype is dtype
    assert logits(model).dtype is dtype


def test_parameters_train_again(tiny_checkpoints: dict[str, Path]) -> None:
    """After dequantizing, a backward pass reaches every parameter."""
    model = load(tiny_checkpoints["qwen3_moe"], QMoEConfig(), dtype=torch.float32).dequantize()
    plain = load(tiny_checkpoints["qwen3_moe"], dtype=torch.float32)
    assert {n: p.requires_grad for n, p in model.named_parameters()} == {
        n: p.requires_grad for n, p in plain.named_parameters()
    }
    ids = torch.arange(3, 63)[None]
    model(ids, labels=ids).loss.backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_mode_is_kept(mode: str, tiny_checkpoints: dict[str, Path]) -> None:
    """Training mode stays what it was, in every submodule."""
    model = load(tiny_checkpoints["qwen3_moe"], QMoEConfig()).train(mode == "train").dequantize()
    assert {module.training for module in model.modules()} == {mode == "train"}


def test_quantize_again(tiny_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """A dequantized model can be quantized again, saved and reloaded."""
    model = load(tiny_checkpoints["gpt_oss"], QMoEConfig(experts_quant_type="bf16"))
    model.dequantize()
    quantize_experts(model, QMoEConfig(experts_quant_type="int8"))
    expected = packed_state(load(tiny_checkpoints["gpt_oss"], QMoEConfig(experts_quant_type="int8")))
    experts = {name: tensor for name, tensor in packed_state(model).items() if ".experts." in name}
    assert_same_tensors(experts, {name: tensor for name, tensor in expected.items() if ".experts." in name})
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(load(tmp_path)), logits(model))


def test_skipped_and_overridden_stacks(tiny_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """Stacks that were left out and stacks in several formats all come back, in one layout on disk."""
    config = QMoEConfig(
        experts_overrides={"layers.0": "bf16"}, modules_to_not_convert=["layers.1.mlp.experts"], quantize_linears=False
    )
    for family in FAMILIES:
        model = load(tiny_checkpoints[family], config).dequantize()
        model.save_pretrained(tmp_path / family)
        assert_same_tensors(tensors_on_disk(tmp_path / family), tensors_on_disk(tiny_checkpoints[family]))


def test_dense_model(dense_checkpoint: Path, tmp_path: Path) -> None:
    """A model without experts dequantizes as well."""
    model = load(dense_checkpoint, QMoEConfig(), dtype=torch.float32)
    expected = logits(model)
    model.dequantize()
    assert not any(isinstance(module, Linear4bit) for module in model.modules())
    torch.testing.assert_close(logits(model), expected, rtol=1e-5, atol=1e-5)
    model.save_pretrained(tmp_path)
    assert tensors_on_disk(tmp_path).keys() == tensors_on_disk(dense_checkpoint).keys()


def test_tied_embeddings(tmp_path: Path) -> None:
    """Embeddings that are tied stay tied, on disk too."""
    save_tiny(tmp_path / "float", "olmoe", tie_word_embeddings=True)
    model = load(tmp_path / "float", QMoEConfig()).dequantize()
    assert model.lm_head.weight is model.model.embed_tokens.weight
    model.save_pretrained(tmp_path / "again")
    assert tensors_on_disk(tmp_path / "again").keys() == tensors_on_disk(tmp_path / "float").keys()


def test_fused_checkpoint(fused_checkpoint: Path, tiny_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """A checkpoint that was fused on disk is saved in the family's original layout, with the same weights."""
    model = load(fused_checkpoint, QMoEConfig()).dequantize()
    model.save_pretrained(tmp_path)
    saved, original = tensors_on_disk(tmp_path), tensors_on_disk(tiny_checkpoints["qwen3_moe"])
    assert {n: t.shape for n, t in saved.items()} == {n: t.shape for n, t in original.items()}
    assert torch.equal(logits(load(tmp_path)), logits(model))


def test_model_in_memory_before(tiny_checkpoints: dict[str, Path]) -> None:
    """A model quantized in memory and never saved gives up its packed bytes: nothing of them stays on it."""
    model = quantize_experts(tiny_model("qwen3_moe")).dequantize()
    assert not packed_modules(model)
    leftovers = [
        n for n, m in model.named_modules() if "quant_type" in vars(m) or "quant_metadata" in dict(m._buffers)
    ]
    assert leftovers == []


def test_offloaded_model_is_refused(tiny_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """Dequantizing a model with a layer on disk raises one clear error and leaves a model that works."""
    config = QMoEConfig(quantize_linears=False)
    device_map = {"model.layers.0": "disk", "lm_head": "cpu"}
    device_map |= {f"model.{name}": "cpu" for name in ("embed_tokens", "layers.1", "norm", "rotary_emb")}
    expected = logits(load(tiny_checkpoints["qwen3_moe"], config, dtype=torch.float32))
    model = load(
        tiny_checkpoints["qwen3_moe"], config, dtype=torch.float32, device_map=device_map, offload_folder=tmp_path
    )
    with pytest.raises((ValueError, NotImplementedError), match="offload"):
        model.dequantize()
    torch.testing.assert_close(logits(model), expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))
