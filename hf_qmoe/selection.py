"""Which modules a config packs, replaces or leaves alone. No arithmetic, no weights."""

import re
from collections.abc import Container, Iterable

from torch import nn
from transformers import PreTrainedModel
from transformers.quantizers.base import get_keys_to_not_convert

from hf_qmoe.config import QMoEConfig
from hf_qmoe.experts import ExpertsNbit
from hf_qmoe.layout import can_pack, float_stack_shapes, follows_experts_interface
from hf_qmoe.logging import get_logger
from hf_qmoe.naming import first_match
from hf_qmoe.source_code import weight_is_read
from hf_qmoe.structure import LARGE, ROUTER, expert_counts, expert_lists, leftovers, looks_like_experts


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
            it says that it has experts but none was found, or an override matches nothing.
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
    refuse_nothing(model, config)
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


def left_alone(
    model: PreTrainedModel, config: QMoEConfig, chosen: Iterable[str], skipped_linears: Iterable[str]
) -> set[str]:
    """Names of the routed experts that a load would leave in full precision.

    Args:
        chosen: names of the experts modules that are packed.
        skipped_linears: names of the linears that are not quantized.
    """
    linears = {name for name, module in model.named_modules() if type(module) is nn.Linear}
    quantized = linears.difference(skipped_linears) if config.quantize_linears else set()
    return {found.name for found in leftovers(model)}.difference(chosen, quantized)


def refuse_leftovers(model: PreTrainedModel, config: QMoEConfig, names: Container[str]) -> None:
    """Raises where routed experts would stay in full precision in silence.

    Args:
        names: those of `left_alone`.

    Raises:
        ValueError: names the modules, their bytes, and the setting that would allow it.
    """
    warned_of = experts_modules(model, config.experts_module)  # no block size fits them, if they are not left out
    left = [
        found
        for found in leftovers(model)
        if found.name in names
        and found.name not in warned_of
        and first_match(found.name, config.skip_patterns) is None
    ]
    total = sum(p.nbytes for p in model.parameters())
    nbytes = sum(found.nbytes for found in left)
    if any(found.certain for found in left) or nbytes >= LARGE * total > 0:
        listed = ", ".join(f"{found.name} ({found.kind}, {found.nbytes:,} bytes)" for found in left[:8])
        raise ValueError(
            f"{type(model).__name__}: routed experts would stay in full precision, {nbytes / total:.0%} of its bytes: "
            f"{listed}{', ...' if len(left) > 8 else ''}. experts_module='auto' packs stacks of any layout, "
            "quantize_linears=True quantizes experts made of linears (but for those that the model keeps in float32 "
            f"or whose in_features is no multiple of {LINEAR_BLOCKSIZE}); to accept full precision, list the modules "
            "in `modules_to_not_convert`."
        )


def refuse_unplanned(model: PreTrainedModel, planned: Container[str]) -> None:
    """Raises `ValueError` if a loaded model has experts in full precision other than those `planned`."""
    left = [found for found in leftovers(model) if found.name not in planned]
    if left:
        listed = ", ".join(f"{found.name} ({found.kind}, {found.nbytes:,} bytes)" for found in left[:8])
        raise ValueError(
            f"{type(model).__name__}: routed experts are in full precision after loading, which nobody has asked for: "
            f"{listed}. This is a bug in hf_qmoe or in the model's loading code; please report it"
        )


def refuse_nothing(model: PreTrainedModel, config: QMoEConfig) -> None:
    """Raises `ValueError` if the model says that it has experts, and none is found in any form."""
    declared = expert_counts(model, shared=False)
    if declared and not any(True for _ in leftovers(model)):
        looked_at = sorted({type(m).__name__ for m in model.modules() if list(m.parameters(recurse=False))})
        raise ValueError(
            f"{type(model).__name__} declares experts ({declared}) but has no module that looks like them; nothing "
            f"would be packed. Modules with parameters looked at: {', '.join(looked_at)}. "
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
