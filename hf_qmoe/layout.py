"""How a transformers experts module lays out its float weights, read from its flags and never from its shapes.

``2I == H`` and ``I == H`` exist, so a shape cannot tell a transposed stack from a plain one.
"""

import torch
from torch import Tensor, nn

from hf_qmoe.ops.formats import choose_blocksize, get_format


def stack_names(has_gate: bool) -> tuple[str, str]:
    """Names of the two stacks of an experts module, in transformers' spelling."""
    return ("gate_up_proj" if has_gate else "up_proj"), "down_proj"


def follows_experts_interface(module: nn.Module) -> bool:
    """Whether `module` has the attributes that transformers' ``use_experts_implementation`` sets.

    ``has_gate`` and ``is_transposed`` together match exactly the decorated classes, no false positive.
    """
    return all(hasattr(module, flag) for flag in ("has_gate", "is_transposed"))


def is_transposed(module: nn.Module) -> bool:
    """Whether the float stacks are ``[E, in, out]``. Those of a module without flags are packed as they lie."""
    return follows_experts_interface(module) and bool(module.is_transposed)


def float_stack_shapes(module: nn.Module) -> dict[str, tuple[int, int, int]]:
    """``(E, N, K)`` of each stack of a float experts module, by parameter name, whatever its layout.

    Of a module that does not follow the experts interface, these are its 3-D float parameters, as they lie; if it has
    none and says how many experts it has, its matrices of one shape with that many times the same rows (DBRX).

    Raises:
        ValueError: a stack is missing or is not a float ``[E, ., .]`` tensor.
    """
    shapes: dict[str, tuple[int, int, int]] = {}
    if not follows_experts_interface(module):
        floats = {n: tuple(p.shape) for n, p in module.named_parameters(recurse=False) if p.is_floating_point()}
        stacks = {n: shape for n, shape in floats.items() if len(shape) == 3 and min(shape[1:]) > 1}
        return stacks or _stacks_in_one_matrix(floats, getattr(module, "moe_num_experts", None))
    for name in stack_names(bool(module.has_gate)):
        weights = getattr(module, name, None)
        if not isinstance(weights, Tensor) or weights.ndim != 3 or not weights.is_floating_point():
            found = f"{weights.dtype} {tuple(weights.shape)}" if isinstance(weights, Tensor) else "nothing"
            raise ValueError(f"{type(module).__name__}.{name} should be a float stack [E, ., .], found {found}")
        experts, rows, columns = weights.shape
        shapes[name] = (experts, columns, rows) if module.is_transposed else (experts, rows, columns)
    return shapes


def _stacks_in_one_matrix(floats: dict[str, tuple[int, ...]], num_experts: object) -> dict[str, tuple[int, int, int]]:
    """``(E, N, K)`` of matrices ``[E * N, K]``, of which there are several of one shape."""
    if not isinstance(num_experts, int) or num_experts < 2:
        return {}
    fitting = {n: s for n, s in floats.items() if len(s) == 2 and s[0] % num_experts == 0 and s[0] > num_experts}
    return {
        name: (num_experts, rows // num_experts, columns)
        for name, (rows, columns) in fitting.items()
        if list(fitting.values()).count((rows, columns)) > 1
    }


def by_expert(weights: Tensor, num_experts: int) -> Tensor:
    """A float parameter as ``[E, ., .]``, whether it is stored so or as the rows of all experts in one matrix."""
    return weights if weights.ndim == 3 else weights.view(num_experts, -1, weights.shape[-1])


def check_values(module: nn.Module, quant_type: str, name: str = "") -> None:
    """Raises `ValueError` unless every weight of a float experts module is finite in `quant_type`.

    Args:
        name: of the module, for the message.
    """
    passthrough = get_format(quant_type).passthrough
    for parameter_name, (experts, *_) in float_stack_shapes(module).items():
        for expert, weight in enumerate(by_expert(getattr(module, parameter_name), experts)):
            values = weight if passthrough is None else weight.to(passthrough)
            if not torch.isfinite(values).all():
                where = f"{name or type(module).__name__}.{parameter_name}"
                raise ValueError(f"{where}: expert {expert} holds values that are not finite in {quant_type}")


def can_pack(module: nn.Module, quant_type: str, blocksize: int) -> bool:
    """Whether a supported block size divides both stacks of a float experts module.

    Raises:
        ValueError: an odd in_features for a 4-bit format, or a block size the format does not know.
    """
    chosen = [
        choose_blocksize(rows, columns, quant_type, blocksize)
        for _, rows, columns in float_stack_shapes(module).values()
    ]
    return all(c is not None for c in chosen)
