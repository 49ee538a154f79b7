"""Checkpoints as other methods store them, written by arithmetic that calls none of the package's functions."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from bitsandbytes.functional import quantize_4bit
from safetensors.torch import save_file
from torch import Tensor

from tests.support.checkpoints import tensors_on_disk


#: Largest e4m3 value.
FP8_MAX = 448.0
#: Block of weights with one scale in the fp8 checkpoints here (those published have 128).
FP8_BLOCK = (32, 16)
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def write(source: Path, out: Path, tensors: dict[str, Tensor], config: dict[str, Any], shards: int = 1) -> Path:
    """Writes `tensors` beside the config of `source`, dealt out to `shards` files in turn."""
    out.mkdir(parents=True)
    for name in ("config.json", "generation_config.json"):
        if (source / name).exists():
            shutil.copy(source / name, out / name)
    values = json.loads((out / "config.json").read_text())
    values["quantization_config"] = config
    (out / "config.json").write_text(json.dumps(values))
    files: dict[str, dict[str, Tensor]] = {}
    for index, name in enumerate(sorted(tensors)):
        file = f"model-{index % shards + 1:05}-of-{shards:05}.safetensors"
        files.setdefault(file, {})[name] = tensors[name].contiguous()
    for file, held in files.items():
        save_file(held, out / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: file for file, held in files.items() for name in held}}
    (out / "model.safetensors.index.json").write_text(json.dumps(index))
    return out


def bitsandbytes_checkpoint(
    source: Path,
    out: Path,
    quant_type: str = "nf4",
    nested: bool = False,
    chosen: Callable[[str], bool] = lambda name: ".experts." in name,
    skip: list[str] | None = None,
    shards: int = 3,
    blocksize: int = 64,
) -> Path:
    """The float checkpoint `source` as transformers v4 and bitsandbytes saved it.

    Args:
        chosen: names of the weights that are quantized.
        skip: ``llm_int8_skip_modules``.
        shards: a weight and its statistics are in different ones.
    """
    tensors: dict[str, Tensor] = {}
    for name, value in tensors_on_disk(source).items():
        if not (name.endswith("weight") and value.ndim == 2 and chosen(name)):
            tensors[name] = value
            continue
        packed, state = quantize_4bit(value, blocksize=blocksize, quant_type=quant_type, compress_statistics=nested)
        tensors[name] = packed
        tensors |= {f"{name}.{key}": part for key, part in state.as_dict(packed=True).items()}
    config = {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "load_in_8bit": False,
        "bnb_4bit_quant_type": quant_type,
        "bnb_4bit_use_double_quant": nested,
        "bnb_4bit_compute_dtype": "bfloat16",
        "bnb_4bit_quant_storage": "uint8",
        "llm_int8_skip_modules": skip,
    }
    return write(source, out, tensors, config, shards)


def fp8_matrix(weight: Tensor, block: tuple[int, int] = FP8_BLOCK) -> tuple[Tensor, Tensor, Tensor]:
    """e4m3 values, scales and the dequantized matrix (fp32) of ``[N, K]``; the last blocks may be cut short."""
    rows, columns = weight.shape
    starts = range(0, rows, block[0]), range(0, columns, block[1])
    values, restored = torch.empty(weight.shape, dtype=torch.float8_e4m3fn), torch.empty(weight.shape)
    scales = torch.empty(len(starts[0]), len(starts[1]))
    for i, row in enumerate(starts[0]):
        for j, column in enumerate(starts[1]):
            part = slice(row, row + block[0]), slice(column, column + block[1])
            scales[i, j] = weight[part].float().abs().max().clamp(min=1e-8) / FP8_MAX
            values[part] = (weight[part].float() / scales[i, j]).to(torch.float8_e4m3fn)
            restored[part] = values[part].float() * scales[i, j]
    return values, scales, restored


def fp8_checkpoint(
    source: Path,
    out: Path,
    chosen: Callable[[str], bool] = lambda name: ".experts." in name or "_proj" in name,
    scale_name: str = "weight_scale_inv",
    block: tuple[int, int] = FP8_BLOCK,
) -> tuple[Path, dict[str, Tensor]]:
    """`source` in block-scaled fp8; returns also the weights that were quantized, dequantized again, fp32."""
    tensors: dict[str, Tensor] = {}
    restored: dict[str, Tensor] = {}
    for name, value in tensors_on_disk(source).items():
        if not (name.endswith("weight") and value.ndim == 2 and chosen(name)):
            tensors[name] = value
            continue
        tensors[name], scale, restored[name] = fp8_matrix(value, block)
        tensors[name.removesuffix("weight") + scale_name] = scale
    config = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": list(block)}
    return write(source, out, tensors, config, shards=2), restored


def mxfp4_checkpoint(source: Path, out: Path) -> tuple[Path, dict[str, Tensor]]:
    """gpt-oss with experts in mxfp4, random codes and scales; returns also the stacks ``[E, K, N]``, fp32."""
    generator = torch.Generator().manual_seed(0)
    tensors: dict[str, Tensor] = {}
    stacks: dict[str, Tensor] = {}
    table = torch.tensor([*_E2M1, *(-value for value in _E2M1)])
    for name, value in tensors_on_disk(source).items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            tensors[name] = value
            continue
        experts, columns, rows = value.shape
        blocks = torch.randint(0, 256, (experts, rows, columns // 32, 16), dtype=torch.uint8, generator=generator)
        scales = torch.randint(121, 125, (experts, rows, columns // 32), dtype=torch.uint8, generator=generator)
        tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = blocks, scales
        codes = torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(-2)  # low nibble first
        values = table[codes.long()] * (scales.float() - 127).exp2()[..., None]
        stacks[name] = values.flatten(-2).transpose(1, 2)
    return write(source, out, tensors, {"quant_method": "mxfp4"}, shards=2), stacks
