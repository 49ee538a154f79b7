"""Decoding with a whole model: milliseconds per token of the demo's MoE, packed against bf16 in transformers.

The model is SmolLM2-135M made into a Mixtral of four experts (`examples/upcycle.py`). All arms continue the same
prompt greedily, one token at a time, and take turns; the prompt itself is not timed. ``_and_linears`` packs linears
with bitsandbytes' `Linear4bit` too, as `QMoEConfig()` does by default; the others leave them in bf16. ``llama_cpp`` is
the same model in Q4_0, in a process of its own (`benchmarks.llama`).
"""

import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from benchmarks import llama, ours, verify
from benchmarks.case import Case, Result, Row, verified_in_run
from benchmarks.convergence import MakeModel, demo_model, toy_model
from benchmarks.memory import fresh_process
from benchmarks.timing import interleave
from hf_qmoe import QMoEConfig


BASELINE = "bf16_grouped_mm"
IMPLEMENTATIONS = ("grouped_mm", "eager", "batched_mm")
TARGET = 1.0

#: Highest error of logits against the same values in float32, relative to transformers' bf16 `grouped_mm` on them.
#: Rounding goes through all layers, so that a few dozen tokens scatter by tens of percent. eager adds experts up in
#: bf16; llama.cpp rounds activations to 8 bit before each product.
ALLOWED_ERROR, ALLOWED_ERRORS = 1.5, {"bf16_eager": 2.0, "llama_cpp": 2.0}


@dataclass(frozen=True)
class Size:
    """What to run."""

    make: MakeModel = demo_model
    prompt: int = 32
    new_tokens: int = 32
    rounds: int = 9
    threads: int = field(default_factory=torch.get_num_threads)


class Decoder(Protocol):
    """One arm."""

    def greedy(self, prompt: list[int], count: int) -> float:
        """Milliseconds per token of `count` new ones."""

    def forced(self, prompt: list[int], tokens: list[int]) -> Tensor:
        """Logits after the prompt and after each of `tokens`, fed one at a time."""


