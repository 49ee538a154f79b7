"""Low-rank factors of a stack of experts, in PEFT's layout.

PEFT keeps the factors of all experts in two matrices, so that an adapter of a stack looks like one of a linear:
``lora_A [E * R, in]`` has the rows of expert 0 first (row ``e * R + r``), ``lora_B [out, R * E]`` the columns of rank
0 first (column ``r * E + e``). The update of expert e is ``scaling * B_e @ A_e``, ``[out, in]``.
"""

from typing import NamedTuple

from torch import Tensor, nn


class LoraFactors(NamedTuple):
    """One adapter's factors for one stack.

    ``lora_A`` ``[E * R, in]`` and ``lora_B`` ``[out, R * E]`` in PEFT's layout, ``scaling`` (``lora_alpha / r``), and
    ``dropout``, a module applied to the input of ``lora_A``; `None` does nothing.
    """

    lora_A: Tensor
    lora_B: Tensor
    scaling: float
    dropout: nn.Module | None = None


def split_lora_A(lora_A: Tensor, num_experts: int) -> Tensor:
    """``[E * R, in]`` as ``[E, R, in]``, a view."""
    return lora_A.view(num_experts, -1, lora_A.shape[-1])


def split_lora_B(lora_B: Tensor, num_experts: int) -> Tensor:
    """``[out, R * E]`` as ``[E, out, R]``, a view (not contiguous)."""
    return lora_B.view(lora_B.shape[0], -1, num_experts).permute(2, 0, 1)
