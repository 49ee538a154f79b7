"""QLoRA over packed experts through transformers' own Trainer: adapters on attention, experts frozen and packed."""

from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model, prepare_model_for_kbit_training
from transformers import AutoModelForCausalLM, PreTrainedModel, Trainer, TrainingArguments, set_seed

from hf_qmoe import QMoEConfig
from hf_qmoe.experts import ExpertsNbit
from tests.support.models import FAMILIES, token_ids


CHECKPOINTING = {
    "off": {},
    "non_reentrant": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
    "reentrant": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
}


def rows(count: int = 16, length: int = 12) -> list[dict[str, torch.Tensor]]:
    """A dataset of `count` distinct, learnable rows: each repeats a short pattern."""
    patterns = token_ids(count, 3, seed=1).repeat(1, length // 3)
    return [{"input_ids": row, "labels": row} for row in patterns]


def adapted(checkpoint: Path, **config: object) -> PeftModel:
    """A packed model with a seeded adapter on attention."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, quantization_config=QMoEConfig(**config))
    model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    set_seed(0)
    return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1))


def arguments(output: Path, steps: int, **changes: object) -> TrainingArguments:
    """Training arguments for a short run on the CPU."""
    fields: dict[str, object] = {
        "output_dir": str(output),
        "max_steps": steps,
        "per_device_train_batch_size": 4,
        "learning_rate": 2e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "seed": 0,
        "disable_tqdm": True,
    }
    return TrainingArguments(**(fields | changes))


def train(model: PeftModel | PreTrainedModel, args: TrainingArguments, **kwargs: object) -> Trainer:
    """Trains and returns the trainer."""
    trainer = Trainer(model=model, args=args, train_dataset=rows())
    trainer.train(**kwargs)
    return trainer


def losses(trainer: Trainer) -> list[float]:
    """Logged training losses, one per step."""
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def adapter(model: PeftModel) -> dict[str, torch.Tensor]:
    """Copies of the adapter's weights."""
    return {name: p.detach().clone() for name, p in model.named_parameters() if "lora_" in name}


def packed_state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Copies of all tensors of packed experts."""
    return {
        f"{path}.{name}": tensor.clone()
        for path, module in model.named_modules()
        if isinstance(module, ExpertsNbit)
        for name, tensor in module.state_dict().items()
    }


def assert_same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    """Same keys, same bits."""
    assert a
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=0, atol=0, msg=name)


@pytest.mark.parametrize("family", FAMILIES)
def test_gradient_checkpointing_changes_nothing(
    family: str, tiny_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """Losses and adapters of a run are bit-identical without checkpointing and with either kind of it."""
    results = {}
    for mode, switches in CHECKPOINTING.items():
        model = adapted(tiny_checkpoints[family])
        if mode == "reentrant":
            model.enable_input_require_grads()
        before = packed_state(model)
        trainer = train(model, arguments(tmp_path / mode, 4, **switches))
        assert_same(before, packed_state(model))
        assert model.get_base_model().is_gradient_checkpointing == (mode != "off")
        results[mode] = (losses(trainer), adapter(model))
    for mode in ("non_reentrant", "reentrant"):
        assert results[mode][0] == results["off"][0]
        assert_same(results[mode][1], results["off"][1])


@pytest.mark.parametrize("quant_type", ["nf4", "fp4", "int8", "fp8", "bf16", "fp16"])
def test_loss_falls(quant_type: str, tiny_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """Twenty steps lower the loss, in each format, and leave the packed experts as they were."""
    model = adapted(tiny_checkpoints["qwen3_moe"], experts_quant_type=quant_type)
    before = packed_state(model)
    trainer = train(model, arguments(tmp_path, 20, **CHECKPOINTING["non_reentrant"]))
    history = losses(trainer)
    assert len(history) == 20
    assert sum(history[-4:]) < 0.9 * sum(history[:4])
    assert_same(before, packed_state(model))


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_enabling_checkpointing_before_or_after_peft(
    order: str, use_reentrant: bool, tiny_checkpoints: dict[str, Path]
) -> None:
    """Adapter gradients equal those without checkpointing, whichever call comes first."""

    def gradients(checkpointing: bool) -> dict[str, torch.Tensor]:
        model = AutoModelForCausalLM.from_pretrained(
            tiny_checkpoints["qwen3_moe"], quantization_config=QMoEConfig(), dtype=torch.float32
        )
        switches = {"gradient_checkpointing_kwargs": {"use_reentrant": use_reentrant}}
        if checkpointing and order == "before":
            model.gradient_checkpointing_enable(**switches)
        set_seed(0)
        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
        if checkpointing and order == "after":
            model.gradient_checkpointing_enable(**switches)
        model.enable_input_require_grads()
        model.train()
        assert model.get_base_model().is_gradient_checkpointing == checkpointing
        ids = token_ids()
        model(input_ids=ids, labels=ids).loss.backward()
        return {name: p.grad for name, p in model.named_parameters() if "lora_" in name}

    with_checkpointing, without = gradients(True), gradients(False)
    assert all(g is not None and g.abs().sum() > 0 for g in without.values())
    assert_same(with_checkpointing, without)


def test_saved_adapter_reloads_over_saved_base(tiny_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """Base saved packed and adapter saved by the Trainer reload to the same logits, bit for bit."""
    base = AutoModelForCausalLM.from_pretrained(tiny_checkpoints["mixtral"], quantization_config=QMoEConfig())
    base.save_pretrained(tmp_path / "base")
    model = adapted(tiny_checkpoints["mixtral"])
    trainer = train(model, arguments(tmp_path / "run", 3, **CHECKPOINTING["non_reentrant"]))
    trainer.save_model(tmp_path / "adapter")
    assert not list((tmp_path / "adapter").glob("model*.safetensors"))

    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    reloaded = prepare_model_for_kbit_training(reloaded, use_gradient_checkpointing=False)
    reloaded = PeftModel.from_pretrained(reloaded, tmp_path / "adapter")
    ids = token_ids()
    with torch.no_grad():
        expected = model.eval()(input_ids=ids).logits
        torch.testing.assert_close(reloaded.eval()(input_ids=ids).logits, expected, rtol=0, atol=0)


def test_resume_continues_the_run(tiny_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """A run stopped at step 3 and resumed ends with the adapter of a run that was not stopped."""
    switches = {**CHECKPOINTING["non_reentrant"], "save_strategy": "steps", "save_steps": 3}
    whole = adapted(tiny_checkpoints["qwen3_moe"])
    train(whole, arguments(tmp_path / "whole", 6, **switches))

    resumed = adapted(tiny_checkpoints["qwen3_moe"])
    before = adapter(resumed)
    trainer = train(
        resumed,
        arguments(tmp_path / "resumed", 6, **switches),
        resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"),
    )
    assert trainer.state.global_step == 6
    after = adapter(resumed)
    assert any(not torch.equal(before[name], after[name]) for name in before)
    assert_same(after, adapter(whole))


def test_training_without_an_adapter_raises(tiny_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """A packed model without an adapter is refused by the Trainer's own check."""
    model = AutoModelForCausalLM.from_pretrained(tiny_checkpoints["qwen3_moe"], quantization_config=QMoEConfig())
    with pytest.raises(ValueError, match="purely quantized"):
        Trainer(model=model, args=arguments(tmp_path, 1), train_dataset=rows())


def test_gradients_survive_an_evaluation(tiny_checkpoints: dict[str, Path]) -> None:
    """An eval-mode forward before training changes no gradient.

    On AVX512-BF16 CPUs bitsandbytes repacks its linears in that forward and then computes without autograd.
    """

    def gradients(evaluate: bool) -> dict[str, torch.Tensor]:
        model = AutoModelForCausalLM.from_pretrained(
            tiny_checkpoints["qwen3_moe"], quantization_config=QMoEConfig(), dtype=torch.bfloat16
        )
        ids = token_ids()
        if evaluate:
            with torch.no_grad():
                model.eval()(input_ids=ids)
        set_seed(0)
        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
        model.train()
        model(input_ids=ids, labels=ids).loss.backward()
        return {name: p.grad for name, p in model.named_parameters() if "lora_" in name}

    assert_same(gradients(evaluate=True), gradients(evaluate=False))
