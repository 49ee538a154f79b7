"""Reading, editing and judging checkpoints, by arithmetic that calls none of the package's operators."""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import bitsandbytes.functional as bnb_functional
import torch
from bitsandbytes.nn import Linear4bit
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_qmoe import ExpertsNbit, QMoEConfig
from tests.support.models import NUM_EXPERTS, token_ids


#: Names on disk, per family: path of layer 0's experts, then gate, up and down projection of one expert.
_ON_DISK = {
    "qwen3_moe": ("mlp.experts", "gate_proj", "up_proj", "down_proj"),
    "olmoe": ("mlp.experts", "gate_proj", "up_proj", "down_proj"),
    "mixtral": ("block_sparse_moe.experts", "w1", "w3", "w2"),
}
BITS = {"nf4": 4, "fp4": 4, "int8": 8, "fp8": 8, "bf16": 16, "fp16": 16}


def load(path: Path, config: QMoEConfig | None = None, **kwargs: object) -> PreTrainedModel:
    """`from_pretrained`; float experts run transformers' own loop, which takes any shape."""
    kwargs.setdefault("experts_implementation", "eager")
    if config is not None:  # an explicit `None` would make transformers ignore the config that was saved
        kwargs["quantization_config"] = config
    return AutoModelForCausalLM.from_pretrained(path, **kwargs)


def logits(model: nn.Module) -> Tensor:
    """Logits of `model` on fixed tokens."""
    with torch.no_grad():
        return model(token_ids()).logits


def expert_key(family: str, layer: int, expert: int, projection: str) -> str:
    """Name on disk of one expert's ``gate``, ``up`` or ``down`` projection."""
    block, *names = _ON_DISK[family]
    name = dict(zip(("gate", "up", "down"), names, strict=True))[projection]
    return f"model.layers.{layer}.{block}.{expert}.{name}.weight"


def tensors_on_disk(path: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint, whatever its number of shards."""
    tensors: dict[str, Tensor] = {}
    for shard in sorted(path.glob("*.safetensors")):
        tensors |= load_file(shard)
    return tensors


def expert_matrices(path: Path, family: str, layer: int) -> dict[str, list[Tensor]]:
    """``[N, K]`` of each expert as the checkpoint holds them, gate and up rows concatenated, by fused name."""
    tensors = tensors_on_disk(path)
    if family == "gpt_oss" or f"model.layers.{layer}.mlp.experts.down_proj" in tensors:
        stacks = {n: tensors[f"model.layers.{layer}.mlp.experts.{n}"] for n in ("gate_up_proj", "down_proj")}
        return {n: [w.t() if family == "gpt_oss" else w for w in stack] for n, stack in stacks.items()}

    def weight(expert: int, projection: str) -> Tensor:
        return tensors[expert_key(family, layer, expert, projection)]

    return {
        "gate_up_proj": [torch.cat([weight(e, "gate"), weight(e, "up")]) for e in range(NUM_EXPERTS)],
        "down_proj": [weight(e, "down") for e in range(NUM_EXPERTS)],
    }


def edited(source: Path, target: Path, edit: Callable[[dict[str, Tensor]], object]) -> Path:
    """A copy of a one-file checkpoint whose tensors went through `edit`."""
    shutil.copytree(source, target)
    file = target / "model.safetensors"
    tensors = load_file(file)
    edit(tensors)
    save_file(tensors, file, metadata={"format": "pt"})
    return target


def with_config(source: Path, target: Path, **changes: object) -> Path:
    """A copy of a packed checkpoint with other fields in its ``quantization_config``."""
    shutil.copytree(source, target)
    file = target / "config.json"
    config = json.loads(file.read_text())
    config["quantization_config"] |= changes
    file.write_text(json.dumps(config))
    return target


def digest(path: Path) -> dict[str, str]:
    """SHA-256 of every file under `path`."""
    return {
        str(f.relative_to(path)): hashlib.sha256(f.read_bytes()).hexdigest()
        for f in sorted(path.rglob("*"))
        if f.is_file()
    }


def packed_modules(model: nn.Module) -> dict[str, ExpertsNbit]:
    """Packed experts modules by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, ExpertsNbit)}


