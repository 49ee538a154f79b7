"""Tiny models of many families with packed experts, each with its control: a float model made as ever, same values."""

import copy
from functools import cache
from zlib import crc32

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_qmoe import QMoEConfig, quantize_experts
from tests.lora.families import build
from tests.support.lora import lora_tensors


#: ``experts_module`` of a `QMoEConfig`: "auto" is nbit where experts follow transformers' interface, as not in llama4.
FAMILY_FORMS = ("auto", "parametrize")


def varied(model: PreTrainedModel) -> PreTrainedModel:
    """Fills a model with reproducible weights, so large that every part of it changes the logits."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2 or name.endswith(("bias", "sinks")):
                parameter.normal_(std=0.1, generator=generator)
    return model.eval()


@cache
def _family_pair(family: str, form: str) -> tuple[PreTrainedModel, PreTrainedModel]:
    packed = quantize_experts(varied(build(family)), QMoEConfig(quantize_linears=False, experts_module=form))
    plain = varied(build(family))  # has never been packed: its parameters lie in the order that they have in stock
    plain.load_state_dict(copy.deepcopy(packed).dequantize().state_dict())
    return packed, plain


def family_pair(family: str, form: str = "auto") -> tuple[PreTrainedModel, PreTrainedModel]:
    """A model of `tests.lora.families` with packed experts and float linears, and the float model it stands for."""
    packed, plain = _family_pair(family, form)
    return copy.deepcopy(packed), copy.deepcopy(plain)


def randomize_by_name(*models: nn.Module, std: float = 0.1) -> None:
    """Fills the LoRA tensors of `models` with numbers that depend on the tensor's name alone."""
    with torch.no_grad():
        for model in models:
            for name, parameter in lora_tensors(model).items():
                generator = torch.Generator().manual_seed(crc32(name.encode()))
                parameter.copy_(std * torch.randn(parameter.shape, generator=generator))
