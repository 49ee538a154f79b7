"""LoRA on packed experts through transformers' own Trainer, with ordinary PEFT calls."""

import json
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model, prepare_model_for_kbit_training
from torch import Tensor, nn
from transformers import PreTrainedModel, Trainer, set_seed

from hf_qmoe import QMoEConfig
from hf_qmoe.lazy_weight import LazyWeight
from hf_qmoe.lora_weight import LoraWeight
from tests.support.checkpoints import float_twin, load
from tests.support.layers import counted
from tests.support.lora import EXPERTS, FORMS, adapted_pair, expert_lora_tensors, logits, lora_tensors
from tests.support.models import token_ids
from tests.support.oracle import assert_same_bits, recorded_saves
from tests.training.test_trainer import CHECKPOINTING, arguments, losses, rows


FAMILIES = ("qwen3_moe", "gpt_oss")
MODES = ("non_reentrant", "reentrant")


def lora(dropout: float = 0.05, **changes: object) -> LoraConfig:
    """LoRA on attention and both projections of the experts."""
    fields: dict[str, object] = {"r": 2, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}
    fields |= {"target_parameters": list(EXPERTS), "lora_dropout": dropout}
    return LoraConfig(**(fields | changes))


def packed(checkpoint: Path, form: str = "nbit", **kwargs: object) -> PreTrainedModel:
    """A model loaded with its experts packed in one of the two forms."""
    return load(checkpoint, QMoEConfig(experts_module=form), **kwargs)


def adapted(
    checkpoint: Path, form: str = "nbit", dropout: float = 0.05, mode: str = "off", order: str = "trainer"
) -> PeftModel:
    """A model prepared for training, with a seeded adapter. `order` says when checkpointing is switched on."""
    switches = CHECKPOINTING[mode].get("gradient_checkpointing_kwargs")
    model = packed(checkpoint, form)
    early = mode != "off" and order == "before"
    model = prepare_model_for_kbit_training(
        model, use_gradient_checkpointing=early, gradient_checkpointing_kwargs=switches
    )
    model.config.use_cache = False  # a cache gives attention other strides, and so other bits
    set_seed(0)
    model = get_peft_model(model, lora(dropout))
    if mode != "off" and order == "after":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=switches)
    if mode == "reentrant" and not early:
        model.enable_input_require_grads()
    return model


def frozen(model: nn.Module) -> dict[str, Tensor]:
    """Copies of everything that is no adapter, by the names without PEFT's wrappers."""
    state = {n.removeprefix("base_model.model."): t for n, t in model.state_dict().items() if "lora_" not in n}
    return {n.replace(".base_layer", ""): t.detach().clone() for n, t in state.items()}


