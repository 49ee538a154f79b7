"""What is checked of one experts class, on the smallest model that holds it."""

import re
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from hf_qmoe import QMoEConfig
from tests.support.checkpoints import assert_same_tensors, tensors_on_disk
from tests.support.families import randomize_by_name
from tests.support.lora import lora_tensors
from tests.sweep.oracle import expected_names, follows_interface, holds_class, packed_names, reference, stock_peft
from tests.sweep.overrides import LEFT_FLOAT, NO_LORA, REFUSED
from tests.sweep.registry import Found
from tests.sweep.tiny import build, find_models, inputs, nested_model


FORWARD, BACKWARD = 1e-5, 1e-4  # largest difference, relative to the largest value of the reference
#: What transformers calls when the model has no weights yet.
_BEFORE_LOADING = "_process_model_before_weight_loading"


@dataclass(frozen=True)
class Record:
    """One row of the table."""

    name: str
    model_type: str = ""
    model_class: str = ""
    level: str = ""
    on_disk: str = ""
    form: str = ""
    lora: str = "yes"
    result: str = "passes"


def assert_near(actual: Tensor, expected: Tensor, tolerance: float, what: str) -> None:
    """Fails unless the largest difference is within `tolerance` of the largest value expected."""
    assert actual.shape == expected.shape, f"{what}: shape {tuple(actual.shape)}, not {tuple(expected.shape)}"
    scale = expected.abs().max().item()
    assert scale > 0, f"{what}: nothing to compare"
    error = (actual - expected).abs().max().item() / scale
    assert error <= tolerance, f"{what}: differs by {error:.1e} of its largest value"


def output_of(result: Any) -> Tensor:
    """The tensor that a forward is about."""
    for name in ("logits", "last_hidden_state"):
        if getattr(result, name, None) is not None:
            return getattr(result, name)
    return result[0]


def level_of(model: PreTrainedModel) -> str:
    """``model`` where the whole of it has a forward, else ``layer``."""
    return "layer" if type(model).forward is nn.Module.forward else "model"


def _run_layers(model: nn.Module) -> tuple[Tensor, list[Tensor]]:
    """Every experts module on random tokens, each routed to two experts."""
    outputs, leaves = [], []
    for path, module in model.named_modules():
        if not follows_interface(module):
            continue
        outermost = model.get_submodule(re.sub(r"(\.base_layer)+$", "", path))  # of what PEFT has wrapped around it
        generator = torch.Generator().manual_seed(len(leaves))
        leaves.append(torch.randn(16, 64, generator=generator).requires_grad_())
        index = torch.rand(16, module.num_experts, generator=generator).argsort(dim=-1)[:, :2]
        outputs.append(outermost(leaves[-1], index, torch.rand(16, 2, generator=generator)))
    return torch.stack(outputs), leaves


