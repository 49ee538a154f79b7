"""From the router's choice to rows sorted by expert."""

from typing import NamedTuple

import torch
from torch import Tensor


class Routing(NamedTuple):
    """Where each (token, slot) pair goes. With S = T * top_k and E experts:

    ``perm`` int64 ``[S]`` sorts the pairs by expert, ``inverse`` undoes it, ``expert_ids`` ``[S]`` is sorted, and rows
    ``offsets[e]:offsets[e + 1]`` (int64 ``[E + 1]``) belong to expert e.
    """

    perm: Tensor
    inverse: Tensor
    expert_ids: Tensor
    offsets: Tensor


def route(top_k_index: Tensor, num_experts: int) -> Routing:
    """Sorts the routed pairs by expert, keeping token order within an expert.

    Indices of `num_experts` and more are sentinels of expert parallelism (experts that another rank owns): they sort
    to the end and belong to no expert.
    """
    flat = top_k_index.reshape(-1).long()
    expert_ids, perm = torch.sort(flat, stable=True)
    inverse = torch.empty_like(perm)
    inverse[perm] = torch.arange(perm.numel(), device=perm.device)
    bounds = torch.arange(num_experts + 1, device=flat.device)
    return Routing(perm, inverse, expert_ids, torch.searchsorted(expert_ids, bounds))
