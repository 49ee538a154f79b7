"""Writes a packed checkpoint in the layout in which transformers v4 saved models quantized by bitsandbytes.

Packed bytes are kept as they are: nothing is dequantized or quantized again. Each tensor that is written is a range of
bytes of one that is read, so memory holds names and the scales of one expert, not weights.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from transformers.core_model_loading import dot_natural_key

from hf_qmoe.export.plan import Plan
from hf_qmoe.export.writer import file_names, in_shards, size_in_bytes, write_index, write_shard
from hf_qmoe.folders import INDEX, check_is_folder, check_out, copy_small_files, folder_when_done


LAYOUTS = ("bnb-per-expert",)


class ExportReport(NamedTuple):
    """What an export wrote.

    Attributes:
        expert_weights: matrices of single experts, packed and float.
        total_tensors: all tensors, statistics included.
        bytes_written: size of the weight files.
        notes: what a reader of the result may trip over, one sentence each.
        out: the folder.
    """

    expert_weights: int
    total_tensors: int
    bytes_written: int
    notes: tuple[str, ...]
    out: Path


def export_checkpoint(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    layout: str = "bnb-per-expert",
    *,
    overwrite: bool = False,
    max_shard_size: int | str = "5GB",
    on_shard: Callable[[int, int, str], None] | None = None,
) -> ExportReport:
    """Writes the packed checkpoint `source` to `out` in another layout.

    ``bnb-per-expert``: every expert's projection is a 4-bit weight of bitsandbytes under its original name
    (``experts.{i}.gate_proj.weight``, uint8 ``[N * K / 2, 1]``, and its statistics), as transformers v4 saved it and
    vLLM reads it. Linears and all other tensors keep their bytes. Double-quantized scales are kept if those of all
    projections can be, else written as the fp32 values they stand for. Experts in bf16 or fp16, and modules left
    unquantized, become float weights that the config lists in ``llm_int8_skip_modules``. Config, tokenizer and other
    small files are copied. `out` appears when all is written.

    Args:
        source: folder that ``save_pretrained`` of a model with a `QMoEConfig` has written, in one file or sharded.
        out: folder to make.
        layout: ``bnb-per-expert``.
        overwrite: replace `out` if it has content.
        max_shard_size: of one file, in bytes or as ``"5GB"``.
        on_shard: called before each file with its number (from 1), the number of files, and its name.

    Raises:
        CheckpointError: `source` is no packed checkpoint or is damaged; its experts are int8 or fp8, which
            bitsandbytes has no 4-bit form of; its family has no per-expert layout; a block runs across the rows of
            gate and up; `out` is taken.
        ValueError: an unknown layout, or `max_shard_size` is no size.
        OSError: reading or writing failed.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout is {layout!r}, expected {' or '.join(map(repr, LAYOUTS))}")
    max_bytes = size_in_bytes(max_shard_size)
    source, out = Path(source), Path(out).absolute()
    check_is_folder(source, "packed checkpoint")
    check_out(out, [source], overwrite)
    plan = Plan(source)
    shards = in_shards((plan.groups[name] for name in sorted(plan.groups, key=dot_natural_key)), max_bytes)
    names = file_names(len(shards))
    written = 0
    with folder_when_done(out) as folder:
        copy_small_files(source, folder, but={INDEX, "config.json"})
        (folder / "config.json").write_text(json.dumps(plan.config, indent=2) + "\n", encoding="utf-8")
        write_index(folder, names, shards)
        for number, (name, entries) in enumerate(zip(names, shards, strict=True), 1):
            if on_shard is not None:
                on_shard(number, len(names), name)
            written += write_shard(folder / name, entries)
    total = sum(map(len, shards))
    return ExportReport(plan.expert_weights, total, written, tuple(plan.notes), out)
