"""Peak memory of loading a checkpoint: bf16 as it is, packed while it is read, and packed from a packed checkpoint.

The checkpoint is a small Qwen3-MoE with one tensor per expert and projection, as published models have. What is
compared with is the footprint of the loaded model: a loader that needs no more than that (and what the last expert
takes) can load whatever the machine can hold.
"""

import hashlib
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import bitsandbytes.functional as bnb_functional
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3MoeConfig
from transformers.utils.logging import disable_progress_bar

from benchmarks.case import Case, Result, Row
from benchmarks.memory import PeakRss, fresh_process, mapped_bytes, peak_of_tensors, settle, status_bytes
from benchmarks.verify import require_equal
from hf_qmoe import ExpertsNbit, QMoEConfig
from hf_qmoe.memory import quant_state_tensors


ARMS = ("bf16", "nf4", "nf4_reload")
PACKED_ARMS = ARMS[1:]
TARGET = 1.10

_WARM_UP = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 64,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
}


@dataclass(frozen=True)
class Size:
    """Shape of the model, and in how many processes each arm is repeated (the highest peak counts)."""

    model: Mapping[str, int] = field(
        default_factory=lambda: {
            "vocab_size": 8192,
            "hidden_size": 1024,
            "intermediate_size": 2048,
            "moe_intermediate_size": 512,
            "num_experts": 32,
            "num_experts_per_tok": 4,
            "num_hidden_layers": 7,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "head_dim": 64,
        }
    )
    shard: str = "200MB"
    repeats: int = 3
    threads: int = field(default_factory=torch.get_num_threads)


def write(directory: Path, shape: Mapping[str, int], shard: str) -> None:
    """Saves a bf16 model with random weights in its original layout."""
    disable_progress_bar()
    torch.manual_seed(0)
    config = Qwen3MoeConfig(**shape, tie_word_embeddings=False, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(directory, max_shard_size=shard)


def _load(directory: Path, arm: str) -> PreTrainedModel:
    quantization = {"quantization_config": QMoEConfig()} if arm == "nf4" else {}
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16, **quantization)
    return model


def measure(root: Path, arm: str, threads: int, save: bool = False) -> dict[str, Any]:
    """Bytes of one load above what was resident after a load of a tiny model, and digests of what was loaded.

    Args:
        root: holds ``float`` and ``packed``, each with ``model`` and ``warm_up``.
        save: also write ``packed``.
    """
    disable_progress_bar()
    torch.set_num_threads(threads)
    source = root / ("packed" if arm == "nf4_reload" else "float")
    warm_up = _load(source / "warm_up", arm)
    if save:
        warm_up.save_pretrained(root / "packed" / "warm_up")
    del warm_up
    settle()
    before = status_bytes("RssAnon")
    with PeakRss() as peak:
        model = _load(source / "model", arm)
    settle()
    after = status_bytes("RssAnon") - before
    mapped = mapped_bytes(_all_tensors(model))
    digests = quantized_digests(model) if arm == "bf16" else packed_digests(model)
    if save:
        model.save_pretrained(root / "packed" / "model")
    return {
        "peak_rss_anon": peak.anonymous,
        "peak_rss": peak.total,
        "peak_rss_anon_and_mapped": peak.anonymous + mapped,
        "rss_anon_after": after,
        "footprint": model.get_memory_footprint(),
        "outputs": digests,
    }


def measure_tensors(root: Path, arm: str, threads: int) -> int:
    """Peak of what a load takes from torch's allocator, without the mapped checkpoint."""
    disable_progress_bar()
    torch.set_num_threads(threads)
    source = root / ("packed" if arm == "nf4_reload" else "float")
    models = [_load(source / "warm_up", arm)]
    files = (source / "model").glob("*.safetensors")
    return peak_of_tensors(lambda: models.append(_load(source / "model", arm)), files)


def _all_tensors(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers(), *quant_state_tensors(model)]


def _digest(*tensors: Tensor) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def _sampled(num_experts: int) -> tuple[int, int]:
    return 0, num_experts - 1


def quantized_digests(model: nn.Module) -> dict[str, str]:
    """Of a float model: bitsandbytes' own nf4 bytes and scales of each layer's first and last expert."""
    digests = {}
    for name, parameter in model.named_parameters():
        if ".experts." in name:
            for expert in _sampled(parameter.shape[0]):
                packed, state = bnb_functional.quantize_4bit(
                    parameter[expert].detach(), quant_type="nf4", blocksize=64
                )
                digests[f"{name}.{expert}"] = _digest(packed, state.absmax)
    return digests


def packed_digests(model: nn.Module) -> dict[str, str]:
    """Of a packed model: the same experts, and every tensor it has."""
    digests = {"all tensors": _digest(*_all_tensors(model))}
    for path, module in model.named_modules():
        if isinstance(module, ExpertsNbit):
            for name, stack in module.stacks().items():
                assert stack.absmax is not None
                for expert in _sampled(stack.num_experts):
                    digests[f"{path}.{name}.{expert}"] = _digest(stack.packed[expert], stack.absmax[expert])
    return digests


def run(size: Size) -> Result:
    """Writes the checkpoints, then loads each in processes of its own."""
    rows: list[Row] = []
    outputs: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="hf_qmoe_bench_") as directory:
        root = Path(directory)
        fresh_process(write, root / "float" / "model", size.model, size.shard)
        fresh_process(write, root / "float" / "warm_up", _WARM_UP, size.shard)
        for arm in ARMS:
            measured = [
                fresh_process(measure, root, arm, size.threads, save=arm == "nf4" and repeat == 0)
                for repeat in range(size.repeats)
            ]
            outputs |= {arm if i == 0 else f"{arm}_{i}": m.pop("outputs") for i, m in enumerate(measured)}
            worst = {metric: max(m[metric] for m in measured) for metric in measured[0]}
            worst["peak_tensors"] = fresh_process(measure_tensors, root, arm, size.threads)
            rows += [_row(size, arm, metric, value, worst["footprint"]) for metric, value in worst.items()]
    return Result(rows, outputs)


def _row(size: Size, arm: str, metric: str, value: int, footprint: int) -> Row:
    repeats = 1 if metric in ("footprint", "peak_tensors") else size.repeats
    target = TARGET if metric == "peak_rss_anon" and arm in PACKED_ARMS else None
    config = {"model_type": "qwen3_moe", **size.model}
    return Row(
        arm,
        config,
        metric,
        "bytes",
        value,
        baseline="footprint",
        ratio=value / footprint,
        target=target,
        repeats=repeats,
    )


def verify(outputs: dict[str, dict[str, Any]]) -> None:
    """Packed experts are bitsandbytes' bytes of the bf16 ones, and a reload holds every byte of what was saved."""
    for arm, digests in outputs.items():
        if arm.startswith("nf4"):
            experts = {name: digest for name, digest in digests.items() if name != "all tensors"}
            require_equal(experts, outputs["bf16"], f"{arm} against bitsandbytes")
            require_equal(digests, outputs["nf4"], f"{arm} against nf4")


CASE = Case("load_memory", run, verify, {"full": Size(), "toy": Size(_WARM_UP, repeats=1)})
