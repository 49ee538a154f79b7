"""`Term`: one low-rank update of a weight, and what a weight with updates is when it is multiplied out."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hf_qmoe.factors import LoraFactors, split_lora_A, split_lora_B


class Term(NamedTuple):
    """A low-rank update ``scaling * left @ right`` of a weight ``[..., P, Q]``.

    `left` ``[..., P, R]`` and `right` ``[..., R, Q]``, float and differentiable, may have another dtype than the
    weight; `dropout` is applied to what the update, not the base, is multiplied with, `None` does nothing.
    """

    left: Tensor
    right: Tensor
    scaling: float
    dropout: nn.Module | None = None

    def swapped(self) -> "Term":
        """The update of the transposed weight."""
        return self._replace(left=self.right.mT, right=self.left.mT)

    def detached(self) -> "Term":
        """The same values, as constants."""
        return self._replace(left=self.left.detach(), right=self.right.detach())

    def dropped(self, x: Tensor) -> Tensor:
        """`x` behind `dropout`."""
        return x if self.dropout is None else self.dropout(x)


def drops(dropout: nn.Module | None) -> bool:
    return dropout is not None and dropout.training and getattr(dropout, "p", 0) > 0


def refuse_dropout(where: str) -> RuntimeError:
    return RuntimeError(
        f"lora_dropout cannot be applied: forward uses the weight in {where}, not in a product with its input; set "
        "lora_dropout=0"
    )


def refuse_writing(where: str) -> RuntimeError:
    return RuntimeError(f"{where} would write to a packed weight with LoRA, which is a constant of the forward pass")


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    available = torch.amp.is_autocast_available(device.type)
    return torch.autocast(device.type, enabled=False) if available else nullcontext()


def dense(base: Tensor, terms: Sequence[Term]) -> Tensor:
    """The weight ``[..., P, Q]`` multiplied out, in the base's dtype, differentiable in the factors."""
    values, dtype = base, base.dtype
    with without_autocast(base.device):
        for term in terms:
            values = ((term.scaling * term.left).to(dtype) @ term.right.to(dtype)).add_(values)
    return values


class Join(torch.autograd.Function):
    """Makes a `LoraWeight` a function of its factors, for the operations that give a dense gradient of it."""

    @staticmethod
    def forward(ctx: Any, make: Callable[[], Tensor], terms: Sequence[Term], *factors: Tensor) -> Tensor:
        ctx.save_for_backward(*factors)
        ctx.constants = [
            (term.scaling, term.dropout) for term in terms
        ]  # tensors only where autograd's hooks see them
        return make()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        factors, grads = ctx.saved_tensors, []
        with without_autocast(grad.device):
            for (scaling, dropout), left, right in zip(ctx.constants, factors[::2], factors[1::2], strict=True):
                if drops(dropout):
                    raise refuse_dropout("an operation that asks for its dense gradient")
                grads.append((scaling * (grad @ right.to(grad.dtype).mT)).to(left.dtype))
                grads.append((scaling * (left.to(grad.dtype).mT @ grad)).to(right.dtype))
        return None, None, *grads


def terms_of(factors: LoraFactors, num_experts: int, ndim: int, swapped: bool) -> Term:
    """PEFT's factors as those of a parameter with `ndim` dimensions.

    Args:
        factors: ``lora_A`` ``[E * R, in]`` and ``lora_B`` ``[out, R * E]``.
        num_experts: E; 1 if `ndim` is 2.
        ndim: 3, or 2 for a parameter ``[out, in]``.
        swapped: a parameter with three dimensions is ``[E, out, in]``, not ``[E, in, out]``.

    Returns:
        `Term` with views of the factors, of the parameter's orientation.
    """
    term = Term(
        split_lora_B(factors.lora_B, num_experts),
        split_lora_A(factors.lora_A, num_experts),
        factors.scaling,
        factors.dropout,
    )
    if ndim == 2:
        return term._replace(left=factors.lora_B, right=factors.lora_A)
    return term if swapped else term.swapped()
