"""`LoraWeight`: a packed weight plus low-rank updates, which a product uses in factored form.

Code that was written for a float parameter reads one of these instead. Taking experts, transposing, casting and
slicing act on the base and the factors alike. A product ``x @ W`` computes ``x @ base`` and ``(x @ left) @ right``, so
the update is never multiplied out and nothing of the weight's size is saved for backward.

Any other operation, known to torch or not, sees an ordinary differentiable tensor. It is computed when the operation
runs, from the `LoraWeight` that autograd keeps; a dense gradient that reaches it goes on to the factors.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from hf_qmoe.lora_weight import products, views  # noqa: F401  # their handlers
from hf_qmoe.lora_weight.term import Term, dense, terms_of
from hf_qmoe.lora_weight.weight import LoraWeight, joined


__all__ = ["LoraWeight", "Term", "lora_weight", "terms_of"]


def lora_weight(base: Tensor, terms: Sequence[Term]) -> Tensor:
    """The weight ``base + sum of scaling * left @ right``, as a tensor that products use in factored form.

    Make one per forward pass and use it for all experts: parts of one share the unbinding of the factors.

    Args:
        base: ``[E, P, Q]`` or ``[P, Q]``, float, without gradient: a `LazyWeight` or an ordinary tensor.
        terms: factors ``[E, P, R]`` and ``[E, R, Q]``, or ``[P, R]`` and ``[R, Q]``.

    Returns:
        A `LoraWeight`; `base` itself if there are no terms; an ordinary tensor while torch.compile traces.

    Raises:
        ValueError: factors that do not fit `base`, or a `base` that requires a gradient.
    """
    if base.requires_grad:
        raise ValueError("the weight under LoRA requires a gradient; freeze it")
    for left, right, *_ in terms:
        expected = (*base.shape[:-1], left.shape[-1]), (*base.shape[:-2], left.shape[-1], base.shape[-1])
        if (tuple(left.shape), tuple(right.shape)) != expected:
            raise ValueError(f"factors {list(left.shape)} and {list(right.shape)} do not fit {list(base.shape)}")
    if torch.compiler.is_compiling() or not terms:
        return dense(base, terms)
    return joined(base, tuple(terms))
