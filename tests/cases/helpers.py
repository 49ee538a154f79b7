"""Names and readings that several cases share."""

import re

import bitsandbytes.functional as bnb_functional
import torch
from torch import Tensor, nn


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name; packed ones by the name that they have in the float model."""
    found = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    return {re.sub(r"\.parametrizations\.(\w+)\.original$", r".\1", name): t for name, t in found.items()}


def packed_bytes(weight: Tensor, blocksize: int = 64, quant_type: str = "nf4") -> Tensor:
    """bitsandbytes' bytes of each matrix of a stack ``[E, N, K]``, ``[E, N * K / 2]``."""
    quantized = [
        bnb_functional.quantize_4bit(matrix.contiguous(), blocksize=blocksize, quant_type=quant_type)[0]
        for matrix in weight.detach()
    ]
    return torch.stack([codes.view(-1) for codes in quantized])
