"""Running a function in several processes that form a process group of gloo."""

import os
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


RANKS = 2


def run_ranks(worker: Callable[..., None], rendezvous: Path, *args: object) -> None:
    """Run ``worker(rank, *args)`` in `RANKS` processes of one group; raises what one of them raises.

    `rendezvous` names a file that does not exist yet.
    """
    mp.spawn(_rank, (worker, str(rendezvous), args), nprocs=RANKS, join=True)


def _rank(rank: int, worker: Callable[..., None], rendezvous: str, args: tuple[object, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{rendezvous}", timedelta(minutes=2), world_size=RANKS, rank=rank)
    worker(rank, *args)
    dist.destroy_process_group()
    # Gloo's threads outlive the group. One that lets go of a tensor while the interpreter is being torn down aborts
    # the process (pytorch/pytorch#179291), so it is left without that.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
