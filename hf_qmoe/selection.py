"""Which modules a config packs, replaces or leaves alone. No arithmetic, no weights."""

import re

from torch import nn
from transformers import PreTrainedModel
from transformers.quantizers.base import get_keys_to_not_convert

from hf_qmoe.config import QMoEConfig
from hf_qmoe.experts import ExpertsNbit
from hf_qmoe.layout import can_pack, float_stack_shapes, follows_experts_interface
from hf_qmoe.logging import get_logger
from hf_qmoe.naming import first_match
from hf_qmoe.source_code import weight_is_read


logger = get_logger(__name__)

#: Block size of bitsandbytes' linears.
LINEAR_BLOCKSIZE = 64

#: Config fields by which a model says that it has routed experts.
_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def experts_modules(model: nn.Module, form: str = "nbit") -> dict[str, nn.Module]:
    """Float experts modules that can be packed, by name.

    Args:
        form: ``nbit``: those that follow transformers' experts interface. ``auto`` and ``parametrize``: also others
            that are called experts and have 3-D float parameters.
    """
    return {
        name: module
        for name, module in model.named_modules()
        if not isinstance(module, ExpertsNbit)
        and (follows_experts_interface(module) or (form != "nbit" and _looks_like_experts(name, module)))
    }


def is_parametrized_form(module: nn.Module, config: QMoEConfig) -> bool:
    """Whether `config` wants `module` parametrized rather than as `ExpertsNbit`."""
    if config.experts_module == "auto":
        return not follows_experts_interface(module)
    return config.experts_module == "parametrize"


def _looks_like_experts(name: str, module: nn.Module) -> bool:
    has_stack = any(p.ndim == 3 and p.is_floating_point() for p in module.parameters(recurse=False))
    return has_stack and ("expert" in name.lower() or "expert" in type(module).__name__.lower())


def experts_to_pack(model: PreTrainedModel, config: QMoEConfig) -> dict[str, str]:
    """Quant type of each experts module that `config` packs, by module name.

    Raises:
        ValueError: the model has experts that cannot be packed and were not left out by ``modules_to_not_convert``,
            it says that it has experts but none was found, or an override matches nothing.
    """
    found = experts_modules(model, config.experts_module)
    overrides = config.experts_overrides or {}
    _check_overrides(overrides, found)
    chosen = {}
    for name, module in found.items():
        if first_match(name, config.skip_patterns) is not None:
            continue
        pattern = first_match(name, overrides)
        quant_type = config.experts_quant_type if pattern is None else overrides[pattern]
        try:
            packable = can_pack(module, quant_type, config.experts_blocksize)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        if packable:
            chosen[name] = quant_type
        else:
            logger.warning(
                f"{name} stays unquantized: no block size that {quant_type} supports divides its experts "
                f"{list(float_stack_shapes(module).values())}"
            )
    _refuse_leftovers(model, config, found)
    if not found and not config.quantize_linears:
        raise ValueError(
            f"{type(model).__name__} has no experts and quantize_linears=False: there is nothing to quantize"
        )
    return chosen


def _check_overrides(overrides: dict[str, str], found: dict[str, nn.Module]) -> None:
    for pattern in overrides:
        if not any(first_match(name, [pattern]) for name in found):
            raise ValueError(
                f"experts_overrides pattern {pattern!r} matches no experts module; the model has {sorted(found)}"
            )


