"""Where rows come from."""

import pytest

from benchmarks.provenance import _processor, cpu_model


@pytest.mark.parametrize(
    ("cpuinfo", "expected"),
    [
        (
            "processor\t: 0\ncpu family\t: 25\nmodel\t\t: 17\nmodel name\t: AMD EPYC\n\nmodel\t\t: 18\n",
            "AMD EPYC, family 25 model 17",
        ),
        ("processor\t: 0\nBogoMIPS\t: 50.00\nFeatures\t: fp asimd\n", ""),
        ("model name\t: POWER9\n", "POWER9"),
    ],
    ids=["x86", "arm", "name-only"],
)
def test_processors_of_one_brand_are_told_apart(cpuinfo: str, expected: str) -> None:
    """By the numbers of the first; without any the platform's name is taken."""
    assert _processor(cpuinfo) == expected


def test_this_processor_has_a_name() -> None:
    """With the instruction set of torch's kernels."""
    name, _, capability = cpu_model().rpartition(" (")
    assert name
    assert capability.endswith(")")
