"""TRL's `SFTTrainer` on packed experts: LoRA by `peft_config`, without any change of the caller's code."""

from pathlib import Path

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, set_seed

from hf_qmoe import QMoEConfig
from tests.support.checkpoints import load
from tests.support.layers import counted
from tests.support.lora import EXPERTS, FORMS, expert_lora_tensors, lora_tensors
from tests.training.test_expert_lora import assert_same, factors, frozen
from tests.training.test_trainer import CHECKPOINTING, losses


trl = pytest.importorskip("trl")

FAMILIES = ("qwen3_moe", "gpt_oss")
by_form = pytest.mark.parametrize("form", FORMS)
by_family = pytest.mark.parametrize("family", FAMILIES)
WORDS = ("tuple", "module", "import", "class", "string", "lambda", "yield", "global")


def texts(count: int = 32) -> Dataset:
    """Sentences of one pattern."""
    return Dataset.from_list(
        [{"text": f"The {WORDS[i % 8]} statement of line {i} is a {WORDS[-i % 8]}."} for i in range(count)]
    )


def conversations(count: int = 32) -> Dataset:
    """Questions with answers of one pattern."""
    return Dataset.from_list(
        [
            {
                "messages": [
                    {"role": "user", "content": f"What is {WORDS[i % 8]}?"},
                    {"role": "assistant", "content": f"A {WORDS[i % 8]} is a statement."},
                ]
            }
            for i in range(count)
        ]
    )


def lora(**changes: object) -> LoraConfig:
    """LoRA on attention and both projections of the experts, with dropout."""
    fields: dict[str, object] = {"r": 4, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]}
    return LoraConfig(**(fields | {"target_parameters": list(EXPERTS), "lora_dropout": 0.05} | changes))


def packed(checkpoint: Path, form: str) -> PreTrainedModel:
    """A model as a user loads it: nothing but the config class is ours."""
    model = load(checkpoint, QMoEConfig(experts_module=form))
    model.config.use_cache = False
    return model


def arguments(path: Path, **changes: object) -> dict[str, object]:
    """Of a run on the CPU that accumulates gradients, in bf16."""
    fields: dict[str, object] = {
        "output_dir": str(path),
        "max_steps": 4,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 2e-2,
        "max_length": 32,
        "gradient_checkpointing": False,
        "bf16": True,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "seed": 0,
    }
    return fields | changes


def trainer_of(
    model: PreTrainedModel,
    path: Path,
    tokenizer: PreTrainedTokenizerBase,
    data: Dataset | None = None,
    **changes: object,
) -> "trl.SFTTrainer":
    """A trainer that is given the adapter's config."""
    args = trl.SFTConfig(**arguments(path, **changes))
    set_seed(0)
    return trl.SFTTrainer(
        model=model,
        args=args,
        train_dataset=texts() if data is None else data,
        processing_class=tokenizer,
        peft_config=lora(),
    )


def train(trainer: "trl.SFTTrainer", resume: Path | None = None) -> list[float]:
    """Trains; returns the losses. Only the adapter changed, every tensor of it."""
    base, before = frozen(trainer.model), factors(trainer.model)
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    assert_same(frozen(trainer.model), base)
    assert all(not torch.equal(value, before[name]) for name, value in factors(trainer.model).items())
    return losses(trainer)


