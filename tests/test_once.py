"""`once` makes one value for all threads."""

import os
import threading
import time

import pytest

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


def test_asked_while_it_is_made() -> None:
    """As the handler of a signal may: the first value made is the one that is kept."""
    depth = []

    @once
    def value() -> object:
        depth.append(True)
        if len(depth) == 1:
            inner.append(value())
        return object()

    inner: list[object] = []
    assert value() is inner[0]
    assert value() is inner[0]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_process_does_not_wait_for_a_thread_that_it_does_not_have() -> None:
    """Forked while another thread makes a value, as a DataLoader may."""
    begun, done = threading.Event(), threading.Event()

    @once
    def value(name: str) -> str:
        if name == "slow" and os.getpid() == parent:
            begun.set()
            done.wait(60)
        return name

    parent = os.getpid()
    thread = threading.Thread(target=value, args=("slow",))
    thread.start()
    begun.wait()
    child = os.fork()
    if not child:
        os._exit(0 if (value("slow"), value("fast")) == ("slow", "fast") else 1)
    for _ in range(100):
        finished, status = os.waitpid(child, os.WNOHANG)
        if finished:
            break
        time.sleep(0.05)
    else:
        os.kill(child, 9)
        os.waitpid(child, 0)
    done.set()
    thread.join()
    assert finished
    assert status == 0


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
