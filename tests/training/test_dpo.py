"""TRL's `DPOTrainer` on packed experts: the reference is the same model with its adapter switched off."""

import math
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, set_seed

from hf_qmoe import QMoEConfig
from tests.support.checkpoints import load
from tests.support.lora import EXPERTS, FORMS, expert_lora_tensors, logits, lora_tensors
from tests.support.oracle import assert_same_bits
from tests.training.test_trainer import CHECKPOINTING


trl = pytest.importorskip("trl")

FAMILIES = ("qwen3_moe", "gpt_oss")
by_form = pytest.mark.parametrize("form", FORMS)


def preferences(count: int = 32) -> Dataset:
    """Pairs of answers, of which the good ones have one pattern."""
    return Dataset.from_list(
        [
            {"prompt": f"Is {i} even?", "chosen": " It is a number.", "rejected": " No import at all."}
            for i in range(count)
        ]
    )


def lora() -> LoraConfig:
    """LoRA on attention and both projections of the experts."""
    return LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "v_proj"], target_parameters=list(EXPERTS))


def packed(checkpoint: Path, form: str) -> PreTrainedModel:
    """A model as a user loads it."""
    return load(checkpoint, QMoEConfig(experts_module=form))


def trainer_of(
    model: PreTrainedModel | PeftModel,
    path: Path,
    tokenizer: PreTrainedTokenizerBase,
    peft_config: LoraConfig | None,
    **changes: object,
) -> "trl.DPOTrainer":
    """A trainer without a reference model."""
    fields: dict[str, object] = {
        "output_dir": str(path),
        "max_steps": 4,
        "per_device_train_batch_size": 4,
        "learning_rate": 2e-2,
        "max_length": 64,
        "bf16": True,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "seed": 0,
    }
    args = trl.DPOConfig(**(fields | changes))
    set_seed(0)
    return trl.DPOTrainer(
        model=model, args=args, train_dataset=preferences(), processing_class=tokenizer, peft_config=peft_config
    )


def history(trainer: "trl.DPOTrainer", key: str) -> list[float]:
    """A logged quantity, one value per step."""
    return [float(entry[key]) for entry in trainer.state.log_history if key in entry]


def packed_tensors(model: nn.Module) -> list[torch.Tensor]:
    """Copies of all integer tensors: packed bytes, scales, metadata."""
    return [t.clone() for t in (*model.parameters(), *model.buffers()) if not t.is_floating_point()]


@pytest.mark.parametrize("mode", CHECKPOINTING)
@by_form
@pytest.mark.parametrize("family", FAMILIES)
def test_reference_is_the_disabled_adapter(
    family: str,
    form: str,
    mode: str,
    text_checkpoints: dict[str, Path],
    tokenizer: PreTrainedTokenizerBase,
    tmp_path: Path,
) -> None:
    """Policy equals reference at first (loss log 2), then the margin grows; the reference stays the base model."""
    model = packed(text_checkpoints[family], form)
    base, before = logits(model), packed_tensors(model)
    switches = {"gradient_checkpointing": False, "router_aux_loss_coef": 0.0, **CHECKPOINTING[mode]}
    trainer = trainer_of(model, tmp_path, tokenizer, lora(), **switches)
    assert trainer.ref_model is None
    trainer.train()
    loss, margin = history(trainer, "loss"), history(trainer, "rewards/margins")
    assert loss[0] == pytest.approx(math.log(2), abs=1e-6)
    assert margin[0] == pytest.approx(0, abs=1e-6)
    assert loss[-1] < 0.5 * loss[0]
    assert margin[-1] > max(0.5, margin[1])
    assert all(value.abs().sum() > 0 for value in expert_lora_tensors(trainer.model).values())
    for tensor, value in zip(packed_tensors(model), before, strict=True):
        assert_same_bits(tensor, value)

    # Without the wrapper that makes the Trainer's forward autocast.
    policy = trainer.accelerator.unwrap_model(trainer.model, keep_fp32_wrapper=False).eval()
    trained = logits(policy)
    with policy.disable_adapter():
        assert_same_bits(logits(policy), base)
    assert_same_bits(logits(policy), trained)
    assert (trained - base).abs().max() > 1e-2


@by_form
def test_reference_is_a_copy_of_the_adapter(
    form: str, text_checkpoints: dict[str, Path], tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    """For a model that has an adapter, TRL adds a second one as the reference: it stays what the first was."""
    set_seed(0)
    config = lora()
    config.init_lora_weights = False
    model = get_peft_model(packed(text_checkpoints["qwen3_moe"], form), config)
    trainer = trainer_of(model, tmp_path, tokenizer, None, router_aux_loss_coef=0.0)
    assert set(trainer.model.peft_config) == {"default", "ref"}
    reference = {n: p.detach().clone() for n, p in lora_tensors(model, "ref").items()}
    assert reference.keys() == {n.replace(".default.", ".ref.") for n in lora_tensors(model, "default")}
    for name, value in lora_tensors(model, "default").items():  # TRL makes bf16 of what is trained alone
        assert_same_bits(value.detach(), reference[name.replace(".default.", ".ref.")].bfloat16())
    trainer.train()
    loss = history(trainer, "loss")
    assert loss[0] == pytest.approx(math.log(2), abs=1e-2)
    assert loss[-1] < 0.5 * loss[0]
    for name, value in lora_tensors(model, "ref").items():
        assert_same_bits(value.detach(), reference[name])
        assert not torch.equal(lora_tensors(model, "default")[name.replace(".ref.", ".default.")], value)
