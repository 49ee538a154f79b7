"""Loading what was saved packed, against reading the bytes of its files and against loading the same model in bf16.

All files are in the page cache: what is compared is the work, not a disk. The arms take turns in one process; memory
comes from processes of their own. What was loaded is freed outside of the times.
"""

import gc
import hashlib
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load as parse
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from benchmarks import load_memory
from benchmarks.case import Case, Result, Row, verified_in_run
from benchmarks.memory import PeakRss, fresh_process, settle, status_bytes
from benchmarks.timing import milliseconds, time_row
from benchmarks.verify import require_equal
from hf_qmoe import QMoEConfig


#: Folder of the checkpoint that each arm reads. ``bf16`` has one tensor per expert and projection, as published models
#: have, which transformers merges; ``bf16_fused`` has the stacks of the model in memory, which it can map.
CHECKPOINTS = {"hf_qmoe": "packed", "read_file": "packed", "bf16": "float", "bf16_fused": "fused"}
#: Highest accepted time relative to reading the bytes, and anonymous memory relative to the packed model's bytes.
TARGETS = {"load": 1.0, "peak_rss_anon": 0.05}
_WARM_UP_ROUNDS = 2
_TINY: Mapping[str, int] = load_memory.CASE.sizes["toy"].model


@dataclass(frozen=True)
class Size:
    """Shape of the model, rounds in which the arms take turns, and processes behind each figure of memory."""

    model: Mapping[str, int] = field(default_factory=lambda: load_memory.Size().model)
    shard: str = "200MB"
    rounds: int = 11
    repeats: int = 3
    threads: int = field(default_factory=torch.get_num_threads)


def _load(folder: Path, **quantization: Any) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **quantization)
    return model


def _read(folder: Path) -> list[bytes]:
    """The bytes of all shards."""
    return [file.read_bytes() for file in sorted(folder.glob("*.safetensors"))]


def _step(root: Path, arm: str) -> Callable[[], Any]:
    return partial(_read if arm == "read_file" else _load, root / CHECKPOINTS[arm] / "model")


def write_all(root: Path, shape: Mapping[str, int], shard: str) -> None:
    """Writes ``float``, ``fused`` and ``packed``, each with ``model`` and ``warm_up``."""
    disable_progress_bar()
    for name, dims in (("model", shape), ("warm_up", _TINY)):
        load_memory.write(root / "float" / name, dims, shard)
        fused = _load(root / "float" / name)
        fused.save_pretrained(root / "fused" / name, save_original_format=False, max_shard_size=shard)
        packed = _load(root / "float" / name, quantization_config=QMoEConfig())
        packed.save_pretrained(root / "packed" / name, max_shard_size=shard)


def measure_times(root: Path, rounds: int, threads: int) -> dict[str, list[float]]:
    """Milliseconds by arm, round by round."""
    disable_progress_bar()
    torch.set_num_threads(threads)
    times: dict[str, list[float]] = {arm: [] for arm in CHECKPOINTS}
    kept: list[Any] = []

    def keep(step: Callable[[], Any]) -> None:
        kept.append(step())

    for turn in range(_WARM_UP_ROUNDS + rounds):
        for arm in CHECKPOINTS:
            elapsed = milliseconds(partial(keep, _step(root, arm)))
            kept.clear()
            if turn >= _WARM_UP_ROUNDS:
                times[arm].append(elapsed)
        gc.collect()
    return times


def measure_memory(root: Path, arm: str, threads: int) -> dict[str, int]:
    """Anonymous memory of one load above what was resident after a load of a tiny model."""
    disable_progress_bar()
    torch.set_num_threads(threads)
    if arm != "read_file":
        _load(root / CHECKPOINTS[arm] / "warm_up")
    settle()
    before = status_bytes("RssAnon")
    with PeakRss() as peak:
        loaded = _step(root, arm)()
    settle()
    after = max(0, status_bytes("RssAnon") - before)
    del loaded
    return {"peak_rss_anon": peak.anonymous, "rss_anon_after": after}


def all_digests(root: Path) -> dict[str, dict[str, Any]]:
    """Of each tensor that an arm reads, by arm and by the tensor's name in the file."""
    disable_progress_bar()
    return {arm: _digests(_step(root, arm)()) for arm in CHECKPOINTS}


def _digests(loaded: PreTrainedModel | list[bytes]) -> dict[str, str]:
    tensors: dict[str, Tensor] = {}
    if isinstance(loaded, PreTrainedModel):
        tensors |= loaded.state_dict()
    else:
        for file in loaded:
            tensors |= parse(file)
    return {name: _digest(tensor) for name, tensor in tensors.items()}


def _digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.detach().contiguous().flatten().view(torch.uint8).numpy()).hexdigest()


def verify(outputs: dict[str, dict[str, Any]]) -> None:
    """A packed load holds every tensor of the files, bit for bit, and both bf16 loads are of one model.

    Raises:
        OutputsDiffer: they are not.
    """
    require_equal(outputs["hf_qmoe"], outputs["read_file"], "hf_qmoe against the files")
    require_equal(outputs["bf16"], outputs["bf16_fused"], "bf16 against bf16_fused")


def run(size: Size) -> Result:
    """Writes the checkpoints, verifies what the arms read, then measures them.

    Raises:
        OutputsDiffer: the arms do not read the same.
    """
    config = {"model_type": "qwen3_moe", **size.model}
    with tempfile.TemporaryDirectory(prefix="hf_qmoe_bench_") as directory:
        root = Path(directory)
        fresh_process(write_all, root, size.model, size.shard)
        verify(fresh_process(all_digests, root))
        nbytes = sum(file.stat().st_size for file in (root / "packed" / "model").glob("*.safetensors"))
        times = fresh_process(measure_times, root, size.rounds, size.threads)
        rows = []
        for baseline in ("read_file", "bf16", "bf16_fused"):
            for arm in CHECKPOINTS if baseline == "read_file" else ("hf_qmoe",):
                row = time_row(arm, config, "load", times[arm], baseline, times[baseline])
                has_target = arm == "hf_qmoe" and baseline == "read_file"
                rows.append(replace(row, target=TARGETS["load"] if has_target else None))
        for arm in CHECKPOINTS:
            measured = [fresh_process(measure_memory, root, arm, size.threads) for _ in range(size.repeats)]
            for metric in measured[0]:
                value = max(m[metric] for m in measured)
                target = TARGETS.get(metric) if arm == "hf_qmoe" else None
                rows.append(
                    Row(arm, config, metric, "bytes", value, "packed_bytes", value / nbytes, target, size.repeats)
                )
    return Result(rows, {})


CASE = Case("prequantized_load", run, verified_in_run, {"full": Size(), "toy": Size(_TINY, rounds=2, repeats=1)})
