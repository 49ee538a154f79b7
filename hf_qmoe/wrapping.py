"""Wrapping a method of another package once, however often this package is imported anew."""

from collections.abc import Callable
from functools import wraps
from typing import Any


_ORIGINAL = "_qmoe_original"


def wrap(owner: Any, name: str, hook: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Puts ``hook(original)`` in the place of the function or (static, class) method `name` of `owner`.

    Doing it again, also after a reload of this package, wraps the other package's own once.

    Args:
        owner: a class or module.
        hook: from the original function to the one that takes its place.
    """
    current = vars(owner).get(name) or getattr(owner, name)
    kind = type(current) if isinstance(current, staticmethod | classmethod) else None
    function = current.__func__ if kind else current
    original = getattr(function, _ORIGINAL, function)
    wrapped = wraps(original)(hook(original))
    setattr(wrapped, _ORIGINAL, original)
    setattr(owner, name, kind(wrapped) if kind else wrapped)
