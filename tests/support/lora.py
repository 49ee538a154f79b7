"""Models with LoRA on packed experts, and their control: stock PEFT on the float model with the same weights."""

import copy
from collections.abc import Callable

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_qmoe import QMoEConfig, quantize_experts
from tests.support.models import tiny_model, token_ids


FORMS = ("nbit", "parametrize")
EXPERTS = ("experts.gate_up_proj", "experts.down_proj")
TARGETS = {"gate_up": list(EXPERTS[:1]), "down": list(EXPERTS[1:]), "both": list(EXPERTS)}


def lora_config(**changes: object) -> LoraConfig:
    """LoRA on the query projection and both projections of the experts."""
    fields: dict[str, object] = {"r": 3, "lora_alpha": 6, "target_modules": ["q_proj"]}
    fields["target_parameters"] = list(EXPERTS)
    return LoraConfig(**(fields | changes))


def packed_and_float(
    family: str, form: str = "nbit", dtype: torch.dtype = torch.float32, quant_type: str = "nf4", **changes: object
) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A model with packed experts and a float one with the values they stand for. Linears are float in both."""
    model = tiny_model(family, dtype=dtype, **changes)
    config = QMoEConfig(quantize_linears=False, experts_module=form, experts_quant_type=quant_type)
    packed = quantize_experts(model, config)
    return packed, copy.deepcopy(packed).dequantize()


def adapted_pair(
    family: str,
    form: str = "nbit",
    dtype: torch.dtype = torch.float32,
    config: Callable[[], LoraConfig] = lora_config,
    randomized: bool = True,
    **changes: object,
) -> tuple[PeftModel, PeftModel]:
    """The two of `packed_and_float`, each with the same adapter."""
    pair = []
    for model in packed_and_float(family, form, dtype, **changes):
        torch.manual_seed(0)
        pair.append(get_peft_model(model, config()))
    if randomized:
        for model in pair:
            randomize(model)
    return pair[0], pair[1]


def lora_tensors(model: nn.Module, adapter: str = "") -> dict[str, nn.Parameter]:
    """All LoRA parameters of `model` by name."""
    wanted = f".{adapter}." if adapter else "."
    return {n: p for n, p in model.named_parameters() if "lora_" in n and wanted in n}


def expert_lora_tensors(model: nn.Module) -> dict[str, nn.Parameter]:
    """Those of experts."""
    return {n: p for n, p in lora_tensors(model).items() if ".experts." in n}


def randomize(model: nn.Module, seed: int = 0, std: float = 0.1) -> None:
    """Fills all LoRA tensors with reproducible numbers, so that every one matters."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in lora_tensors(model).values():
            parameter.copy_(std * torch.randn(parameter.shape, generator=generator))


def logits(model: nn.Module) -> Tensor:
    """Logits on fixed tokens."""
    with torch.no_grad():
        return model(input_ids=token_ids(), use_cache=False).logits


def loss_and_gradients(model: nn.Module, seed: int = 0) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss on seeded tokens, and the gradient of every LoRA tensor."""
    ids = token_ids(seed=seed)
    model.zero_grad()
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    return loss.detach(), {n: p.grad.clone() for n, p in lora_tensors(model).items()}


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """``|actual - expected| / |expected|`` in float64."""
    return ((actual.double() - expected.double()).norm() / expected.double().norm()).item()
