"""`Operands`: the tensors of a packed stack as operators get them, as one value."""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from hf_qmoe.ops.formats import get_format


class Operands(NamedTuple):
    """Packed weights ``[E, N, K]``; the fields are those of `hf_qmoe.packed.PackedStack`, in the operators' order."""

    packed: Tensor
    absmax: Tensor | None
    nested_absmax: Tensor | None
    nested_offset: Tensor | None
    quant_type: str

    @property
    def shape(self) -> tuple[int, int, int]:
        """``(E, N, K)``."""
        experts, rows, row_bytes = self.packed.shape
        return experts, rows, row_bytes * 8 // get_format(self.quant_type).bits

    @property
    def blocksize(self) -> int:
        """Weights per scale; 0 for bf16 and fp16."""
        _, rows, columns = self.shape
        return 0 if self.absmax is None else rows * columns // self.absmax.shape[1:].numel()

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Those that are there."""
        return tuple(tensor for tensor in self[:4] if isinstance(tensor, Tensor))

    def select(self, experts: Tensor) -> "Operands":
        """The stack of `experts`, an index on the device; repeats are copied."""
        return self._each(lambda tensor: tensor.index_select(0, experts))

    def narrow(self, start: int, end: int) -> "Operands":
        """The experts from `start` to `end`, a view."""
        return self._each(lambda tensor: tensor[start:end])

    def contiguous(self) -> "Operands":
        """Each tensor in one run of memory, as native code reads it."""
        return self._each(Tensor.contiguous)

    def _each(self, function: Callable[[Tensor], Tensor]) -> "Operands":
        absmax, nested_absmax, nested_offset = (None if t is None else function(t) for t in self[1:4])
        return Operands(function(self.packed), absmax, nested_absmax, nested_offset, self.quant_type)
