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
from hf_qmoe.structure import ROUTER, expert_counts, expert_lists, looks_like_experts


logger = get_logger(__name__)

#: Block size of bitsandbytes' linears.
LINEAR_BLOCKSIZE = 64


def experts_modules(model: nn.Module, form: str = "nbit") -> dict[str, nn.Module]:
    """Float experts modules that can be packed, by name.

    Args:
        form: ``nbit``: those that follow transformers' experts interface. ``auto`` and ``parametrize``: also others
            that look like experts (`hf_qmoe.structure.looks_like_experts`).
    """
    counts = set(expert_counts(model).values())
    return {
        name: module
        for name, module in model.named_modules()
        if not isinstance(module, ExpertsNbit)
        and (follows_experts_interface(module) or (form != "nbit" and looks_like_experts(name, module, counts)))
    }


def is_parametrized_form(module: nn.Module, config: QMoEConfig) -> bool:
    """Whether `config` wants `module` parametrized rather than as `ExpertsNbit`."""
    if config.experts_module == "auto":
        return not follows_experts_interface(module)
    return config.experts_module == "parametrize"


def experts_to_pack(model: PreTrainedModel, config: QMoEConfig) -> dict[str, str]:
    """Quant type of each experts module that `config` packs, by module name.

    Raises:
        ValueError: the model has experts that cannot be packed and were not left out by ``modules_to_not_convert``,
            or an override matches nothing.
    """
    found = experts_modules(model, config.experts_module)
    overrides = config.experts_overrides or {}
    _check_overrides(overrides, found)
    chosen: dict[str, str] = {}
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
    if not found and not config.quantize_linears and not any(True for _ in expert_lists(model)):
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


def _linear_routers(model: PreTrainedModel) -> list[str]:
    """Linears that score experts, or gate them: all those of a router beside the experts, and others there with one
    output for each expert (or a single one).
    """
    counts = set(expert_counts(model).values())
    experts = {path: len(listed) for path, listed in expert_lists(model)}
    for path, module in model.named_modules():
        found = follows_experts_interface(module) or looks_like_experts(path, module, counts)
        if found or isinstance(module, ExpertsNbit):
            num_experts = getattr(module, "num_experts", None) or getattr(module, "moe_num_experts", None)
            if num_experts:
                experts[path] = num_experts
    routers = []
    for path, num_experts in experts.items():
        block_path = path.rpartition(".")[0]
        while "expert" in block_path.rpartition(".")[2]:  # DBRX holds its stacks one level further down
            block_path = block_path.rpartition(".")[0]
        for name, module in model.get_submodule(block_path).named_modules():
            owner = name.rpartition(".")[0]
            is_beside = not owner or re.search("gate|router", owner) is not None
            scores = is_beside and getattr(module, "out_features", 0) in (1, num_experts)
            if isinstance(module, nn.Linear) and (scores or ROUTER.search(owner)):
                routers.append(f"{block_path}.{name}" if block_path else name)
    return routers


def warn_unused_patterns(model: nn.Module, config: QMoEConfig) -> None:
    """Warns of skip patterns that match no module: most often a misspelt name."""
    names = [name for name, _ in model.named_modules()]
    for pattern in config.skip_patterns:
        if not any(first_match(name, [pattern]) for name in names):
            logger.warning(f"skip pattern {pattern!r} matches no module of {type(model).__name__}")
