"""Saving and reloading: every packed byte and scale survives, by whatever way the model came into being."""

import copy
import io
import json
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from bitsandbytes.nn import Linear4bit
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
)

from hf_qmoe import QMoEConfig, quantize_experts
from tests.support.checkpoints import (
    assert_same_tensors,
    digest,
    load,
    logits,
    packed_modules,
    packed_state,
    tensors_on_disk,
)
from tests.support.models import FAMILIES, save_tiny, tiny_config, tiny_model, token_ids


VARIANTS: dict[str, dict[str, object]] = {
    "nf4": {},
    "fp4": {"experts_quant_type": "fp4", "bnb_4bit_quant_type": "fp4"},
    "int8": {"experts_quant_type": "int8"},
    "fp8": {"experts_quant_type": "fp8", "experts_blocksize": 128},
    "bf16": {"experts_quant_type": "bf16"},
    "fp16": {"experts_quant_type": "fp16"},
    "double_quant": {"experts_double_quant": True, "bnb_4bit_use_double_quant": True},
    "overrides": {"experts_overrides": {"layers.0.mlp.experts": "int8"}},
    "skipped_stack": {"modules_to_not_convert": ["layers.1.mlp.experts", "o_proj"]},
    "experts_only": {"quantize_linears": False},
    "bf16_storage": {"bnb_4bit_quant_storage": "bfloat16"},
}


def assert_round_trip(model: PreTrainedModel, path: Path, **save: object) -> PreTrainedModel:
    """Two generations of saving and reloading keep every tensor and logit; returns the last model."""
    state, expected = {n: t.clone() for n, t in model.state_dict().items()}, logits(model)
    generations = [model]
    for generation in ("first", "second"):
        generations[-1].save_pretrained(path / generation, **save)
        reloaded = load(path / generation)
        assert_same_tensors(reloaded.state_dict(), state)
        assert torch.equal(logits(reloaded), expected)
        generations.append(reloaded)
    assert digest(path / "first") == digest(path / "second")
    return generations[-1]


