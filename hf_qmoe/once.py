"""`once`: `functools.cache` for what there must be one of: classes, and tables whose address is kept."""

import os
from collections.abc import Callable
from functools import wraps
from threading import RLock
from typing import Any, TypeVar


Function = TypeVar("Function", bound=Callable[..., Any])

_lock = RLock()


def _unlock_child() -> None:
    """The thread that had the lock is not in a forked process; what it was making is made there again."""
    global _lock
    _lock = RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_unlock_child)


def once(make: Function) -> Function:
    """Remembers what `make` gives for each arguments, and gives all callers the same.

    Threads that ask `functools.cache` at the same time for the first value each make one, and all but the last are
    dropped while their callers use them.
    """
    made: dict[tuple[Any, ...], Any] = {}

    @wraps(make)
    def remembered(*arguments: Any) -> Any:
        if arguments in made:
            return made[arguments]
        with _lock:
            if arguments in made:
                return made[arguments]
            value = make(*arguments)
            return made.setdefault(arguments, value)  # the handler of a signal may have asked, too

    remembered.cache_clear = made.clear  # type: ignore[attr-defined]
    return remembered  # type: ignore[return-value]