def packed_state(model: nn.Module) -> dict[str, Tensor]:
    """Copies of every tensor of the packed experts and of bitsandbytes' linears, by full name."""
    kinds = (ExpertsNbit, Linear4bit)
    return {
        f"{path}.{name}": tensor.clone()
        for path, module in model.named_modules()
        if isinstance(module, kinds)
        for name, tensor in module.state_dict().items()
    }


def assert_same_tensors(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Same names, shapes, dtypes and bits (bitsandbytes' bytes stored as bfloat16 may be NaN)."""
    assert actual.keys() == expected.keys()
    different = [
        name
        for name, tensor in expected.items()
        if actual[name].dtype != tensor.dtype
        or actual[name].shape != tensor.shape
        or not torch.equal(_bits(actual[name]), _bits(tensor))
    ]
    assert not different


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


def _codebook(quant_type: str) -> Tensor:
    if quant_type == "int8":
        return bnb_functional.create_dynamic_map()
    if quant_type == "fp8":
        return bnb_functional.create_fp8_map(True, 4, 3, 8)
    return bnb_functional.get_4bit_type(quant_type, device="cpu")


def reference_pack(weight: Tensor, quant_type: str, blocksize: int) -> tuple[Tensor, Tensor | None]:
    """Bytes ``[N, K * bits / 8]`` and fp32 scales of one matrix, by bitsandbytes' public functions."""
    rows = weight.shape[0]
    weight = weight.contiguous()
    if quant_type in ("bf16", "fp16"):
        dtype = torch.bfloat16 if quant_type == "bf16" else torch.float16
        return weight.to(dtype).view(torch.uint8), None
    if BITS[quant_type] == 4:
        packed, state = bnb_functional.quantize_4bit(weight, blocksize=blocksize, quant_type=quant_type)
    else:
        packed, state = bnb_functional.quantize_blockwise(weight, code=_codebook(quant_type), blocksize=blocksize)
    return packed.view(rows, -1), state.absmax.view(-1)


def reference_unpack(packed: Tensor, absmax: Tensor | None, quant_type: str) -> Tensor:
    """The documented value of each code, codebook times scale of its block, in fp32 ``[N, K]``."""
    rows = packed.shape[0]
    if absmax is None:
        return packed.contiguous().view(torch.bfloat16 if quant_type == "bf16" else torch.float16).float()
    flat = packed.reshape(-1)
    codes = torch.stack([flat >> 4, flat & 15], dim=1) if BITS[quant_type] == 4 else flat
    values = _codebook(quant_type)[codes.reshape(-1).long()]
    return (values.view(absmax.numel(), -1) * absmax.reshape(-1, 1)).view(rows, -1)


def reference_scales(module: ExpertsNbit, name: str, expert: int) -> Tensor | None:
    """fp32 scales of one expert, decompressed by hand if they are double-quantized."""
    stack = module.stack(name)
    if stack.absmax is None:
        return None
    scales = stack.absmax[expert].reshape(-1)
    if stack.nested_absmax is None:
        return scales
    values = _codebook("int8")[scales.long()]
    blocks = stack.nested_absmax[expert].repeat_interleave(256)[: values.numel()]
    return values * blocks + stack.nested_offset[expert]


def unpacked_stack(module: ExpertsNbit, name: str) -> Tensor:
    """The stack that packed bytes stand for by ``docs/format.md``, fp32, in the model's own layout."""
    stack = module.stack(name)
    experts = [
        reference_unpack(stack.packed[e], reference_scales(module, name, e), stack.quant_type)
        for e in range(stack.num_experts)
    ]
    weights = torch.stack(experts)
    return weights.transpose(1, 2).contiguous() if module.is_transposed else weights


def float_twin(model: PreTrainedModel, checkpoint: Path) -> PreTrainedModel:
    """The float model of `checkpoint` in fp32, with the weights that `model`'s packed bytes stand for put in."""
    twin = load(checkpoint, dtype=torch.float32)
    for path, module in model.named_modules():
        if isinstance(module, ExpertsNbit):
            for name in module.stack_names:
                getattr(twin.get_submodule(path), name).data = unpacked_stack(module, name)
        elif isinstance(module, Linear4bit):
            weight = bnb_functional.dequantize_4bit(module.weight.data, module.weight.quant_state)
            twin.get_submodule(path).weight.data = weight.float()
    return twin