def factors(model: nn.Module) -> dict[str, Tensor]:
    """Copies of the adapter's tensors."""
    return {n: p.detach().clone() for n, p in lora_tensors(model).items()}


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Same names, dtypes and bits."""
    assert actual
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert_same_bits(actual[name], value)


def train(model: nn.Module, path: Path, steps: int, resume: Path | None = None, **changes: object) -> Trainer:
    """Trains, and checks that nothing but the adapter changed, and of the adapter every tensor."""
    base, before = frozen(model), factors(model)
    trainer = Trainer(model=model, args=arguments(path, steps, **changes), train_dataset=rows(), eval_dataset=rows(4))
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    assert_same(frozen(model), base)
    assert all(not torch.equal(value, before[name]) for name, value in factors(model).items())
    return trainer


def number_of_stacks(model: nn.Module) -> int:
    """Adapted stacks of experts."""
    return sum("lora_A" in name for name in expert_lora_tensors(model))


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", FAMILIES)
def test_loss_falls(family: str, form: str, bf16: bool, tiny_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """Twenty steps of accumulated gradients with dropout lower the loss; the packed experts stay as they were."""
    model = adapted(tiny_checkpoints[family], form)
    assert number_of_stacks(model) == 2 * model.config.num_hidden_layers
    assert {p.dtype for p in lora_tensors(model).values()} == {torch.float32}
    switches = {"bf16": bf16, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 4}
    history = losses(train(model, tmp_path, 20, **switches))
    assert len(history) == 20
    assert sum(history[-4:]) < 0.9 * sum(history[:4])
    for name, value in expert_lora_tensors(model).items():
        assert value.isfinite().all()
        assert value.abs().sum() > 0, name


@pytest.mark.parametrize(("dropout", "bf16"), [(0.0, False), (0.05, True)], ids=["fp32", "bf16_dropout"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", FAMILIES)
def test_checkpointing_changes_nothing(
    family: str, form: str, dropout: float, bf16: bool, tiny_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """Of either kind, switched on before PEFT or after it: losses and adapter keep their bits."""
    switches = {"bf16": bf16, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 2}
    model = adapted(tiny_checkpoints[family], form, dropout)
    expected = losses(train(model, tmp_path / "off", 2, **switches)), factors(model)
    for mode in MODES:
        for order in ("before", "after"):
            model = adapted(tiny_checkpoints[family], form, dropout, mode, order)
            assert model.get_base_model().is_gradient_checkpointing
            experts = model.get_base_model().model.layers[0].mlp.experts
            with counted(experts) as calls:
                history = losses(train(model, tmp_path / f"{mode}_{order}", 2, **switches, **CHECKPOINTING[mode]))
            assert calls[0] == 2 * 2 * 2  # steps, accumulated batches, forward and its recomputation
            assert history == expected[0]
            assert_same(factors(model), expected[1])


@pytest.mark.parametrize(
    ("family", "form", "bf16"),
    [
        ("qwen3_moe", "nbit", True),
        ("qwen3_moe", "parametrize", False),
        ("gpt_oss", "nbit", False),
        ("gpt_oss", "parametrize", True),
    ],
)
def test_resume_continues_the_run(
    family: str, form: str, bf16: bool, tiny_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """A run with dropout that is stopped at step 2 and resumed in a new model ends as one that was not stopped."""
    switches = {**CHECKPOINTING["non_reentrant"], "save_strategy": "steps", "save_steps": 2, "bf16": bf16}
    whole = adapted(tiny_checkpoints[family], form)
    history = losses(train(whole, tmp_path / "whole", 4, **switches))
    resumed = adapted(tiny_checkpoints[family], form)
    stopped = tmp_path / "whole" / "checkpoint-2"
    trainer = train(resumed, tmp_path / "resumed", 4, stopped, **switches)
    assert trainer.state.global_step == 4
    assert losses(trainer) == history
    assert_same(factors(resumed), factors(whole))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", FAMILIES)
def test_best_and_saved_adapter(family: str, form: str, tiny_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """`load_best_model_at_end` brings back the best step; what `save_model` writes is stock PEFT's, and runs there."""
    model = adapted(tiny_checkpoints[family], form, dropout=0.0)  # which stock PEFT does not load
    trainer = train(
        model,
        tmp_path / "run",
        4,
        save_strategy="steps",
        eval_strategy="steps",
        save_steps=1,
        eval_steps=1,
        load_best_model_at_end=True,
        metric_for_best_model="eval_loss",
        greater_is_better=True,  # so that the best is not the last
        learning_rate=5e-2,
    )
    evaluations = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    best = max(evaluations)
    assert best != evaluations[-1]
    assert trainer.evaluate()["eval_loss"] == pytest.approx(best, rel=1e-6)

    trainer.save_model(str(tmp_path / "saved"))
    files = {file.name for file in (tmp_path / "saved").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors"} <= files
    assert not {"model.safetensors", "config.json"} & files
    saved = json.loads((tmp_path / "saved" / "adapter_config.json").read_text())
    assert sorted(saved["target_parameters"]) == sorted(EXPERTS)

    float32 = packed(tiny_checkpoints[family], "nbit", dtype=torch.float32)
    twin = float_twin(float32, tiny_checkpoints[family])
    stock = PeftModel.from_pretrained(twin, tmp_path / "saved").eval()
    ours = PeftModel.from_pretrained(
        packed(tiny_checkpoints[family], form, dtype=torch.float32), tmp_path / "saved"
    ).eval()
    assert_same(factors(ours), factors(model))
    assert_same(factors(stock), factors(model))
    expected, actual = logits(stock), logits(ours)
    with stock.disable_adapter():
        unadapted = logits(stock)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    assert (expected - unadapted).abs().max() > 1e-2


@pytest.mark.parametrize("form", FORMS)
def test_training_without_an_adapter_raises(form: str, tiny_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """A packed model without an adapter is refused by the Trainer's own check, before and after preparation."""
    model = packed(tiny_checkpoints["qwen3_moe"], form)
    for _ in range(2):
        with pytest.raises(ValueError, match="cannot perform fine-tuning on purely quantized models"):
            Trainer(model=model, args=arguments(tmp_path, 1), train_dataset=rows())
        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)


@pytest.mark.parametrize("form", FORMS)
def test_flags(form: str, tiny_checkpoints: dict[str, Path]) -> None:
    """What Trainer, TRL and PEFT look at says: quantized to 4 bits, trainable with adapters, saveable."""
    model = packed(tiny_checkpoints["qwen3_moe"], form)
    assert model.is_quantized
    assert model.is_loaded_in_4bit
    assert not getattr(model, "is_loaded_in_8bit", False)
    assert model.hf_quantizer.is_trainable
    assert model.hf_quantizer.is_serializable()
    assert model.quantization_method == model.config.quantization_config.quant_method == "qmoe"
    wrapped = get_peft_model(model, lora())
    assert wrapped.is_loaded_in_4bit
    assert wrapped.hf_quantizer.is_trainable
    trainable, total = wrapped.get_nb_trainable_parameters()
    assert trainable == sum(p.numel() for p in lora_tensors(wrapped).values())
    assert trainable < total


@pytest.mark.parametrize("form", FORMS)
def test_transformers_own_adapters(form: str, tiny_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """`add_adapter` and a Trainer, `save_pretrained`, `load_adapter`, switching off and on: no `PeftModel` needed."""
    path = tiny_checkpoints["qwen3_moe"]
    model = packed(path, form, dtype=torch.float32)
    base = logits(model)
    set_seed(0)
    model.add_adapter(lora(0.0), "one")
    assert model.active_adapters() == ["one"]
    assert number_of_stacks(model) == 2 * model.config.num_hidden_layers
    trainer = train(model, tmp_path / "run", 2, **CHECKPOINTING["non_reentrant"])
    trained = logits(model.eval())
    assert (trained - base).abs().max() > 1e-2
    model.disable_adapters()
    assert_same_bits(logits(model), base)
    model.enable_adapters()
    assert_same_bits(logits(model), trained)

    trainer.save_model(str(tmp_path / "saved"))
    assert not (tmp_path / "saved" / "model.safetensors").exists()
    again = packed(path, form, dtype=torch.float32).eval()
    again.load_adapter(str(tmp_path / "saved"))
    assert_same_bits(logits(again), trained)
    wrapped = PeftModel.from_pretrained(packed(path, form, dtype=torch.float32), tmp_path / "saved").eval()
    assert_same_bits(logits(wrapped), trained)


@pytest.mark.parametrize("mode", ["off", "reentrant"])  # the other kind uses the hooks that record
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_of_a_weights_size_is_saved(family: str, form: str, mode: str) -> None:
    """Autograd keeps no dequantized stack, no expert's matrix and no update of a stack, in forward or recomputation.

    A float model with stock PEFT keeps them, so that the sizes looked for are the right ones.
    """
    field = "num_experts" if family == "qwen3_moe" else "num_local_experts"
    ours, stock = adapted_pair(family, form, config=lambda: lora(0.0), **{field: 8})
    sizes = {8 * 192 * 64, 192 * 64, 8 * 96 * 64, 96 * 64}
    counts = {}
    for model in (ours, stock):
        model.config.use_cache = False
        if mode != "off":
            model.gradient_checkpointing_enable(CHECKPOINTING[mode]["gradient_checkpointing_kwargs"])
            model.enable_input_require_grads()
        ids = token_ids()
        with recorded_saves() as saved:
            model.train()(input_ids=ids, labels=ids).loss.backward()
        held = [t for t in saved if t.is_floating_point() and type(t) not in (LazyWeight, LoraWeight)]
        counts[model] = sum(t.numel() in sizes for t in held)
        assert held
    assert counts[ours] == 0
    assert counts[stock] > 0
