"""`once` makes one value for all threads."""

import threading
import time

from hf_qmoe.once import once


def test_threads_that_ask_first_get_the_same() -> None:
    """Where `functools.cache` would make several, and forget those that were handed out first."""
    made = []

    @once
    def value(name: str) -> list[str]:
        made.append(name)
        time.sleep(0.05)
        return [name]

    start, got = threading.Barrier(4), []

    def ask() -> None:
        start.wait()
        got.append(value("a"))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made == ["a"]
    assert all(one is got[0] for one in got)
    assert value("b") == ["b"]
    value.cache_clear()
    assert value("a") is not got[0]


def test_a_value_may_need_another() -> None:
    """Of the same function, in the same thread; an error is not remembered."""
    tries = []

    @once
    def factorial(n: int) -> int:
        tries.append(n)
        if len(tries) == 1:
            raise OSError("not yet")
        return n * factorial(n - 1) if n else 1

    try:
        factorial(3)
    except OSError:
        tries.append(-1)
    assert factorial(3) == 6