@by_form
@by_family
def test_loss_falls(
    family: str, form: str, text_checkpoints: dict[str, Path], tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    """Twenty steps on packed rows. TRL sees a 4-bit model, and keeps adapters in bf16; all of them are trained."""
    model = packed(text_checkpoints[family], form)
    before = frozen(model)
    trainer = trainer_of(model, tmp_path, tokenizer, texts(64), packing=True, max_steps=20)
    assert isinstance(trainer.model, PeftModel)
    experts = expert_lora_tensors(trainer.model)
    assert len(experts) == 2 * 2 * model.config.num_hidden_layers
    assert {p.dtype for p in lora_tensors(trainer.model).values()} == {torch.bfloat16}
    history = train(trainer)
    assert len(history) == 20
    assert sum(history[-4:]) < 0.8 * sum(history[:4])
    assert_same(frozen(trainer.model), before)
    for name, value in experts.items():
        assert value.isfinite().all()
        assert value.abs().sum() > 0, name


@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
@by_form
@by_family
def test_checkpointing_changes_nothing(
    family: str,
    form: str,
    packing: bool,
    text_checkpoints: dict[str, Path],
    tokenizer: PreTrainedTokenizerBase,
    tmp_path: Path,
) -> None:
    """Losses and adapter are bit-identical without checkpointing, with either kind of it, and with TRL's default."""
    results = {}
    modes = {**CHECKPOINTING, "default": {"gradient_checkpointing": True}}
    for mode, switches in modes.items():
        model = packed(text_checkpoints[family], form)
        # Reentrant checkpointing gives the routers' auxiliary loss no gradient, in any model of transformers.
        switches = {**switches, "router_aux_loss_coef": 0.0, "packing": packing, "max_steps": 2}
        trainer = trainer_of(model, tmp_path / mode, tokenizer, **switches)
        experts = trainer.model.get_base_model().model.layers[0].mlp.experts
        with counted(experts) as calls:
            history = train(trainer)
        results[mode] = history, factors(trainer.model), calls[0]
    for mode in modes:
        assert results[mode][0] == results["off"][0]
        assert_same(results[mode][1], results["off"][1])
        assert results[mode][2] == results["off"][2] * (1 if mode == "off" else 2)


@by_form
def test_assistant_only_loss(
    form: str, text_checkpoints: dict[str, Path], tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    """With a template that marks the assistant's words, only those are learned; the loss falls."""
    model = packed(text_checkpoints["qwen3_moe"], form)
    trainer = trainer_of(
        model, tmp_path, tokenizer, conversations(), assistant_only_loss=True, packing=True, max_steps=12
    )
    batch = next(iter(trainer.get_train_dataloader()))
    learned = batch["input_ids"][batch["labels"] != -100]
    said = tokenizer.decode(learned)
    assert "is a statement.</s>" in said
    assert "What" not in said
    history = train(trainer)
    assert sum(history[-3:]) < 0.8 * sum(history[:3])


@by_form
def test_resume_continues_the_run(
    form: str, text_checkpoints: dict[str, Path], tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    """A run with dropout that is stopped at step 2 and resumed in a new model goes on as one that was not stopped.

    But for rounding: PEFT loads the adapter of a checkpoint in float32, where TRL had made it bfloat16. AdamW moves
    an entry whose gradient is all rounding by a whole step, so the adapters differ by some; by far less than the
    resumed steps have moved them.
    """
    switches = {**CHECKPOINTING["non_reentrant"], "save_strategy": "steps", "save_steps": 2}
    path = text_checkpoints["qwen3_moe"]
    whole = trainer_of(packed(path, form), tmp_path / "whole", tokenizer, **switches)
    history = train(whole)
    resumed = trainer_of(packed(path, form), tmp_path / "resumed", tokenizer, **switches)
    again = train(resumed, tmp_path / "whole" / "checkpoint-2")
    assert again[:2] == history[:2]  # from the checkpoint's log
    assert again[2:] == pytest.approx(history[2:], rel=1e-3)
    expected, found = factors(whole.model), factors(resumed.model)
    stopped = load_file(tmp_path / "whole" / "checkpoint-2" / "adapter_model.safetensors")
    start = {name: stopped[name.replace(".default.", ".")] for name in expected}
    assert distance(found, expected) < 0.15 * distance(start, expected)


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Of two adapters, in the Frobenius norm."""
    return sum((one[name].double() - other[name].double()).square().sum().item() for name in one) ** 0.5


@by_form
@by_family
def test_router_loss(
    family: str, form: str, text_checkpoints: dict[str, Path], tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    """TRL logs the auxiliary loss of the routers of a packed model and adds it."""
    history = {}
    for coefficient in (0.0, 0.5):
        model = load(
            text_checkpoints[family],
            QMoEConfig(experts_module=form),
            output_router_logits=True,
            router_aux_loss_coef=coefficient,
        )
        model.config.use_cache = False
        trainer = trainer_of(model, tmp_path / str(coefficient), tokenizer, max_steps=1)
        trainer.train()
        history[coefficient] = losses(trainer)[0]
        logged = [float(entry["aux_loss"]) for entry in trainer.state.log_history if "aux_loss" in entry]
        assert len(logged) == (1 if coefficient else 0)
    assert logged[0] > 1  # its least value
    assert history[0.5] == pytest.approx(history[0.0] + 0.5 * logged[0], abs=5e-3)


@pytest.mark.parametrize("where", ["model_init_kwargs", "quantization_config"])
@by_form
def test_model_by_path(
    form: str, where: str, text_checkpoints: dict[str, Path], tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    """TRL loads the model itself, given our config: that of a user's script which never sees a model."""
    config = QMoEConfig(experts_module=form)
    changes = {where: {"quantization_config": config}} if where == "model_init_kwargs" else {}
    args = trl.SFTConfig(**arguments(tmp_path, max_steps=2, **changes))
    trainer = trl.SFTTrainer(
        model=str(text_checkpoints["qwen3_moe"]),
        args=args,
        train_dataset=texts(),
        processing_class=tokenizer,
        peft_config=lora(),
        quantization_config=config if where == "quantization_config" else None,
    )
    assert trainer.model.is_loaded_in_4bit
    train(trainer)
    assert len(expert_lora_tensors(trainer.model)) == 2 * 2 * trainer.model.config.num_hidden_layers


def test_training_without_an_adapter_raises(
    text_checkpoints: dict[str, Path], tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    """Without `peft_config` the Trainer's own check refuses the model."""
    args = trl.SFTConfig(**arguments(tmp_path))
    with pytest.raises(ValueError, match="cannot perform fine-tuning on purely quantized models"):
        trl.SFTTrainer(
            model=packed(text_checkpoints["qwen3_moe"], "nbit"),
            args=args,
            train_dataset=texts(),
            processing_class=tokenizer,
        )