@pytest.mark.parametrize("fields", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_two_generations(
    family: str,
    fields: dict[str, object],
    tiny_checkpoints: dict[str, Path],
    tmp_path: Path,
    warnings_logged: list[str],
) -> None:
    """Load, save, reload without a config, save again: the same tensors, logits and files, and no loading report."""
    model = load(tiny_checkpoints[family], QMoEConfig(**fields))
    reloaded = assert_round_trip(model, tmp_path)
    assert packed_modules(reloaded).keys() == packed_modules(model).keys()
    assert {n: p.requires_grad for n, p in reloaded.named_parameters()} == {
        n: p.requires_grad for n, p in model.named_parameters()
    }
    assert warnings_logged == []


@pytest.mark.parametrize("fields", [VARIANTS["nf4"], VARIANTS["double_quant"]], ids=["nf4", "double_quant"])
@pytest.mark.parametrize("family", FAMILIES)
def test_many_shards(
    family: str, fields: dict[str, object], tiny_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """Bytes and scales that lie in different shards find each other again."""
    model = load(tiny_checkpoints[family], QMoEConfig(**fields))
    assert_round_trip(model, tmp_path, max_shard_size="5KB")
    index = json.loads((tmp_path / "second" / "model.safetensors.index.json").read_text())
    homes = index["weight_map"]
    assert len(set(homes.values())) >= 10
    stack = next(name for name in homes if name.endswith("0.mlp.experts.gate_up_proj") or "0.block_sparse" in name)
    stack = stack.removesuffix("_absmax")
    assert homes[stack] != homes[stack + "_absmax"]
    assert index["metadata"]["total_parameters"] == model.num_parameters()


@pytest.mark.parametrize("family", FAMILIES)
def test_bytes_on_disk(family: str, tiny_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """The file holds each packed tensor once, whole, under the module's own name."""
    model = load(tiny_checkpoints[family], QMoEConfig())
    model.save_pretrained(tmp_path)
    block = "block_sparse_moe" if family == "mixtral" else "mlp"
    on_disk = {n.replace(block, "mlp"): t for n, t in tensors_on_disk(tmp_path).items()}
    assert_same_tensors(on_disk, model.state_dict())


@pytest.mark.parametrize("family", FAMILIES)
def test_saving_in_the_models_own_format(family: str, tiny_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """`save_original_format=False` reloads to the same model too."""
    model = load(tiny_checkpoints[family], QMoEConfig(modules_to_not_convert=["layers.1.mlp.experts"]))
    assert_round_trip(model, tmp_path, save_original_format=False)


def test_saving_over_an_older_checkpoint(tiny_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """Saving in one file over an older one in shards leaves nothing of it."""
    model = load(tiny_checkpoints["qwen3_moe"], QMoEConfig(experts_quant_type="int8"))
    model.save_pretrained(tmp_path, max_shard_size="5KB")
    newer = load(tiny_checkpoints["qwen3_moe"], QMoEConfig())
    newer.save_pretrained(tmp_path)
    assert_same_tensors(load(tmp_path).state_dict(), newer.state_dict())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["float32", "float16"])
@pytest.mark.parametrize("variant", ["nf4", "skipped_stack"])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_reloading_in_another_dtype(
    family: str, variant: str, dtype: torch.dtype, tiny_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """The dtype of a reload holds for everything that was not packed; packed bytes and their scales stay."""
    load(tiny_checkpoints[family], QMoEConfig(**VARIANTS[variant])).save_pretrained(tmp_path)
    as_saved, reloaded = load(tmp_path), load(tmp_path, dtype=dtype)
    plain = {name: p.dtype for name, p in load(tiny_checkpoints[family], dtype=dtype).named_parameters()}
    assert reloaded.dtype is dtype
    for name, parameter in reloaded.named_parameters():  # gpt-oss keeps its norms in float32 under float16
        assert not parameter.is_floating_point() or parameter.dtype is plain[name]
    assert {m.compute_dtype for m in packed_modules(reloaded).values()} == {dtype}
    for name, tensor in as_saved.state_dict().items():
        now = reloaded.state_dict()[name]
        if ".quant_state." in name:  # its text names the dtype, which is now that of the reload
            saved, read = (bytes(t.tolist()).decode() for t in (tensor, now))
            assert read == saved.replace("bfloat16", str(dtype).removeprefix("torch."))
        elif not tensor.is_floating_point() or name.endswith((".absmax", ".quant_map")):
            assert now.dtype is tensor.dtype
            assert torch.equal(now, tensor)
        else:
            assert torch.equal(now, tensor.to(plain[name]))
    assert logits(reloaded).dtype is dtype


@pytest.mark.parametrize("family", FAMILIES)
def test_saving_a_part_of_a_model(family: str, tiny_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """The body of a packed model, saved on its own, reloads with every byte."""
    body = load(tiny_checkpoints[family], QMoEConfig()).model
    body.save_pretrained(tmp_path)
    assert_same_tensors(AutoModel.from_pretrained(tmp_path).state_dict(), body.state_dict())


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_another_head_over_a_packed_checkpoint(family: str, packed_checkpoints: dict[str, Path]) -> None:
    """A packed checkpoint loads under a new head, which stays a plain linear in the model's dtype."""
    model = AutoModelForSequenceClassification.from_pretrained(packed_checkpoints[family], num_labels=3)
    assert type(model.score) is nn.Linear
    assert model.score.weight.dtype is torch.bfloat16
    assert_same_tensors(model.model.state_dict(), load(packed_checkpoints[family]).model.state_dict())


# -- models that were never loaded ----------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_from_config(family: str, tmp_path: Path) -> None:
    """A model built by `from_config` and quantized in memory saves and reloads like one that was loaded."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(family), dtype=torch.bfloat16).eval()
    quantize_experts(model)
    reloaded = assert_round_trip(model, tmp_path)
    assert type(reloaded.config.quantization_config) is QMoEConfig


@pytest.mark.parametrize("family", FAMILIES)
def test_from_config_saves_what_a_loaded_model_saves(family: str, tmp_path: Path) -> None:
    """The saved files do not tell whether a model was quantized in memory or while it was read."""
    model = tiny_model(family, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "float")
    quantize_experts(model).save_pretrained(tmp_path / "made")
    load(tmp_path / "float", QMoEConfig()).save_pretrained(tmp_path / "read")
    made, read = tensors_on_disk(tmp_path / "made"), tensors_on_disk(tmp_path / "read")
    assert_same_tensors(made, read)
    configs = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("made", "read")]
    assert configs[0]["quantization_config"] == configs[1]["quantization_config"]
    assert configs[0]["dtype"] == configs[1]["dtype"]


# -- adapters and the Trainer ---------------------------------------------------------------------------------------


def _rows(count: int = 8) -> list[dict[str, torch.Tensor]]:
    return [{"input_ids": row, "labels": row} for row in token_ids(count, 9, seed=1)]


def _trained(model: PreTrainedModel, path: Path, **arguments: object) -> Trainer:
    torch.manual_seed(0)
    peft_model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    trainer = Trainer(
        model=peft_model,
        args=TrainingArguments(
            output_dir=str(path),
            per_device_train_batch_size=4,
            learning_rate=1e-2,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            **arguments,
        ),
        train_dataset=_rows(),
        eval_dataset=_rows(4),
    )
    trainer.train()
    return trainer


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_trainer_save_model(
    family: str, tiny_checkpoints: dict[str, Path], packed_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """`Trainer.save_model` writes an adapter that gives the trained logits over the saved base, bit for bit."""
    trainer = _trained(load(tiny_checkpoints[family], QMoEConfig()), tmp_path / "run", max_steps=2, save_strategy="no")
    trainer.save_model(str(tmp_path / "adapter"))
    names = {file.name for file in (tmp_path / "adapter").iterdir()}
    assert "adapter_model.safetensors" in names
    assert "model.safetensors" not in names
    expected = logits(trainer.model.eval())
    reloaded = PeftModel.from_pretrained(load(packed_checkpoints[family]), str(tmp_path / "adapter"))
    assert torch.equal(logits(reloaded), expected)
    assert not torch.equal(expected, logits(load(packed_checkpoints[family])))


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_load_best_model_at_end(
    family: str, tiny_checkpoints: dict[str, Path], packed_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """Training with the best adapter put back at the end leaves the base as it was; unloaded, it saves as before."""
    model = load(tiny_checkpoints[family], QMoEConfig())
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    trainer = _trained(
        model,
        tmp_path / "run",
        num_train_epochs=2,
        eval_strategy="epoch",
        save_strategy="epoch",
        load_best_model_at_end=True,
    )
    assert trainer.state.best_model_checkpoint is not None
    base = trainer.model.unload()
    assert_same_tensors(base.state_dict(), before)
    base.save_pretrained(tmp_path / "base")
    saved = digest(packed_checkpoints[family])
    assert digest(tmp_path / "base")["model.safetensors"] == saved["model.safetensors"]
    assert torch.equal(logits(load(tmp_path / "base")), logits(load(packed_checkpoints[family])))


# -- offloaded models -----------------------------------------------------------------------------------------------


DEVICE_MAP = {
    "model.embed_tokens": "cpu",
    "model.layers.0": "disk",
    "model.layers.1": "cpu",
    "model.norm": "cpu",
    "model.rotary_emb": "cpu",
    "lm_head": "cpu",
}


@pytest.mark.filterwarnings("ignore:Attempting to save a model with offloaded modules")
@pytest.mark.parametrize("variant", ["nf4", "double_quant", "bf16"])
@pytest.mark.parametrize("source", ["packed_as_it_is_read", "packed_before"])
@pytest.mark.parametrize("family", FAMILIES)
def test_disk_offload(
    family: str, source: str, variant: str, tiny_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """A model with a layer on disk computes, counts and saves what the same model in memory does."""
    config = QMoEConfig(**(VARIANTS[variant] | {"quantize_linears": False}))
    in_memory = load(tiny_checkpoints[family], config)
    in_memory.save_pretrained(tmp_path / "packed")
    expected, state = logits(in_memory), tensors_on_disk(tmp_path / "packed")
    checkpoint, given = (
        (tiny_checkpoints[family], config) if source == "packed_as_it_is_read" else (tmp_path / "packed", None)
    )
    source_files = digest(checkpoint)
    offloaded = load(checkpoint, given, device_map=dict(DEVICE_MAP), offload_folder=tmp_path / "offload")
    assert offloaded.model.layers[0].mlp.experts.gate_up_proj.device.type == "meta"
    for _ in range(2):
        assert torch.equal(logits(offloaded), expected)
    assert offloaded.model.layers[0].mlp.experts.gate_up_proj.device.type == "meta"
    assert offloaded.get_memory_footprint() == in_memory.get_memory_footprint()
    assert offloaded.num_parameters() == in_memory.num_parameters()
    for name, save in (("one_file", {}), ("shards", {"max_shard_size": "20KB"})):
        offloaded.save_pretrained(tmp_path / name, **save)
        assert_same_tensors(tensors_on_disk(tmp_path / name), state)
        assert torch.equal(logits(load(tmp_path / name)), expected)
    assert digest(checkpoint) == source_files


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_disk_offload_in_another_dtype(family: str, tiny_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """Tensors that stay on disk are read in the dtype that was asked for."""
    config = QMoEConfig(quantize_linears=False)
    expected = logits(load(tiny_checkpoints[family], config, dtype=torch.float32))
    offloaded = load(
        tiny_checkpoints[family], config, dtype=torch.float32, device_map=dict(DEVICE_MAP), offload_folder=tmp_path
    )
    torch.testing.assert_close(logits(offloaded), expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("place", ["disk", "cpu"])
def test_offloaded_linears_are_refused(place: str, tiny_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """bitsandbytes' linears cannot be offloaded: the error names both settings that help."""
    device_map = DEVICE_MAP | {"model.layers.0": place, "model.layers.1": "disk"}
    with pytest.raises(ValueError, match=r"(?s)device_map.*quantize_linears=False.*llm_int8_enable_fp32_cpu_offload"):
        load(tiny_checkpoints["qwen3_moe"], QMoEConfig(), device_map=device_map, offload_folder=tmp_path)


def test_offload_with_float_linears_there(tiny_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """With `llm_int8_enable_fp32_cpu_offload` linears on the disk stay float, and the model computes."""
    config = QMoEConfig(llm_int8_enable_fp32_cpu_offload=True)
    device_map = dict.fromkeys(DEVICE_MAP, "disk") | {"lm_head": "cpu"}
    model = load(tiny_checkpoints["qwen3_moe"], config, device_map=device_map, offload_folder=tmp_path)
    assert not any(isinstance(module, Linear4bit) for module in model.modules())
    in_memory = load(tiny_checkpoints["qwen3_moe"], QMoEConfig(quantize_linears=False))
    assert torch.equal(logits(model), logits(in_memory))


# -- whole models as Python objects ---------------------------------------------------------------------------------


def _through_torch_save(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch_save": _through_torch_save,
}


@pytest.mark.parametrize("copy_of", COPIES.values(), ids=COPIES)
@pytest.mark.parametrize("variant", ["nf4", "double_quant", "experts_only"])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_copies(
    family: str, variant: str, copy_of: Callable[[nn.Module], nn.Module], tiny_checkpoints: dict[str, Path]
) -> None:
    """A copy of a whole model has its tensors, logits and counts, and none of its memory."""
    model = load(tiny_checkpoints[family], QMoEConfig(**VARIANTS[variant]))
    expected, state = logits(model), packed_state(model)
    twin = copy_of(model)
    assert_same_tensors(packed_state(twin), state)
    assert torch.equal(logits(twin), expected)
    assert twin.num_parameters() == model.num_parameters()
    assert twin.get_memory_footprint() == model.get_memory_footprint()
    for module in packed_modules(twin).values():
        module.gate_up_proj.zero_()
    twin.model.norm.requires_grad_(False)
    assert torch.equal(logits(model), expected)
    assert twin.num_parameters(only_trainable=True) == model.num_parameters(only_trainable=True) - 64


@pytest.mark.parametrize("copy_of", COPIES.values(), ids=COPIES)
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_copies_save_and_dequantize(
    family: str, copy_of: Callable[[nn.Module], nn.Module], tiny_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """A copy saves the same file and dequantizes to the same weights as the original."""
    model = load(tiny_checkpoints[family], QMoEConfig())
    twin = copy_of(model)
    for name, one in (("model", model), ("twin", twin)):
        one.save_pretrained(tmp_path / name)
    assert digest(tmp_path / "model") == digest(tmp_path / "twin")
    assert_same_tensors(twin.dequantize().state_dict(), model.dequantize().state_dict())


def test_a_copy_outlives_the_original(tiny_checkpoints: dict[str, Path]) -> None:
    """Counting on a copy works after the original is gone, and on a submodel alone."""
    model = load(tiny_checkpoints["qwen3_moe"], QMoEConfig())
    count = model.num_parameters()
    twin = copy.deepcopy(model)
    body = copy.deepcopy(model.model)
    del model
    assert twin.num_parameters() == count
    assert body.num_parameters() == count - twin.lm_head.weight.numel()


def test_no_warning_while_saving_and_reloading(tiny_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """Python warnings of a save and a reload are none."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load(tiny_checkpoints["qwen3_moe"], QMoEConfig()).save_pretrained(tmp_path)
        load(tmp_path)


def test_tied_embeddings(tmp_path: Path) -> None:
    """With tied embeddings, saved once, two generations keep every tensor."""
    checkpoint = save_tiny(tmp_path / "float", "qwen3_moe", tie_word_embeddings=True)
    reloaded = assert_round_trip(load(checkpoint, QMoEConfig()), tmp_path)
    assert reloaded.lm_head.weight is reloaded.model.embed_tokens.weight
    assert "lm_head.weight" not in tensors_on_disk(tmp_path / "second")


def test_gradients_after_reloading_in_another_dtype(tiny_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """A model saved from a bf16 load and reloaded in fp32 has the gradients of an fp32 load, bit for bit.

    bitsandbytes keeps the dtype of the time of quantization and dequantizes in it for backward.
    """
    source = tiny_checkpoints["mixtral"]
    load(source, QMoEConfig(), dtype=torch.bfloat16).save_pretrained(tmp_path)
    direct, reloaded = load(source, QMoEConfig(), dtype=torch.float32), load(tmp_path, dtype=torch.float32)
    embeds = torch.randn(1, 5, 64, requires_grad=True)
    expected, actual = (
        torch.autograd.grad(model(inputs_embeds=embeds).logits.square().sum(), embeds)[0]
        for model in (direct, reloaded)
    )
    assert torch.equal(actual, expected)
