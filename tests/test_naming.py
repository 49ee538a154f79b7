"""Module patterns match whole name components."""

import re

import pytest

from hf_qmoe.naming import check_pattern, first_match, matches


EXPERTS = "model.layers.0.mlp.experts"


@pytest.mark.parametrize(
    ("name", "pattern", "expected"),
    [
        # whole names, suffixes, prefixes, single components, runs of components
        (EXPERTS, EXPERTS, True),
        (EXPERTS, "layers.0.mlp.experts", True),
        (EXPERTS, "model.layers.0", True),
        (EXPERTS, "experts", True),
        (EXPERTS, "0", True),
        (EXPERTS, "layers.0", True),
        (EXPERTS, "layers.0.mlp", True),
        ("lm_head", "lm_head", True),
        # a component is not a part of another
        ("model.layers.10.mlp.experts", "layers.0.mlp.experts", False),
        ("model.layers.0.mlp.experts", "layers.10.mlp.experts", False),
        ("model.layers.10.mlp.experts", "layers.1", False),
        ("model.layers.1.mlp.experts", "layers.10", False),
        ("mlp.gate", "gate", True),
        ("mlp.gate_up_proj", "gate", False),
        ("mlp.gate_proj", "gate", False),
        ("mlp.aggregate", "gate", False),
        ("mlp.shared_experts", "experts", False),
        ("mlp.experts2", "experts", False),
        ("model.lm_head", "head", False),
        ("model.layers", "layers.0", False),
        ("", "experts", False),
        # regular expressions
        ("model.layers.3.mlp.experts", r"layers\.[0-3]\.mlp", True),
        ("model.layers.4.mlp.experts", r"layers\.[0-3]\.mlp", False),
        ("model.layers.13.mlp.experts", r"layers\.[0-3]\.mlp", False),
        ("model.layers.13.mlp.experts", r"layers\.\d+", True),
        ("model.layers.0.mlp.gate", "gate|router", True),
        ("model.layers.0.mlp.router", "gate|router", True),
        ("model.layers.0.mlp.gate_up_proj", "gate|router", False),
        ("model.layers.0.mlp.experts", r".*\.experts", True),
        ("model.layers.0.mlp.experts", "^model", True),
        ("model.layers.0.mlp.experts", "^layers", False),
        ("model.layers.0.mlp.experts", "experts$", True),
        ("model.layers.0.mlp.experts.0", "experts$", False),
        ("model.layers.0.mlp.experts", r"(mlp|moe)\.experts", True),
        ("model.layers.0.moe.experts", r"(mlp|moe)\.experts", True),
        ("model.layers.0.mlp.Experts", "experts", False),
        ("model.layers.0.mlp.Experts", "(?i:experts)", True),
    ],
)
def test_matching(name, pattern, expected):
    """A pattern matches a name if it matches a run of its dot-separated components, whole ones."""
    check_pattern(pattern)
    assert matches(name, pattern) is expected


@pytest.mark.parametrize("pattern", ["(?i)experts", "(?s)mlp.experts", r"(?x) layers\.0  # the first"])
def test_a_pattern_that_passed_the_check_can_be_used(pattern):
    """Flags for a whole expression either work or are refused by the check, not later by the first match."""
    try:
        check_pattern(pattern)
    except ValueError:
        return
    assert matches(EXPERTS, pattern)


@pytest.mark.parametrize("pattern", ["(", "[0-9", "*experts", "a)(b", "layers\\", "(?P<x", "+"])
def test_an_invalid_regular_expression_is_refused(pattern):
    """The error shows the pattern, and is about the pattern itself, not about what is built around it."""
    with pytest.raises(ValueError, match=f"{re.escape(repr(pattern))} is not a valid regular expression"):
        check_pattern(pattern)


@pytest.mark.parametrize("pattern", ["", None, 0, b"experts", ["experts"]])
def test_what_is_not_a_pattern_is_refused(pattern):
    """Empty strings would match everything; other types are shown."""
    with pytest.raises(ValueError, match=f"non-empty string, got {re.escape(repr(pattern))}"):
        check_pattern(pattern)


def test_the_first_matching_pattern_wins():
    """Order decides between several matches; no match is `None`, and so is no pattern."""
    assert first_match(EXPERTS, ["gate", "mlp.experts", "experts"]) == "mlp.experts"
    assert first_match(EXPERTS, iter(["experts", "mlp.experts"])) == "experts"
    assert first_match(EXPERTS, {"router": "int8", "layers.0": "int8"}) == "layers.0"
    assert first_match(EXPERTS, ["gate", "router"]) is None
    assert first_match(EXPERTS, []) is None
