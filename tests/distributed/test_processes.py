"""The helper of the tests around it."""

import atexit
import os
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessRaisedException

from tests.support.processes import RANKS, run_ranks


def _fails_on_the_last(rank: int) -> None:
    assert dist.get_world_size() == RANKS
    assert rank < RANKS - 1, "the last one"


def _aborts_at_exit(rank: int) -> None:
    atexit.register(os.abort)


def test_what_a_process_raises_is_raised(tmp_path: Path) -> None:
    """A check that fails in a process fails the test."""
    with pytest.raises(ProcessRaisedException, match="the last one"):
        run_ranks(_fails_on_the_last, tmp_path / "rendezvous")


def test_the_interpreter_is_not_torn_down(tmp_path: Path) -> None:
    """Threads of gloo that are still there abort a process in which it is."""
    run_ranks(_aborts_at_exit, tmp_path / "rendezvous")
