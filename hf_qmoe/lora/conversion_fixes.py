"""What PEFT's conversion of targets from transformers v4 to v5 gets wrong, put right for packed models.

v4 had linears where v5 has fused experts, so PEFT turns ``gate_proj``, ``up_proj`` into a stack of twice the rank. It
does the same to linears that still exist (huggingface/peft#3711), doubles alpha where rslora wants its square root,
and leaves patterns for the old names behind, which then match nothing.
"""

import re
from collections.abc import Iterable

from peft import LoraConfig
from torch import nn

from hf_qmoe.lora.targets import renamed_by_peft


def keep_linears(config: LoraConfig, model: nn.Module) -> None:
    """Moves qualified names of linears that PEFT would take for routed experts to ``target_parameters``.

    As ``<name>.weight`` they hit the linears and nothing else, and the adapter's tensors have the same names.
    """
    if not isinstance(config.target_modules, list | tuple | set):
        return
    linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    qualified = [t for t in config.target_modules if "." in t and _hits(t, linears)]
    misread = renamed_by_peft(model, qualified)
    if misread:
        config.target_modules = {target for target in config.target_modules if target not in misread}
        config.target_parameters = [*(config.target_parameters or []), *(f"{name}.weight" for name in misread)]


def _hits(target: str, names: list[str]) -> bool:
    return any(name == target or name.endswith(f".{target}") for name in names)


def rescale(config: LoraConfig, before: dict[str, float]) -> None:
    """Gives fused stacks the scaling that their parts had, under rslora: ``2 r`` takes ``alpha * sqrt(2)``.

    Args:
        config: converted.
        before: its ``alpha_pattern`` before that.
    """
    for pattern, alpha in (config.alpha_pattern or {}).items():
        parts = config.rank_pattern.get(pattern, 0) / config.r
        if config.use_rslora and pattern not in before and parts == alpha / config.lora_alpha == 2:
            config.alpha_pattern[pattern] = config.lora_alpha * parts**0.5


def unmatched_patterns(config: LoraConfig, names: Iterable[str]) -> list[str]:
    """Keys of ``rank_pattern`` and ``alpha_pattern`` that match none of the adapted `names`."""
    return unmatched({*(config.rank_pattern or {}), *(config.alpha_pattern or {})}, list(names))


def unmatched(patterns: Iterable[str], names: list[str]) -> list[str]:
    """Those of `patterns` that match none of `names`, as PEFT matches keys of ``rank_pattern``."""
    return sorted(p for p in patterns if not any(re.match(rf"(.*\.)?({p})$", name) for name in names))


def misread_patterns(config: LoraConfig, names: Iterable[str], was_converted: bool) -> str | None:
    """What is wrong with patterns for names that targets had before they were converted; `None` if nothing is."""
    unmatched = unmatched_patterns(config, names) if was_converted else []
    if not unmatched:
        return None
    return (
        f"rank_pattern or alpha_pattern has keys {unmatched} that match nothing adapted, while target_modules named "
        "projections of experts, which are fused: their rank or scaling would be another than meant. Name the stacks "
        r"instead, such as '.*\.gate_up_proj' (with twice the rank and alpha) and '.*\.down_proj', or leave them out"
    )
