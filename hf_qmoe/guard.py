"""Nothing that looks like routed experts stays in full precision unless the user asked for it.

Looked at before anything is changed, and again when a model is loaded.
"""

from collections.abc import Container, Iterable

from torch import nn
from transformers import PreTrainedModel

from hf_qmoe.config import QMoEConfig
from hf_qmoe.naming import first_match
from hf_qmoe.selection import LINEAR_BLOCKSIZE, experts_modules
from hf_qmoe.structure import LARGE, Leftover, expert_counts, leftovers


def refuse_leftovers(
    model: PreTrainedModel, config: QMoEConfig, chosen: Iterable[str], skipped_linears: Iterable[str]
) -> set[str]:
    """Raises where routed experts would stay in full precision in silence.

    Args:
        chosen: names of the experts modules that are packed.
        skipped_linears: names of the linears that are not quantized.

    Returns:
        names of the routed experts that are left in full precision, as asked for or with a warning.

    Raises:
        ValueError: names the modules, their bytes, and the setting that would allow it; or the model says that it has
            experts, and none is found in any form.
    """
    experts = list(leftovers(model))
    _refuse_nothing(model, experts)
    linears = {name for name, module in model.named_modules() if type(module) is nn.Linear}
    quantized = linears.difference(skipped_linears) if config.quantize_linears else set()
    floats = {found.name for found in experts}.difference(chosen, quantized)
    warned_of = experts_modules(model, config.experts_module)  # no block size fits them, if they are not left out
    unwarned = floats.difference(warned_of)
    left = [
        found for found in experts if found.name in unwarned and first_match(found.name, config.skip_patterns) is None
    ]
    total = sum(p.nbytes for p in model.parameters())
    nbytes = sum(found.nbytes for found in left)
    if any(found.certain for found in left) or nbytes >= LARGE * total > 0:
        raise ValueError(
            f"{type(model).__name__}: routed experts would stay in full precision, {nbytes / total:.0%} of its bytes: "
            f"{_listed(left)}. experts_module='auto' packs stacks of any layout, "
            "quantize_linears=True quantizes experts made of linears (but for those that the model keeps in float32 "
            f"or whose in_features is no multiple of {LINEAR_BLOCKSIZE}); to accept full precision, list the modules "
            "in `modules_to_not_convert`."
        )
    return floats


def refuse_unplanned(model: PreTrainedModel, planned: Container[str]) -> None:
    """Raises `ValueError` if a loaded model has experts in full precision other than those `planned`."""
    left = [found for found in leftovers(model) if found.name not in planned]
    if left:
        raise ValueError(
            f"{type(model).__name__}: routed experts are in full precision after loading, which nobody has asked for: "
            f"{_listed(left)}. This is a bug in hf_qmoe or in the model's loading code; please report it"
        )


def _refuse_nothing(model: PreTrainedModel, experts: list[Leftover]) -> None:
    declared = expert_counts(model, shared=False)
    if declared and not experts:
        looked_at = sorted({type(m).__name__ for m in model.modules() if list(m.parameters(recurse=False))})
        raise ValueError(
            f"{type(model).__name__} declares experts ({declared}) but has no module that looks like them; nothing "
            f"would be packed. Modules with parameters looked at: {', '.join(looked_at)}. "
            "If all its layers are dense on purpose, load it with transformers' BitsAndBytesConfig"
        )


def _listed(left: list[Leftover]) -> str:
    shown = ", ".join(f"{found.name} ({found.kind}, {found.nbytes:,} bytes)" for found in left[:8])
    return shown + (", ..." if len(left) > 8 else "")
