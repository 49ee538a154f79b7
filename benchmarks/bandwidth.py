"""How fast the machine reads memory: the floor under any product with few rows.

Reading is an arm that takes its turns with the others: on a machine that is shared, it may take half as long a minute
later.
"""

import torch


_ROWS = 64  # one sum for each, so that threads share the work without meeting


class PlainRead:
    """Called, it reads `size` bytes, many times what a cache holds, on torch's threads."""

    def __init__(self, size: int = 1 << 28) -> None:
        # A sum of floats would wait for its additions.
        self._data = torch.ones(_ROWS, size // 8 // _ROWS, dtype=torch.int64)

    @property
    def nbytes(self) -> int:
        """What a call reads."""
        return self._data.nbytes

    def __call__(self) -> torch.Tensor:
        return self._data.sum(dim=1)
