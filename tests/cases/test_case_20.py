"""Case 20 with all linears quantized, and the other families that PEFT converts.

qwen3_moe, olmoe and mixtral with float linears, updates expert by expert: tests/lora/test_v4_adapters.py; shared
experts by full name with `get_peft_model`: tests/lora/test_adapted_set.py.
"""

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from bitsandbytes.nn import Linear4bit
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_qmoe import QMoEConfig, quantize_experts
from tests.lora.families import build
from tests.support.families import varied
from tests.support.lora import logits, lora_tensors, relative_error
from tests.sweep.oracle import reference


RANK, ALPHA = 3, 12
PREFIX = "base_model.model."
PROJECTIONS = ("gate", "up", "down")
#: Families whose v4 adapters PEFT converts, and where v4 had a layer's experts.
FAMILIES = {"qwen3_moe": "mlp", "olmoe": "mlp", "mixtral": "block_sparse_moe", "deepseek_v3": "mlp", "afmoe": "mlp"}
FAMILIES["qwen3_next"] = "mlp"
FORMS = ("auto", "parametrize")


def pair(family: str, form: str) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A model with experts and linears in 4 bit, and the float model with bitsandbytes' values."""
    exact = varied(build(family))
    packed = quantize_experts(copy.deepcopy(exact), QMoEConfig(experts_module=form))
    assert any(isinstance(module, Linear4bit) for module in packed.modules())
    return packed, reference(exact, packed)


def v4_updates(family: str, plain: PreTrainedModel) -> dict[str, tuple[Tensor, Tensor]]:
    """Random factors of each routed expert's linears, by their v4 names."""
    generator = torch.Generator().manual_seed(3)
    names = {"gate": "w1", "up": "w3", "down": "w2"} if family == "mixtral" else {p: f"{p}_proj" for p in PROJECTIONS}
    factors = {}
    for path, module in plain.named_modules():
        if not path.endswith(".experts"):
            continue
        hidden, intermediate = module.down_proj.shape[1:]
        start = f"{path.removesuffix('mlp.experts')}{FAMILIES[family]}.experts"
        for expert in range(len(module.down_proj)):
            for projection, name in names.items():
                out, of = (hidden, intermediate) if projection == "down" else (intermediate, hidden)
                shapes = ((RANK, of), (out, RANK))
                factors[f"{start}.{expert}.{name}"] = tuple(
                    0.1 * torch.randn(shape, generator=generator) for shape in shapes
                )
    return factors


def save(path: Path, factors: dict[str, tuple[Tensor, Tensor]], targets: list[str]) -> None:
    """Writes an adapter as PEFT does."""
    config = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=targets, task_type="CAUSAL_LM", inference_mode=True)
    config.save_pretrained(path)
    tensors = {
        f"{PREFIX}{n}.lora_{x}.weight": t for n, pair in factors.items() for x, t in zip("AB", pair, strict=True)
    }
    save_file(tensors, path / "adapter_model.safetensors")


def delta(factors: tuple[Tensor, Tensor]) -> Tensor:
    """Update ``[out, in]`` of a linear."""
    return ALPHA / RANK * factors[1] @ factors[0]


def loaded(model: nn.Module, path: Path) -> PeftModel:
    """With the adapter in `path`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return PeftModel.from_pretrained(model, path)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", FAMILIES)
def test_v4_adapter(family: str, form: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """On the quantized model = stock PEFT on the float one = updates added expert by expert."""
    packed, plain = pair(family, form)
    base, factors, explicit = logits(plain), v4_updates(family, plain), copy.deepcopy(plain)
    names = ["w1", "w2", "w3"] if family == "mixtral" else [f"{p}_proj" for p in PROJECTIONS]
    save(tmp_path, factors, names)
    gate, up, down = ("w1", "w3", "w2") if family == "mixtral" else names
    for path, module in explicit.named_modules():
        if path.endswith(".experts"):
            start = f"{path.removesuffix('mlp.experts')}{FAMILIES[family]}.experts"
            for e in range(len(module.down_proj)):
                rows = [delta(factors[f"{start}.{e}.{name}"]) for name in (gate, up)]
                module.gate_up_proj.data[e] += torch.cat(rows)
                module.down_proj.data[e] += delta(factors[f"{start}.{e}.{down}"])
    expected = logits(explicit)
    assert relative_error(base, expected) > 1e-2  # the adapter matters
    ours = loaded(packed, tmp_path)
    assert relative_error(logits(ours), expected) < 1e-4
    mine = {name: tensor.detach().clone() for name, tensor in lora_tensors(ours).items()}
    request.getfixturevalue("stock_peft")
    stock = loaded(plain, tmp_path)
    assert relative_error(logits(stock), expected) < 1e-4
    theirs = lora_tensors(stock)
    assert list(mine) == list(theirs)
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def shared_linears(model: nn.Module) -> list[str]:
    """Full names of the linears of DeepSeek-V3's shared experts."""
    return [n for n, m in model.named_modules() if "shared_experts." in n and isinstance(m, nn.Linear)]


@pytest.mark.parametrize("form", FORMS)
def test_shared_experts_by_full_name_from_a_file(form: str, tmp_path: Path) -> None:
    """DeepSeek-V3, first layer dense: an adapter saved with those `target_modules` hits exactly those modules."""
    packed, plain = pair("deepseek_v3", form)
    names, generator = shared_linears(plain), torch.Generator().manual_seed(5)
    assert names == shared_linears(packed)
    assert len(names) == 6  # two layers of three
    factors: dict[str, tuple[Tensor, Tensor]] = {}
    for name in names:
        module = plain.get_submodule(name)
        shapes = ((RANK, module.in_features), (module.out_features, RANK))
        factors[name] = tuple(0.1 * torch.randn(shape, generator=generator) for shape in shapes)
    save(tmp_path, factors, names)
    base = logits(plain)
    ours = loaded(packed, tmp_path)
    hit = {n.removeprefix(PREFIX).partition(".lora_")[0] for n in lora_tensors(ours)}
    assert hit == set(names)
    for name in names:
        plain.get_submodule(name).weight.data += delta(factors[name])
    assert relative_error(base, logits(plain)) > 1e-3
    assert relative_error(logits(ours), logits(plain)) < 1e-5


@pytest.mark.parametrize("more", [{}, {"target_parameters": ["mlp.experts.down_proj"]}], ids=["alone", "with experts"])
@pytest.mark.parametrize("form", FORMS)
def test_shared_experts_by_full_name(form: str, more: dict[str, Any], tmp_path: Path) -> None:
    """`get_peft_model` with linears in 4 bit: exactly those modules, saved and loaded again; beside routed experts."""
    packed, plain = pair("deepseek_v3", form)
    again, names = copy.deepcopy(packed), shared_linears(plain)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ours = get_peft_model(packed, LoraConfig(r=RANK, target_modules=names, **more))
    hit = {n.removeprefix(PREFIX).partition(".lora_")[0] for n in lora_tensors(ours)}
    routed = {f"model.layers.{i}.mlp.experts" for i in (1, 2)} if more else set()
    assert hit == set(names) | routed
    with torch.no_grad():
        for tensor in lora_tensors(ours).values():
            tensor.normal_(std=0.1)
    ours.save_pretrained(tmp_path)
    assert relative_error(logits(loaded(again, tmp_path)), logits(ours)) < 1e-6
