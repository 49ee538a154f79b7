"""Checkpointing under the Trainer: adapters train as without it, and nothing is left behind, errors included."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn.utils import parametrize
from transformers import Trainer, TrainerCallback, TrainingArguments

from hf_qmoe import QMoEConfig
from hf_qmoe.ops.torch_ops import release_scratch
from tests.support.checkpoints import load
from tests.support.heap import live_tensors
from tests.support.layers import counted
from tests.support.models import token_ids
from tests.support.oracle import assert_same_bits


STEPS, LAYERS = 3, 2
BOTH_FORMS = pytest.mark.parametrize("form", ["nbit", "parametrize"])
BOTH_MODES = pytest.mark.parametrize("use_reentrant", [False, True], ids=["non_reentrant", "reentrant"])


@dataclass
class Recorder(TrainerCallback):
    """Keeps the gradients of every optimizer step."""

    gradients: list[dict[str, Tensor]] = field(default_factory=list)

    def on_pre_optimizer_step(self, *_: object, model: nn.Module, **__: object) -> None:
        """Copies them before they are used."""
        self.gradients.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})


@dataclass
class Run:
    """What a training run gave."""

    losses: list[float]
    gradients: list[dict[str, Tensor]]
    adapter: dict[str, Tensor]
    calls: int


def adapted(checkpoint: Path, form: str, enable: Callable[[nn.Module, str], None] = lambda *_: None) -> nn.Module:
    """A packed model with LoRA on its quantized attention; `enable` is called before and after that is added."""
    config = QMoEConfig(experts_module=form, experts_double_quant=True)
    model = load(checkpoint, config, dtype=torch.float32)
    model.config.use_cache = False  # a cache gives attention other strides, and so other bits
    enable(model, "before")
    torch.manual_seed(0)
    lora = LoraConfig(r=4, target_modules=["q_proj", "o_proj"], lora_dropout=0.1, init_lora_weights=False)
    model = get_peft_model(model, lora)
    enable(model, "after")
    model.enable_input_require_grads()
    return model


def trainer_of(model: nn.Module, path: Path, use_reentrant: bool | None, *callbacks: TrainerCallback) -> Trainer:
    """A Trainer for a few steps; `None` is without checkpointing."""
    switches: dict[str, object] = {}
    if use_reentrant is not None:
        switches = {
            "gradient_checkpointing": True,
            "gradient_checkpointing_kwargs": {"use_reentrant": use_reentrant},
        }
    args = TrainingArguments(
        output_dir=str(path),
        max_steps=STEPS,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        seed=0,
        **switches,
    )
    rows = [{"input_ids": row, "labels": row} for row in token_ids(16, 9, seed=1)]
    return Trainer(model=model, args=args, train_dataset=rows, callbacks=list(callbacks))


def experts(model: nn.Module, layer: int = 0) -> nn.Module:
    """The experts module of a layer."""
    return model.get_base_model().model.layers[layer].mlp.experts


def train(model: nn.Module, path: Path, use_reentrant: bool | None) -> Run:
    """Trains, and checks that the packed tensors are what they were."""
    packed = {n: p.clone() for n, p in model.named_parameters() if not p.is_floating_point()}
    recorder = Recorder()
    trainer = trainer_of(model, path, use_reentrant, recorder)
    with counted(experts(model)) as calls:
        trainer.train()
    for name, value in packed.items():
        assert_same_bits(model.get_parameter(name), value)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    factors = {n: p.detach().clone() for n, p in model.named_parameters() if "lora_" in n}
    return Run(losses, recorder.gradients, factors, calls[0])


def assert_same_run(actual: Run, expected: Run) -> None:
    """The same losses, gradients of each step and adapter, bit for bit."""
    assert actual.losses == expected.losses
    assert len(actual.gradients) == len(expected.gradients) == STEPS
    pairs = [*zip(actual.gradients, expected.gradients, strict=True), (actual.adapter, expected.adapter)]
    for one, other in pairs:
        assert one.keys() == other.keys() == expected.adapter.keys()
        for name, value in other.items():
            assert value.abs().sum() > 0
            assert_same_bits(one[name], value)


def assert_nothing_global() -> None:
    """torch's parametrize cache is off and empty."""
    assert (parametrize._cache_enabled, parametrize._cache) == (0, {})
    assert torch.is_grad_enabled()


