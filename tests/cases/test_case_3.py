"""Case 3, all its clauses in one checkpoint, for each family whose experts were linears.

Clause by clause, other formats, broken checkpoints: tests/sources/test_bitsandbytes.py.
"""

import json
from pathlib import Path

import pytest
import torch
from bitsandbytes.nn import Linear4bit
from torch import Tensor
from transformers import AutoModelForCausalLM

from hf_qmoe import QMoEConfig
from tests.cases.helpers import tensors_of
from tests.lora.families import build
from tests.sources.checkpoints import bitsandbytes_checkpoint
from tests.sources.test_bitsandbytes import dequantized, reference_of
from tests.support.checkpoints import load, logits, tensors_on_disk
from tests.support.families import varied


#: Where experts lie, names of gate, up and down, the last layer with experts, and whether v4's router was a linear.
FAMILIES = {
    "qwen3_moe": ("mlp", ("gate_proj", "up_proj", "down_proj"), 1, True),
    "olmoe": ("mlp", ("gate_proj", "up_proj", "down_proj"), 1, True),
    "mixtral": ("block_sparse_moe", ("w1", "w3", "w2"), 1, True),
    "deepseek_v3": ("mlp", ("gate_proj", "up_proj", "down_proj"), 2, False),
}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Float checkpoints in the layout of v4."""
    root = tmp_path_factory.mktemp("float")
    for family in FAMILIES:
        varied(build(family)).to(torch.bfloat16).save_pretrained(root / family)
    return {family: root / family for family in FAMILIES}


@pytest.mark.parametrize("experts_module", ["nbit", "parametrize"])
@pytest.mark.parametrize("nested", [False, True], ids=["plain", "nested"])
@pytest.mark.parametrize("family", FAMILIES)
def test_all_clauses(family: str, nested: bool, experts_module: str, sources: dict[str, Path], tmp_path: Path) -> None:
    """Bytes, keys, logits and router of a v4 checkpoint whose last layer was skipped."""
    block, names, skipped, packs_router = FAMILIES[family]
    router = f"model.layers.{skipped - 1}.{block}.gate.weight"

    def chosen(name: str) -> bool:
        if f"layers.{skipped}." in name:
            return False
        return "_proj" in name or ".experts." in name or (packs_router and name == router)

    skip = ["lm_head", f"model.layers.{skipped}"]
    path = bitsandbytes_checkpoint(sources[family], tmp_path / "v4", nested=nested, chosen=chosen, skip=skip)
    tensors = tensors_on_disk(path)
    files = json.loads((path / "model.safetensors.index.json").read_text())["weight_map"]
    quantized = [n for n in files if f"{n}.absmax" in files]
    assert all(files[n] != files[f"{n}.absmax"] for n in quantized)
    assert (router in quantized) == packs_router
    assert not [n for n in quantized if f"layers.{skipped}." in n]

    model, info = load(path, QMoEConfig(experts_module=experts_module), dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    loaded = tensors_of(model)

    def stored(expert: int, projections: tuple[str, ...]) -> Tensor:
        prefix = f"model.layers.{skipped - 1}.{block}.experts.{expert}"
        return torch.cat([tensors[f"{prefix}.{projection}.weight"].view(-1) for projection in projections])

    for name, projections in {"gate_up_proj": names[:2], "down_proj": names[2:]}.items():
        stack = loaded[f"model.layers.{skipped - 1}.mlp.experts.{name}"]
        assert stack.dtype == torch.uint8
        assert all(torch.equal(codes.view(-1), stored(e, projections)) for e, codes in enumerate(stack))
        assert loaded[f"model.layers.{skipped}.mlp.experts.{name}"].is_floating_point()

    gate = loaded[router.replace(block, "mlp")]
    assert gate.dtype == torch.float32
    assert torch.equal(gate, dequantized(tensors, router) if packs_router else tensors[router].float())
    assert any(isinstance(module, Linear4bit) for module in model.model.layers[0].modules())
    assert not any(isinstance(module, Linear4bit) for module in model.model.layers[skipped].modules())
    reference = AutoModelForCausalLM.from_pretrained(
        reference_of(sources[family], tmp_path / "reference", path),
        dtype=torch.float32,
        experts_implementation="eager",
    )
    torch.testing.assert_close(logits(model), logits(reference), rtol=0, atol=2e-5)
