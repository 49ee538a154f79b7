"""Which variants of our experts layer are measured, how one is chosen, and what each has to reach.

The one place to change when there is another way to compute.
"""

from collections.abc import Mapping
from dataclasses import replace

from torch import nn

from benchmarks.case import Row
from hf_qmoe import ExpertsNbit


DEFAULT = "hf_qmoe"

#: Arm name to `ExpertsNbit.exact`; `None` is what the package does by default: ``fused`` kernels, which unpack while
#: they multiply, where no gradient is asked for, and ``exact``, the bits of dequantize and `F.linear`, in training.
VARIANTS: Mapping[str, bool | None] = {DEFAULT: None, "hf_qmoe_exact": True}

#: Those that are the default over again in training.
INFERENCE_ONLY = ("hf_qmoe_exact",)

#: Highest time relative to transformers' bf16 `grouped_mm`, by way to compute, mode and tokens.
TIME_TARGETS: Mapping[tuple[str, str], Mapping[int, float]] = {
    ("fused", "forward"): {1: 0.18, 8: 0.25, 64: 0.38, 512: 0.52, 2048: 0.78},
    ("exact", "forward"): {512: 1.15, 2048: 0.95},
    ("exact", "forward_backward"): {512: 1.25},
}


def select(module: nn.Module, arm: str) -> None:
    """Makes all packed experts in `module` compute as `arm` says."""
    for experts in module.modules():
        if isinstance(experts, ExpertsNbit):
            experts.exact = VARIANTS[arm]


def with_time_target(row: Row, mode: str, tokens: int) -> Row:
    """`row` with the target of its arm, if it is one of ours and there is one."""
    if row.arm not in VARIANTS:
        return row
    exact = VARIANTS[row.arm]
    if exact is None:
        exact = mode != "forward"
    targets = TIME_TARGETS.get(("exact" if exact else "fused", mode), {})
    return replace(row, target=targets.get(tokens))
