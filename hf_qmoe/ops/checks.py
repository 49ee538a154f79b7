"""`check`: what operators ask of their arguments."""

from collections.abc import Callable

import torch


def check(condition: bool | torch.SymBool, message: Callable[..., str]) -> None:
    """``torch._check``, which takes more than a microsecond to find that a condition is true.

    Raises:
        RuntimeError: with `message`, if it is not.
    """
    if condition is not True:
        torch._check(condition, message)