def _refuse_leftovers(model: PreTrainedModel, config: QMoEConfig, found: dict[str, nn.Module]) -> None:
    """Raises where experts would silently stay in full precision."""
    others = [
        (name, type(module).__name__)
        for name, module in model.named_modules()
        if name not in found and not isinstance(module, ExpertsNbit) and _looks_like_experts(name, module)
        if first_match(name, config.skip_patterns) is None
    ]
    if others:
        listed = ", ".join(f"{name} ({cls})" for name, cls in others[:8])
        raise ValueError(
            f"{type(model).__name__} has {len(others)} experts modules that this version cannot pack, so they would "
            f"stay in full precision: {listed}{', ...' if len(others) > 8 else ''}. experts_module='auto' packs those "
            "with 3-D weights; to accept full precision, list them in `modules_to_not_convert`."
        )
    text_config = model.config.get_text_config()
    counts = {name: getattr(text_config, name, None) for name in _EXPERT_COUNTS}
    declared = {name: value for name, value in counts.items() if isinstance(value, int) and value > 1}
    if declared and not found and not any(_looks_like_experts(*item) for item in model.named_modules()):
        looked_at = sorted({type(m).__name__ for m in model.modules() if list(m.parameters(recurse=False))})
        raise ValueError(
            f"{type(model).__name__} declares experts ({declared}) but has no module that follows transformers' "
            f"experts interface; nothing would be packed. Modules with parameters looked at: {', '.join(looked_at)}. "
            "If all its layers are dense on purpose, load it with transformers' BitsAndBytesConfig"
        )


def linears_to_skip(model: PreTrainedModel, config: QMoEConfig) -> list[str]:
    """Full names of the linears that stay as they are.

    bitsandbytes' own default (output head, tied weights, modules kept in float32), or ``llm_int8_skip_modules`` in its
    place; what matches ``modules_to_not_convert``; routers; linears whose weight the model's code reads by itself, as
    fused kernels do; linears that bitsandbytes computes wrongly.
    """
    replaced_default = config.llm_int8_skip_modules
    default = get_keys_to_not_convert(model) if replaced_default is None else replaced_default
    default = [key.removesuffix(".bias") for key in default]  # of a head with a bias, the last parameter is the bias
    kept = [
        *default,
        *(model._keep_in_fp32_modules or []),
        *(getattr(model, "_keep_in_fp32_modules_strict", None) or []),
    ]
    patterns = [*kept, *(config.modules_to_not_convert or []), *map(re.escape, _linear_routers(model))]
    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    skipped = {
        name
        for name in linears
        if first_match(name, patterns) is not None
        or first_match(f"{name}.weight", patterns) is not None
        or weight_is_read(model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2])
    }
    # bitsandbytes' AVX512 kernel (0.50.2) takes wrong scales where blocks of 64 run on from row to row. Left out on
    # every device, so that a saved model means the same everywhere.
    uneven = [name for name in linears if name not in skipped and linears[name].in_features % LINEAR_BLOCKSIZE]
    if uneven and config.quantize_linears:
        logger.warning(
            f"{len(uneven)} linears stay unquantized, since their in_features is not a multiple of "
            f"{LINEAR_BLOCKSIZE}: {', '.join(uneven[:4])}{', ...' if len(uneven) > 4 else ''}"
        )
    return sorted(skipped.union(uneven))


def _linear_routers(model: nn.Module) -> list[str]:
    """Linears that score experts, or gate them: beside the experts, one output for each expert (or a single one)."""
    routers = []
    for path, experts in model.named_modules():
        num_experts = getattr(experts, "num_experts", None)
        is_experts = follows_experts_interface(experts) or _looks_like_experts(path, experts)
        if not (is_experts or isinstance(experts, ExpertsNbit)) or not num_experts:
            continue
        block_path = path.rpartition(".")[0]
        block = model.get_submodule(block_path)
        for name, module in block.named_modules():
            full_name = f"{block_path}.{name}" if block_path else name
            is_beside = "." not in name or re.search("gate|router", name.rpartition(".")[0]) is not None
            if isinstance(module, nn.Linear) and is_beside and module.out_features in (1, num_experts):
                routers.append(full_name)
    return routers


def warn_unused_patterns(model: nn.Module, config: QMoEConfig) -> None:
    """Warns of skip patterns that match no module: most often a misspelt name."""
    names = [name for name, _ in model.named_modules()]
    for pattern in config.skip_patterns:
        if not any(first_match(name, [pattern]) for name in names):
            logger.warning(f"skip pattern {pattern!r} matches no module of {type(model).__name__}")
