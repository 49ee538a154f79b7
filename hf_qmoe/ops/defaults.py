"""torch's own defaults for code whose results outlive the caller's settings."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import _disable_current_modes


@contextmanager
def torch_defaults() -> Iterator[None]:
    """CPU, float32 and no dispatch modes within, whatever the caller has set.

    Tables that are cached for the life of the process are made here, and so is what bitsandbytes makes without naming
    a dtype. The default dtype is the process's: another thread may see it for that moment.
    """
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with _disable_current_modes(), torch.device("cpu"):
            yield
    finally:
        torch.set_default_dtype(dtype)