class OfTransformers:
    """A model of transformers with its default cache."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model.eval()

    @torch.no_grad()
    def greedy(self, prompt: list[int], count: int) -> float:
        """See `Decoder`."""
        out = self.model(torch.tensor([prompt]), use_cache=True)
        token = out.logits[:, -1:].argmax(-1)
        start = time.perf_counter()
        for _ in range(count):
            out = self.model(token, past_key_values=out.past_key_values, use_cache=True)
            token = out.logits[:, -1:].argmax(-1)
        return (time.perf_counter() - start) * 1e3 / count

    @torch.no_grad()
    def forced(self, prompt: list[int], tokens: list[int]) -> Tensor:
        """See `Decoder`."""
        out = self.model(torch.tensor([prompt]), use_cache=True)
        rows = [out.logits[0, -1]]
        for token in tokens:
            out = self.model(torch.tensor([[token]]), past_key_values=out.past_key_values, use_cache=True)
            rows.append(out.logits[0, -1])
        return torch.stack(rows)


class OfLlamaCpp:
    """A model in a process of llama.cpp; logits come back in a file in `folder`."""

    def __init__(self, process: llama.Decoder, folder: Path) -> None:
        self.process, self.folder = process, folder

    def greedy(self, prompt: list[int], count: int) -> float:
        """See `Decoder`."""
        times: list[float] = self.process.ask(prompt=prompt, new_tokens=count)["milliseconds"]
        return sum(times) / count

    def forced(self, prompt: list[int], tokens: list[int]) -> Tensor:
        """See `Decoder`."""
        path = self.folder / "logits"
        rows = self.process.ask(prompt=prompt, forced=tokens, logits=str(path))["rows"]
        return torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.float32).view(rows, -1)


def _load(checkpoint: Path, **options: Any) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(checkpoint, **{"dtype": torch.bfloat16} | options)
    return model.eval()


def check(decoders: Mapping[str, Decoder], exact: PreTrainedModel, prompt: list[int], count: int) -> None:
    """Arms that hold the values of `exact`, a float32 model, are as close to it as it is itself in bf16.

    Raises:
        OutputsDiffer: an arm is further away. `exact` is in bf16 afterwards.
    """
    with torch.no_grad():
        tokens = exact.generate(torch.tensor([prompt]), max_new_tokens=count, min_new_tokens=count, do_sample=False)
        reference = exact(tokens).logits[0, len(prompt) - 1 :]
    forced = tokens[0, len(prompt) :].tolist()
    exact.set_experts_implementation("grouped_mm")
    for parameter in exact.parameters():  # not buffers: frequencies of the positions stay in float32, as when loading
        parameter.data = parameter.data.to(torch.bfloat16)
    outputs = {"in_bf16": OfTransformers(exact).forced(prompt, forced)}
    outputs |= {arm: decoder.forced(prompt, forced) for arm, decoder in decoders.items()}
    named = {arm: {"decode/logits": logits} for arm, logits in outputs.items()}
    allowed = {arm: ALLOWED_ERRORS.get(arm, ALLOWED_ERROR) for arm in outputs}
    verify.require_as_close(named, {"decode/logits": reference}, "in_bf16", allowed)


def _bf16(checkpoint: Path) -> tuple[dict[str, Decoder], PreTrainedModel]:
    arms: dict[str, Decoder] = {
        f"bf16_{name}": OfTransformers(_load(checkpoint, experts_implementation=name)) for name in IMPLEMENTATIONS
    }
    return arms, _load(checkpoint, dtype=torch.float32)


def _packed(checkpoint: Path, quantize_linears: bool) -> tuple[dict[str, Decoder], PreTrainedModel]:
    arms: dict[str, Decoder] = {}

    def load() -> PreTrainedModel:
        return _load(checkpoint, quantization_config=QMoEConfig(quantize_linears=quantize_linears))

    for variant in [ours.DEFAULT] if quantize_linears else ours.VARIANTS:
        model = load()
        ours.select(model, variant)
        arms[f"{variant}_and_linears" if quantize_linears else variant] = OfTransformers(model)
    return arms, load().dequantize().float()


def measure(size: Size, folder: Path, prompt: list[int]) -> Result:
    """Verifies all arms on the checkpoint in `folder`, then times them in turns; run it in a fresh process."""
    disable_progress_bar()
    torch.set_num_threads(size.threads)
    checkpoint, notes = folder / "moe-bf16", []
    decoders: dict[str, Decoder] = {}
    for made in (partial(_bf16, checkpoint), partial(_packed, checkpoint, False), partial(_packed, checkpoint, True)):
        arms, exact = made()
        check(arms, exact, prompt, size.new_tokens)
        del exact
        decoders |= arms
    python = llama.interpreter()
    process = None
    if python is None:
        notes.append(f"llama_cpp: left out, there is no interpreter that has it (`make llama`, or {llama.VARIABLE})")
    else:
        exact = llama.export(checkpoint, folder / "moe.gguf")
        process = llama.Decoder(python, folder / "moe.gguf", size.threads)
        decoders["llama_cpp"] = OfLlamaCpp(process, folder)
        check({"llama_cpp": decoders["llama_cpp"]}, exact, prompt, size.new_tokens)
        del exact
    steps = {arm: partial(decoder.greedy, prompt, size.new_tokens) for arm, decoder in decoders.items()}
    turns = interleave(steps, size.rounds, clock=lambda step: step())
    if process is not None:
        process.close()
    config = {"model": "demo MoE" if size.make is demo_model else "toy", "prompt": size.prompt, "new": size.new_tokens}
    rows = turns.rows(config | {"quant_type": "nf4"}, "per_token", BASELINE)
    rows = [replace(row, target=TARGET if row.arm == ours.DEFAULT else None) for row in rows]
    return Result(rows + [_rate(row) for row in rows], {}, notes)


def _rate(row: Row) -> Row:
    """The same as tokens per second, informative: the ratio is how many times as fast as the baseline."""
    assert row.ratio is not None
    return Row(
        row.arm, row.config, "rate", "tokens/s", 1e3 / row.value, row.baseline, 1 / row.ratio, repeats=row.repeats
    )


def run(size: Size) -> Result:
    """Makes the model, and measures in a process of its own."""
    with tempfile.TemporaryDirectory(prefix="hf_qmoe_bench_") as directory:
        _, held_out = size.make(Path(directory))
        prompt = held_out[0, : size.prompt].tolist()
        result: Result = fresh_process(measure, size, Path(directory), prompt)
        return result


CASE = Case("decode", run, verified_in_run, {"full": Size(), "toy": Size(toy_model, prompt=8, new_tokens=8, rounds=3)})
