"""Peak memory of a call, counted twice: by the kernel for the process, and by torch's allocator for its tensors.

The kernel's figure is what a machine must have: it includes what the heap keeps after tensors are freed, and scratch
of the math libraries. The allocator's figure does not depend on the heap, so it says what the program itself asks for.
Linux only.
"""

import ctypes
import gc
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from torch import Tensor
from torch.profiler import ProfilerActivity, profile


_SAMPLER = Path(__file__).with_name("rss_sampler.py")


def fresh_process(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls `function` in a new interpreter, so that no earlier call has left holes in its heap.

    `function`, its arguments and its result are pickled; what it raises is raised here.
    """
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=1, mp_context=context) as pool:
        return pool.submit(function, *args, **kwargs).result()


def status_bytes(field: str) -> int:
    """A field of ``/proc/self/status`` in bytes: ``RssAnon``, ``RssFile``, ``VmRSS``, ``VmHWM``, ..."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    raise ValueError(f"/proc/self/status has no field {field!r}")


def settle() -> None:
    """Collects garbage and gives free heap pages back, so that ``RssAnon`` is what is in use.

    Without the second, pages left over from a warm-up would be used again during the measured call, unseen.
    """
    gc.collect()
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):  # glibc
        libc.malloc_trim(0)


@dataclass
class PeakRss:
    """Context manager: anonymous and total resident memory above what was resident on entry.

    Attributes:
        anonymous: highest growth of ``RssAnon`` in bytes, from samples 1 ms apart.
        total: growth of the kernel's own high-water mark, mapped files included; exact, not sampled.
        samples: how often it was looked.
    """

    anonymous: int = 0
    total: int = 0
    samples: int = 0

    def __enter__(self) -> Self:
        settle()
        command = [sys.executable, "-I", "-S", str(_SAMPLER), str(os.getpid())]
        self._sampler = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._read()
        self._anonymous, self._total = status_bytes("RssAnon"), status_bytes("VmRSS")
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # resets VmHWM
        return self

    def __exit__(self, *exception: object) -> None:
        self.total = max(0, status_bytes("VmHWM") - self._total)
        assert self._sampler.stdin is not None
        self._sampler.stdin.close()
        peak, samples = map(int, self._read().split())
        self._sampler.wait()
        self.anonymous, self.samples = max(0, peak - self._anonymous), samples

    def _read(self) -> str:
        assert self._sampler.stdout is not None
        line = self._sampler.stdout.readline()
        if not line:
            raise RuntimeError(f"the memory sampler ended with status {self._sampler.wait()}")
        return line


def peak_of_tensors(function: Callable[[], Any], mapped_files: Iterable[Path] = ()) -> int:
    """Highest sum of live bytes that `function` took from torch's CPU allocator, above what was live before.

    The profiler reports each allocation and release with its size, those inside operators and in backward too, which
    a `TorchDispatchMode` does not see (an operator written in Python runs with the mode off). It also reports a file
    that is mapped, as an allocation of the file's size: those of `mapped_files` are left out.
    """
    ignored = {file.stat().st_size for file in mapped_files}
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        function()
    events = profiler.profiler.kineto_results.events()
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    changes = [(when, change) for when, change in changes if abs(change) not in ignored]
    live = peak = 0
    for _, change in changes:
        live += change
        peak = max(peak, live)
    return peak


def mapped_bytes(tensors: list[Tensor]) -> int:
    """Bytes of those `tensors` that lie in a mapped file, which ``RssAnon`` does not count."""
    ranges = []
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        bounds, *_, path = (*line.split(maxsplit=5), "")[:6]
        if path.startswith("/"):
            start, end = (int(bound, 16) for bound in bounds.split("-"))
            ranges.append((start, end))
    sizes = {t.data_ptr(): t.nbytes for t in tensors if t.device.type == "cpu"}
    return sum(size for pointer, size in sizes.items() if any(start <= pointer < end for start, end in ranges))
