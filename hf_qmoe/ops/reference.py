"""Executable specification: one expert at a time, in the simplest torch that says what is meant.

Nothing in the package calls this file. Tests compare every faster path with it, and a reader who wants to know what
a packed experts layer computes finds it here in twenty lines.
"""

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import linear

from hf_qmoe.ops.formats import codebook, get_format


def dequantize(packed: Tensor, absmax: Tensor | None, quant_type: str, blocksize: int) -> Tensor:
    """Unpacks one matrix to float32 by looking up each code and scaling its block.

    Args:
        packed: uint8 ``[N, K * bits / 8]``; of two 4-bit codes in a byte, the high one comes first.
        absmax: fp32, one per block of the flattened matrix, or `None` for bf16 and fp16.
    """
    fmt = get_format(quant_type)
    if fmt.passthrough is not None:
        return packed.view(fmt.passthrough).float()
    assert absmax is not None
    codes = torch.stack((packed >> 4, packed & 0xF), dim=-1).flatten(-2) if fmt.bits == 4 else packed
    values = codebook(quant_type, packed.device)[codes.long()]
    return (values.view(-1, blocksize) * absmax.view(-1, 1)).view(codes.shape)


def grouped_linear(x: Tensor, weights: Tensor, expert_offsets: Tensor) -> Tensor:
    """``y[s] = x[s] @ weights[e].T`` where rows ``expert_offsets[e]:expert_offsets[e + 1]`` belong to expert ``e``.

    Args:
        x: ``[S, K]`` sorted by expert.
        weights: ``[E, N, K]``.
        expert_offsets: int64 ``[E + 1]``; rows past the last offset belong to no expert and give zeros.
    """
    y = x.new_zeros(x.shape[0], weights.shape[1])
    bounds = expert_offsets.tolist()
    for expert, (start, end) in enumerate(pairwise(bounds)):
        y[start:end] = linear(x[start:end], weights[expert])
    return y


def experts_forward(
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    up_weights: Tensor,
    down_weights: Tensor,
    gate: Callable[[Tensor], Tensor],
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    post_expert_norm: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """A whole experts layer, token by token, on float weights.

    Args:
        hidden_states: ``[T, H]``.
        top_k_index, top_k_weights: ``[T, k]``; an index of ``E`` or more names no expert and adds nothing.
        up_weights: ``[E, 2I, H]`` (``[E, I, H]`` without a gate); down_weights: ``[E, H, I]``.
        gate: maps ``[2I]`` (or ``[I]``) to ``[I]``.
    """
    rows = []
    for token, experts, weights in zip(hidden_states, top_k_index, top_k_weights, strict=True):
        total = torch.zeros_like(token)
        for expert, weight in zip(experts.tolist(), weights, strict=True):
            if expert >= up_weights.shape[0]:
                continue
            up = linear(token, up_weights[expert], None if up_bias is None else up_bias[expert])
            down = linear(gate(up), down_weights[expert], None if down_bias is None else down_bias[expert])
            total = total + weight * (down if post_expert_norm is None else post_expert_norm(down))
        rows.append(total)
    return torch.stack(rows) if rows else torch.zeros_like(hidden_states)
