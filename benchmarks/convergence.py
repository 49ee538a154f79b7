"""Does QLoRA on packed experts learn what LoRA on bf16 experts learns? Held-out loss after the same 60 steps.

The model is the demo's: SmolLM2-135M made into a Mixture-of-Experts. One arm trains LoRA on the experts of the model
in nf4 (`hf_qmoe`), the other with stock PEFT on the experts in bf16, with the same data in the same order, the same
seeds and so the same initial factors. Loss is measured on texts that are not trained on.
"""

import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import PreTrainedModel, Trainer, TrainingArguments, set_seed

from benchmarks.case import Case, Result, Row
from benchmarks.memory import fresh_process
from benchmarks.verify import OutputsDiffer
from hf_qmoe import QMoEConfig


ARMS = ("hf_qmoe", "stock_peft")
TARGET = 1.02
MakeModel = Callable[[Path], tuple[Tensor, Tensor]]


def demo_model(out: Path) -> tuple[Tensor, Tensor]:
    """Writes the demo's bf16 MoE to ``out/moe-bf16``; returns its samples to train on and held-out ones."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
    import demo

    return demo.text_blocks(demo.make_checkpoint(out, demo.Report()))


def toy_model(out: Path) -> tuple[Tensor, Tensor]:
    """A random Mixtral, and sequences that repeat, so that there is something to learn."""
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=4,
    )
    MixtralForCausalLM(config).bfloat16().save_pretrained(out / "moe-bf16")
    blocks = torch.randint(0, 64, (40, 4)).repeat(1, 8)
    return blocks[:32], blocks[32:]


@dataclass(frozen=True)
class Size:
    """What to run."""

    make: MakeModel = demo_model
    seeds: tuple[int, ...] = (0, 1, 2)
    steps: int = 60
    rank: int = 16
    batch: int = 16
    learning_rate: float = 2e-3
    threads: int = field(default_factory=torch.get_num_threads)


@torch.no_grad()
def loss_of(model: nn.Module, blocks: Tensor, batch: int) -> float:
    """Mean loss in nats per token."""
    model.eval()
    parts = blocks.split(batch)
    return sum(model(part, labels=part, use_cache=False).loss.item() for part in parts) / len(parts)


def adapted(arm: str, checkpoint: Path, size: Size, seed: int) -> nn.Module:
    """The model of one arm with a new adapter on the experts."""
    from transformers import AutoModelForCausalLM

    # Everything but the experts is the same in both arms: linears stay in bf16.
    config = {"quantization_config": QMoEConfig(quantize_linears=False)} if arm == "hf_qmoe" else {}
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16, **config)
    targets = ["experts.gate_up_proj", "experts.down_proj"]
    set_seed(seed)
    lora = LoraConfig(r=size.rank, lora_alpha=2 * size.rank, target_modules=[], target_parameters=targets)
    return get_peft_model(model, lora)


def measure(arm: str, seed: int, size: Size, checkpoint: Path, blocks: Tensor, held_out: Tensor) -> dict[str, float]:
    """Trains one arm; losses before and after."""
    torch.set_num_threads(size.threads)
    model = adapted(arm, checkpoint, size, seed)
    before = loss_of(model, held_out, size.batch)
    with tempfile.TemporaryDirectory() as out:
        arguments = TrainingArguments(
            out,
            max_steps=size.steps,
            per_device_train_batch_size=size.batch,
            learning_rate=size.learning_rate,
            lr_scheduler_type="cosine",
            warmup_steps=size.steps // 10,
            save_strategy="no",
            logging_steps=size.steps,
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
            seed=seed,
        )
        Trainer(model, arguments, train_dataset=[{"input_ids": block, "labels": block} for block in blocks]).train()
    return {"before": before, "after": loss_of(model, held_out, size.batch)}


def run(size: Size) -> Result:
    """Both arms for each seed, each in a process of its own."""
    rows: list[Row] = []
    losses: dict[str, dict[str, Any]] = {arm: {} for arm in ARMS}
    with tempfile.TemporaryDirectory() as folder:
        blocks, held_out = size.make(Path(folder))
        for seed in size.seeds:
            for arm in ARMS:
                found = fresh_process(measure, arm, seed, size, Path(folder) / "moe-bf16", blocks, held_out)
                losses[arm] |= {f"seed{seed}_{when}": loss for when, loss in found.items()}
                before, after = found["before"], found["after"]
                print(f"{arm}, seed {seed}: {before:.3f} to {after:.3f}", file=sys.stderr, flush=True)
    for when in ("before", "after"):
        for arm in ARMS:
            own, stock = ([losses[a][f"seed{seed}_{when}"] for seed in size.seeds] for a in (arm, "stock_peft"))
            for seed, value, other in zip(size.seeds, own, stock, strict=True):
                config = {"seed": seed, "steps": size.steps, "rank": size.rank, "quant_type": "nf4"}
                metric = f"held_out_loss_{when}"
                rows.append(Row(arm, config, metric, "nats", value, "stock_peft", value / other))
    return Result([*rows, mean_of_seeds(rows)], losses)


def mean_of_seeds(rows: Sequence[Row]) -> Row:
    """The row that has a target: the mean loss after training, and the mean of the ratios."""
    seeds = [row for row in rows if (row.arm, row.metric) == ("hf_qmoe", "held_out_loss_after")]
    assert all(row.ratio is not None for row in seeds)
    config = {"seeds": len(seeds)} | {k: v for k, v in seeds[0].config.items() if k != "seed"}
    value, ratio = fmean(row.value for row in seeds), fmean(row.ratio or 0.0 for row in seeds)
    return replace(seeds[0], config=config, value=value, ratio=ratio, target=TARGET, repeats=len(seeds))


def verify(outputs: dict[str, dict[str, Any]]) -> None:
    """Training lowers the held-out loss in both arms, whatever the seed: there is something to compare."""
    for arm, losses in outputs.items():
        for name, after in losses.items():
            if name.endswith("_after") and not after < losses[name.replace("_after", "_before")]:
                raise OutputsDiffer(f"{arm}: {name} is {after:.3f}, no lower than before training")


CASE = Case(
    "convergence", run, verify, {"full": Size(), "toy": Size(toy_model, (0,), steps=20, batch=4, learning_rate=5e-2)}
)