def count_live() -> int:
    """Number of live tensors."""
    release_scratch()
    return len(live_tensors())


@BOTH_FORMS
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_order_and_kind(family: str, form: str, tiny_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """Enabled before or after the adapter is added, of either kind: the run is that without checkpointing."""
    expected = train(adapted(tiny_checkpoints[family], form), tmp_path / "off", None)
    assert expected.calls == STEPS
    for use_reentrant in (False, True):
        for order in ("before", "after", "trainer"):

            def enable(model: nn.Module, when: str, order: str = order, kind: bool = use_reentrant) -> None:
                if when == order:
                    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": kind})

            model = adapted(tiny_checkpoints[family], form, enable)
            assert model.get_base_model().is_gradient_checkpointing == (order != "trainer")
            actual = train(model, tmp_path / f"{order}_{use_reentrant}", use_reentrant)
            assert actual.calls == 2 * STEPS
            assert_same_run(actual, expected)
            assert_nothing_global()


@BOTH_MODES
@BOTH_FORMS
def test_inside_a_callers_cache(
    form: str, use_reentrant: bool, tiny_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """Within the caller's own `parametrize.cached()` a run is the same, and no packed weight enters that cache."""
    expected = train(adapted(tiny_checkpoints["qwen3_moe"], form), tmp_path / "off", None)
    model = adapted(tiny_checkpoints["qwen3_moe"], form)
    with parametrize.cached():
        actual = train(model, tmp_path / "cached", use_reentrant)
        assert (parametrize._cache_enabled, parametrize._cache) == (1, {})
    assert_same_run(actual, expected)
    assert_nothing_global()


class Failing(nn.Module):
    """An activation that raises at its n-th call from when it is armed."""

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.activation, self.left = activation, 0

    def forward(self, rows: Tensor) -> Tensor:
        """What the activation gives, as long as it does not raise."""
        self.left -= 1
        if self.left == 0:
            raise RuntimeError("the activation failed")
        return self.activation(rows)


@contextmanager
def failing(model: nn.Module) -> Iterator[Failing]:
    """Puts a `Failing` in the last layer's experts."""
    module = experts(model, LAYERS - 1)
    module.act_fn = Failing(module.act_fn)
    yield module.act_fn
    module.act_fn = module.act_fn.activation


@pytest.mark.parametrize("where", ["forward", "recomputation"])
@pytest.mark.parametrize("cached", [False, True], ids=["", "cached"])
@BOTH_MODES
@BOTH_FORMS
def test_an_error_leaves_nothing(
    form: str, use_reentrant: bool, cached: bool, where: str, tiny_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """After runs that an activation ended, in forward or backward, no tensor stays, and training works as before."""
    expected = train(adapted(tiny_checkpoints["qwen3_moe"], form), tmp_path / "off", None)
    model = adapted(tiny_checkpoints["qwen3_moe"], form)
    alive = []
    with failing(model) as activation:
        lm_head = model.get_base_model().lm_head
        for attempt in range(3):
            trainer = trainer_of(model, tmp_path / str(attempt), use_reentrant)
            # In backward: armed once the forward of the whole model is over.
            activation.left = 1 if where == "forward" else 0
            arm = lm_head.register_forward_hook(lambda *_: setattr(activation, "left", 1))
            message = ""
            with parametrize.cached() if cached else nullcontext():
                try:
                    trainer.train()
                except RuntimeError as error:
                    message = str(error)
            assert message == "the activation failed"
            assert trainer.state.global_step == 0
            arm.remove()
            model.zero_grad(set_to_none=True)
            del trainer, arm
            alive.append(count_live())
            assert_nothing_global()
    assert alive[2] == alive[1]
    assert_same_run(train(model, tmp_path / "after", use_reentrant), expected)
