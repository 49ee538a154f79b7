"""`once`: `functools.cache` for what there must be one of: classes, and tables whose address is kept."""

from collections.abc import Callable
from functools import cache, wraps
from threading import RLock
from typing import Any, TypeVar


Function = TypeVar("Function", bound=Callable[..., Any])


def once(make: Function) -> Function:
    """Remembers what `make` gives for each arguments, and makes it once.

    Threads that ask `functools.cache` at the same time for the first value each make one, and all but the last are
    dropped while their callers use them.
    """
    cached, lock = cache(make), RLock()

    @wraps(make)
    def remembered(*arguments: Any) -> Any:
        with lock:
            return cached(*arguments)

    remembered.cache_clear = cached.cache_clear  # type: ignore[attr-defined]
    return remembered  # type: ignore[return-value]
