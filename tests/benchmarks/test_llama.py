"""The GGUF file that llama.cpp decodes holds the checkpoint; llama.cpp itself is not needed here."""

from pathlib import Path

import torch
from gguf import GGUFReader, quants
from transformers import AutoModelForCausalLM

from benchmarks.convergence import toy_model
from benchmarks.llama import _halves, _interleaved, export
from benchmarks.verify import error


def test_export_holds_the_model(tmp_path: Path) -> None:
    """The returned values are those in the file, near those of the checkpoint, and no tensor is missing."""
    toy_model(tmp_path)
    exported = export(tmp_path / "moe-bf16", tmp_path / "moe.gguf")
    stored = {
        t.name: torch.tensor(quants.dequantize(t.data, t.tensor_type))
        for t in GGUFReader(tmp_path / "moe.gguf").tensors
    }
    parameters = dict(exported.named_parameters())
    assert sum(value.numel() for value in stored.values()) == sum(p.numel() for p in parameters.values())
    experts = parameters["model.layers.0.mlp.experts.gate_up_proj"]
    gate, up = (stored[f"blk.0.ffn_{name}_exps.weight"].view(4, 64, 64) for name in ("gate", "up"))
    assert torch.equal(torch.cat([gate, up], dim=1), experts)
    assert torch.equal(
        stored["blk.0.attn_q.weight"], _interleaved(parameters["model.layers.0.self_attn.q_proj.weight"], 2)
    )
    original = AutoModelForCausalLM.from_pretrained(tmp_path / "moe-bf16", dtype=torch.float32)
    assert 0.01 < error(experts, original.get_parameter("model.layers.0.mlp.experts.gate_up_proj")) < 0.15


def test_rows_of_a_head_are_interleaved() -> None:
    """Row i and row i + half of a head become neighbours, and back."""
    weight = torch.arange(8.0).view(8, 1).expand(8, 3).contiguous()
    assert _interleaved(weight, 2)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    assert torch.equal(_halves(_interleaved(weight, 2), 2), weight)