def _run(model: nn.Module, base: PreTrainedModel) -> tuple[Tensor, list[Tensor]]:
    """Output, and leaf tensors that stand for the input: given embeddings, or what is looked up for the ids."""
    if level_of(base) == "layer":
        return _run_layers(base)
    arguments = inputs(base)
    if "inputs_embeds" in arguments:
        leaf = arguments["inputs_embeds"].requires_grad_()
        return output_of(model(**arguments)), [leaf]
    leaves: list[Tensor] = []

    def watch(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        leaves.append(output.detach().requires_grad_())
        return leaves[-1]

    weight = base.get_input_embeddings().weight  # an encoder and a decoder look the same one up
    embeddings = [m for m in base.modules() if isinstance(m, nn.Embedding) and m.weight is weight]
    handles = [embedding.register_forward_hook(watch) for embedding in embeddings]
    try:
        return output_of(model(**arguments)), leaves
    finally:
        for handle in handles:
            handle.remove()


def results(model: nn.Module, base: PreTrainedModel) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Output; gradients of a seeded linear functional of it for the input and all LoRA tensors."""
    model.zero_grad()
    torch.manual_seed(0)  # a diffusion model draws what it starts from
    output, leaves = _run(model, base)
    assert leaves, "no input embeddings were looked up"
    direction = torch.randn(output.shape, generator=torch.Generator().manual_seed(1))
    (output * direction).sum().backward()
    gradients = {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in lora_tensors(model).items()}
    return output.detach(), torch.cat([leaf.grad.flatten() for leaf in leaves]), gradients


def adapted(model: PreTrainedModel, targets: dict[str, str]) -> PeftModel:
    """The model with LoRA on its experts, every factor random."""
    linears = [name.removesuffix(".weight") for name, form in targets.items() if form == "Linear4bit"]
    stacks = [name for name, form in targets.items() if form != "Linear4bit"]
    torch.manual_seed(0)
    peft_model = get_peft_model(model, LoraConfig(r=2, target_modules=linears, target_parameters=stacks))
    randomize_by_name(peft_model)
    return peft_model.eval()


def load(cls: type[PreTrainedModel], path: Path, config: QMoEConfig | None = None) -> PreTrainedModel:
    """Loads a checkpoint whose every tensor is needed and used."""
    kwargs = {} if config is None else {"quantization_config": config}
    model, info = cls.from_pretrained(
        path, dtype=torch.float32, experts_implementation="eager", output_loading_info=True, **kwargs
    )
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        assert not info.get(kind), f"{kind}: {sorted(map(str, info[kind]))[:4]}"
    return model.eval()


def compare(exact: PreTrainedModel, packed: PreTrainedModel, targets: dict[str, str]) -> None:
    """Forward, gradient of the input and gradients of LoRA, against the float model with what nf4 keeps.

    Args:
        exact: the float model as it was before its weights were packed.
        targets: names of the packed weights to put LoRA on, and their forms.

    Raises:
        AssertionError: they differ, or the experts have no say in the output.
    """
    plain = reference(exact, packed)
    output, input_grad, _ = results(packed, packed)
    expected, expected_grad, _ = results(plain, plain)
    assert_near(output, expected, FORWARD, "output")
    assert_near(input_grad, expected_grad, BACKWARD, "gradient of the input")
    unquantized, _, _ = results(exact, exact)
    shift = (expected - unquantized).abs().max() / unquantized.abs().max()
    assert shift > 100 * FORWARD, f"experts hardly matter to the output ({shift:.1e})"

    if type(exact).__name__ in NO_LORA:
        with stock_peft(), pytest.raises(AttributeError, match=NO_LORA[type(exact).__name__]):
            results(adapted(plain, targets), plain)
        with pytest.raises(ValueError, match="reads it past anything that PEFT puts around"):
            adapted(packed, targets)
        return
    ours = results(adapted(packed, targets), packed)
    with stock_peft():
        theirs = results(adapted(plain, targets), plain)
    assert_near(ours[0], theirs[0], FORWARD, "output with LoRA")
    assert_near(ours[1], theirs[1], BACKWARD, "gradient of the input with LoRA")
    assert list(ours[2]) == list(theirs[2]), "LoRA tensors have other names than stock PEFT's"
    assert len(ours[2]) == 2 * len(targets), f"{len(ours[2])} LoRA tensors for {len(targets)} weights"
    silent = {name for name, gradient in theirs[2].items() if not gradient.any()}  # no token, or no use of the output
    assert 2 * len(silent) <= len(theirs[2]), f"no gradient in {sorted(silent)}"
    for name, gradient in ours[2].items():
        if name in silent:
            assert not gradient.any(), f"gradient of {name} is not zero"
        else:
            assert_near(gradient, theirs[2][name], BACKWARD, f"gradient of {name}")


def check_model(
    found: Found, cls: type[PreTrainedModel], config: PreTrainedConfig, experts_module: str = "auto"
) -> Record:
    """The whole check on one model that holds the class `found`.

    Args:
        experts_module: of the `QMoEConfig`.

    Raises:
        AssertionError: packed experts do something that the reference does not.
    """
    exact = build(cls, config)
    wanted = expected_names(exact, found.name)
    own = [name for name in wanted if holds_class(exact, name, found.name)]
    assert own, f"{found.name} holds no weights"
    left_float = LEFT_FLOAT.get(cls.__name__)
    are_linears = all(isinstance(exact.get_submodule(name.rpartition(".")[0]), nn.Linear) for name in own)
    quantization = QMoEConfig(quantize_linears=are_linears, experts_module=experts_module)
    row = Record(found.name, config.model_type or found.package, cls.__name__, level_of(exact))
    with tempfile.TemporaryDirectory() as folder:
        original, saved = Path(folder, "original"), Path(folder, "saved")
        exact.save_pretrained(original)
        per_expert = any(re.search(r"experts?[._]\d+\.", key) for key in tensors_on_disk(original))
        row = replace(row, on_disk="per expert" if per_expert else "fused")
        if cls.__name__ in REFUSED:
            with pytest.raises(ValueError, match=REFUSED[cls.__name__]) as refusal:
                load(cls, original, quantization)
            assert _BEFORE_LOADING in {entry.name for entry in refusal.traceback}, "refused too late"
            if not left_float:
                return replace(row, form="none", lora="no", result=f"refused: {refusal.value}")
            quantization.modules_to_not_convert = [left_float]
            row = replace(row, result=f"passes with `modules_to_not_convert=[{left_float!r}]`, else refused")
        packed = load(cls, original, quantization)
        forms = packed_names(packed)
        may_be_float = [name for name in wanted if left_float in name.split(".")]
        left = [name for name in wanted if name not in forms]
        assert left == may_be_float, f"not packed: {left}"
        packed.save_pretrained(saved)
        assert_same_tensors(load(cls, saved).state_dict(), packed.state_dict())
    compare(exact, packed, {n: form for n, form in forms.items() if form != "Linear4bit" or n in own})
    used = sorted({forms.get(name, "float") for name in own})
    return replace(row, form=", ".join(used), lora="no" if cls.__name__ in NO_LORA else "yes")


def check(found: Found, experts_module: str = "auto") -> list[Record]:
    """`check_model` on each model that holds the class, tried one after another."""
    return [check_model(found, cls, config, experts_module) for cls, config in find_models(found).items()]


def check_nested(outer: str, inner: str) -> list[Record]:
    """`check_model` on a multimodal model around another language model, both by model type."""
    return [check_model(*nested_model(outer, inner))]
