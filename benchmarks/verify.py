"""Do the arms of a case compute the same thing? Asked before they are timed.

There are two answers. Arms that do the same arithmetic must agree **bit for bit** (`require_equal`). Arms that round
at other places are compared with one reference in float32: none may be further from it than the baseline is, times
what the case states for that arm (`require_as_close`).
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


class OutputsDiffer(AssertionError):
    """The arms of a case do not compute the same thing, so their numbers must not be compared."""


def require_equal(arm: Mapping[str, Any], other: Mapping[str, Any], what: str) -> None:
    """Raises `OutputsDiffer` unless both hold the same names and equal values; tensors are compared bit for bit."""
    if arm.keys() != other.keys():
        raise OutputsDiffer(f"{what}: one has {sorted(arm)}, the other {sorted(other)}")
    for name, value in arm.items():
        expected = other[name]
        if isinstance(value, Tensor):
            if not torch.equal(value, expected):
                difference = (value.double() - expected.double()).abs().max().item()
                raise OutputsDiffer(f"{what}: {name} differs by up to {difference:.3g}")
        elif value != expected:
            raise OutputsDiffer(f"{what}: {name} is {value!r} and {expected!r}")


def error(values: Tensor, reference: Tensor) -> float:
    """Relative distance in the Frobenius norm."""
    return ((values - reference).norm() / reference.norm()).item()


def require_as_close(
    outputs: Mapping[str, Mapping[str, Tensor]],
    reference: Mapping[str, Tensor],
    baseline: str,
    allowed: Mapping[str, float],
) -> None:
    """Raises `OutputsDiffer` if an arm is further from `reference` than ``allowed[arm]`` times what `baseline` is.

    Names are ``where/kind``, e.g. ``T64/grad_hidden``. Each kind is compared over all places at once, for a handful of
    numbers says little about rounding. An arm that was left out at some places is compared with the baseline at the
    others.

    Args:
        outputs: tensors by arm and name; `baseline` is one of the arms and has all names of `reference`.
        reference: the same in float32 or float64.
        allowed: highest error of an arm relative to the baseline's; it is asked for every arm.
    """
    kinds = {name.rpartition("/")[2] for name in reference}
    for arm, values in outputs.items():
        if strange := values.keys() - reference.keys():
            raise OutputsDiffer(f"{arm} has {sorted(strange)}, the reference has not")
        for kind in sorted(kinds):
            names = sorted(name for name in values if name.rpartition("/")[2] == kind)
            if not names:
                raise OutputsDiffer(f"{arm} has no {kind}")
            own, base, exact = (_flat(v, names) for v in (values, outputs[baseline], reference))
            if own.shape != exact.shape:
                raise OutputsDiffer(f"{arm}: {kind} has {own.numel()} numbers, the reference {exact.numel()}")
            found, limit = error(own, exact), allowed[arm] * error(base, exact)
            if not found <= limit:  # a NaN is no less than anything
                at = ", ".join(name.rpartition("/")[0] for name in names)
                raise OutputsDiffer(
                    f"{arm}: the error of {kind} ({at}) against the reference is {found:.3g}, allowed is {limit:.3g}, "
                    f"{allowed[arm]:g} times that of {baseline}"
                )


def _flat(values: Mapping[str, Tensor], names: list[str]) -> Tensor:
    return torch.cat([values[name].double().flatten() for name in names])
