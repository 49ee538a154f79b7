"""The rule by which arms that round at other places are compared, on errors that are known."""

import pytest
import torch
from torch import Tensor

from benchmarks.verify import OutputsDiffer, error, require_as_close, require_equal


REFERENCE = {f"T{tokens}/{kind}": torch.ones(tokens, 4) for tokens in (1, 8) for kind in ("output", "grad")}


def _off(by: float, kind: str = "output") -> dict[str, Tensor]:
    """An error of 0.01, and of `by` in one kind."""
    return {name: value * (1 + (by if name.endswith(kind) else 0.01)) for name, value in REFERENCE.items()}


def test_an_arm_may_be_as_far_from_the_reference_as_the_baseline_times_its_allowance() -> None:
    """Whatever the sign of its error."""
    assert error(_off(0.01)["T1/output"], REFERENCE["T1/output"]) == pytest.approx(0.01, rel=1e-3)
    arms = {"baseline": _off(0.01), "near": _off(-0.0104), "far": _off(0.019)}
    require_as_close(arms, REFERENCE, "baseline", {"baseline": 1.0, "near": 1.05, "far": 2.0})
    with pytest.raises(OutputsDiffer, match=r"far: the error of output \(T1, T8\) .* is 0.019, allowed is 0.018, 1.8"):
        require_as_close(arms, REFERENCE, "baseline", {"baseline": 1.0, "near": 1.05, "far": 1.8})


@pytest.mark.parametrize("kind", ["output", "grad"])
def test_each_kind_counts_for_itself(kind: str) -> None:
    """A good output does not excuse a gradient, and a kind is compared over all places at once."""
    arms = {"baseline": _off(0.01), "ours": _off(0.02, kind)}
    with pytest.raises(OutputsDiffer, match=f"ours: the error of {kind}"):
        require_as_close(arms, REFERENCE, "baseline", dict.fromkeys(arms, 1.05))


def test_not_a_number_is_not_close() -> None:
    """Nor is a tensor of another size, a missing kind or an unknown one."""
    nan = _off(0.01) | {"T8/grad": torch.full((8, 4), float("nan"))}
    short = _off(0.01) | {"T8/grad": torch.ones(7, 4)}
    missing = {name: value for name, value in _off(0.01).items() if name.endswith("output")}
    unknown = _off(0.01) | {"T8/other": torch.ones(1)}
    for broken, message in ((nan, "is nan"), (short, "numbers"), (missing, "has no grad"), (unknown, "T8/other")):
        with pytest.raises(OutputsDiffer, match=message):
            require_as_close({"b": _off(0.01), "o": broken}, REFERENCE, "b", {"b": 1.05, "o": 1.05})


def test_an_arm_left_out_somewhere_is_compared_elsewhere() -> None:
    """With the baseline's error at the same places."""
    partial = {name: value for name, value in _off(0.01).items() if name.startswith("T8")}
    require_as_close({"b": _off(0.01), "o": partial}, REFERENCE, "b", {"b": 1.05, "o": 1.05})


def test_equal_means_bit_for_bit() -> None:
    """Digests and numbers are compared too."""
    require_equal({"a": 1, "b": torch.ones(2)}, {"a": 1, "b": torch.ones(2)}, "same")
    with pytest.raises(OutputsDiffer, match="other: a is 1 and 2"):
        require_equal({"a": 1}, {"a": 2}, "other")
