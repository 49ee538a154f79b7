"""Random adapters, and an independent reader of exported ones."""

import json
import re
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora.layer import LoraLayer
from safetensors.torch import load_file
from torch import Tensor, nn

from tests.support.models import NUM_EXPERTS


LINEARS = ["q_proj", "o_proj"]
STACKS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
RANKS = {"r": 4, "lora_alpha": 6}


def adapted(model: nn.Module, seed: int = 1, name: str = "default", **config: object) -> PeftModel:
    """`model` with a random adapter of attention and experts, or as `config` says."""
    targets = {"target_modules": LINEARS, "target_parameters": STACKS}
    peft_model = get_peft_model(model, LoraConfig(**(targets | RANKS | config)), adapter_name=name)
    return randomized(peft_model, seed)


def randomized(model: PeftModel, seed: int = 1) -> PeftModel:
    """Fills all factors with random numbers."""
    generator = torch.Generator().manual_seed(seed)
    for parameter_name, parameter in model.named_parameters():
        if "lora_" in parameter_name:
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model.eval()


class Reader:
    """A reader of the per-expert layout that knows the format's words and nothing of this package."""

    def __init__(self, path: Path) -> None:
        self.tensors = load_file(path / "adapter_model.safetensors")
        self.config = json.loads((path / "adapter_config.json").read_text())

    def _value(self, kind: str, module: str) -> float:
        found = {v for p, v in self.config[f"{kind}_pattern"].items() if re.match(rf"(.*\.)?({p})$", module)}
        assert len(found) <= 1, f"{module} has {found}"
        return next(iter(found), self.config["r" if kind == "rank" else "lora_alpha"])

    def delta(self, module: str) -> Tensor:
        """``[out, in]``; takes the tensors, so that those left over can be looked at."""
        of_A, of_B = (self.tensors.pop(f"base_model.model.{module}.lora_{f}.weight") for f in "AB")
        r = self._value("rank", module)
        assert (len(of_A), of_B.shape[1]) == (r, r)
        divisor = r**0.5 if self.config["use_rslora"] else r
        assert any(module == t or module.endswith(f".{t}") for t in self.config["target_modules"])
        return of_B.double() @ of_A.double() * (self._value("alpha", module) / divisor)


def live_deltas(model: PeftModel, adapter_name: str = "default") -> dict[str, Tensor]:
    """``[out, in]`` of each linear, ``[E, out, in]`` of each stack, written as loops over PEFT's layout."""
    deltas = {}
    for path, layer in model.get_base_model().named_modules():
        if not isinstance(layer, LoraLayer) or adapter_name not in layer.lora_A:
            continue
        of_A, of_B = (m[adapter_name].weight.detach().double() for m in (layer.lora_A, layer.lora_B))
        scaling = layer.scaling[adapter_name]
        if isinstance(layer.get_base_layer(), nn.Linear):
            deltas[path] = scaling * of_B @ of_A
            continue
        r, experts = layer.r[adapter_name], layer.num_experts
        delta = torch.zeros(experts, of_B.shape[0], of_A.shape[1], dtype=torch.float64)
        for e in range(experts):
            for k in range(r):
                delta[e] += scaling * torch.outer(of_B[:, k * experts + e], of_A[e * r + k])
        deltas[f"{path.replace('.base_layer', '')}.{layer.parameter_name}"] = delta
    return deltas


def reassembled(reader: Reader, path: str, names: list[str], interleaved: bool, experts: int = NUM_EXPERTS) -> Tensor:
    """``[E, out, in]`` of the stack whose experts are ``<path>.<e>.<name>``."""
    stack = []
    for e in range(experts):
        parts = [reader.delta(f"{path}.{e}.{name}") for name in names]
        if interleaved:
            rows = torch.empty(2 * len(parts[0]), parts[0].shape[1], dtype=torch.float64)
            rows[::2], rows[1::2] = parts
        else:
            rows = torch.cat(parts)
        stack.append(rows)
    return torch.stack(stack)


def check_files(path: Path, expected: dict[str, Tensor], family: str = "qwen3_moe") -> Reader:
    """Every update in `path` is the expected one, and nothing else is in it."""
    reader = Reader(path)
    for name, delta in expected.items():
        if delta.ndim == 2:
            torch.testing.assert_close(reader.delta(name), delta)
            continue
        module, _, stack = name.rpartition(".")
        names = {"gate_up_proj": ["gate_proj", "up_proj"]}.get(stack, [stack])
        if family == "mixtral":
            module = module.replace("mlp", "block_sparse_moe")
            names = {"gate_up_proj": ["w1", "w3"], "down_proj": ["w2"]}[stack]
        interleaved = family == "gpt_oss" and len(names) == 2
        torch.testing.assert_close(reassembled(reader, module, names, interleaved, len(delta)), delta)
    assert reader.tensors == {}
    return reader
