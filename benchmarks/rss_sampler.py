"""Watches the resident memory of another process: `python rss_sampler.py PID` until its standard input closes.

A process of its own, so that sampling neither waits for the watched interpreter's lock nor allocates in its heap: a
sampler thread inside it did both, and moved the peak it was there to measure. Standard library only, to start fast.
"""

import os
import re
import select
import sys


_ANONYMOUS = re.compile(rb"RssAnon:\s+(\d+) kB")


def watch(pid: int, interval_ms: int = 1) -> None:
    """Prints ``ready``, samples ``RssAnon`` of `pid` every millisecond, and at the end prints the peak and the count.

    The peak is in bytes.
    """
    status = os.open(f"/proc/{pid}/status", os.O_RDONLY)
    poller = select.poll()
    poller.register(sys.stdin.fileno(), select.POLLIN | select.POLLHUP)
    peak = samples = 0
    print("ready", flush=True)
    while True:
        match = _ANONYMOUS.search(os.pread(status, 4096, 0))
        if match is None:
            raise RuntimeError("this kernel does not report RssAnon")
        peak, samples = max(peak, int(match[1]) * 1024), samples + 1
        if poller.poll(interval_ms):
            break
    print(peak, samples, flush=True)


if __name__ == "__main__":
    watch(int(sys.argv[1]))
