"""The floor under any call for one token: a module that hands four addresses to a function which does nothing.

Where other work has had the caches, that is not microseconds: Python's objects and code come from memory.
"""

import ctypes

import torch
from torch import Tensor, nn


class EmptyCall(nn.Module):
    """Called as an experts module is; its output is whatever lies in memory."""

    def __init__(self) -> None:
        super().__init__()
        # Takes no arguments, so it leaves those it is given alone.
        self._function = ctypes.CDLL(None).getpid

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """``[T, H]``, uninitialised."""
        out = torch.empty_like(hidden_states)
        tensors = (out, hidden_states, top_k_index, top_k_weights)
        self._function(*(ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors))
        return out
