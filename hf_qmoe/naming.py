"""Matching module names against user patterns, on whole name components."""

import re
from collections.abc import Iterable


def check_pattern(pattern: object) -> None:
    """Raises `ValueError` unless `pattern` is a non-empty string that compiles as a regular expression."""
    if not isinstance(pattern, str) or not pattern:
        raise ValueError(f"a module pattern must be a non-empty string, got {pattern!r}")
    try:
        re.compile(pattern)
        re.compile(rf"(?:{pattern})")  # as `matches` uses it: flags such as (?i) must stand at the very start
    except re.error as error:
        raise ValueError(f"module pattern {pattern!r} is not a valid regular expression: {error}") from None


def matches(name: str, pattern: str) -> bool:
    """Whether `pattern` matches `name` or a run of its dot-separated components.

    ``layers.0.mlp.experts`` matches ``model.layers.0.mlp.experts`` but not ``model.layers.10.mlp.experts``; ``gate``
    matches ``mlp.gate`` but neither ``mlp.gate_up_proj`` nor ``mlp.gate_proj``; ``layers\\.[0-3]\\.mlp`` works too.
    """
    return re.search(rf"(?:^|\.)(?:{pattern})(?:\.|$)", name) is not None


def first_match(name: str, patterns: Iterable[str]) -> str | None:
    """The first of `patterns` that matches `name`."""
    return next((pattern for pattern in patterns if matches(name, pattern)), None)
