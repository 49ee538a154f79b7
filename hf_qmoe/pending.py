"""`PendingParametrization`: what a module is while a loader fills it, before its parameters are parametrized.

A loader puts tensors where a checkpoint names them. Until it is done, packed bytes, scales and metadata are parameters
and buffers under the names they have on disk, as in `ExpertsNbit`: both forms are loaded and checked by the same code,
and a model saved in one form can be read in the other.
"""

import torch
from torch import nn

from hf_qmoe.layout import float_stack_shapes
from hf_qmoe.once import once
from hf_qmoe.packed_module import PackedModule, pack_float_stacks
from hf_qmoe.parametrize import attach_stack


class PendingParametrization(PackedModule):
    """A module whose float stacks are packed, not yet readable by its forward; see `pack` and `parametrize`."""

    _model_class: type[nn.Module]
    _experts: dict[str, int]
    _shapes: dict[str, tuple[int, ...]]

    @classmethod
    def pack(
        cls,
        module: nn.Module,
        quant_type: str = "nf4",
        blocksize: int = 64,
        double_quant: bool = False,
        compute_dtype: torch.dtype | None = None,
    ) -> "PendingParametrization":
        """Turns an experts module into this, in place. On the meta device only shapes are made, for a loader to fill.

        Args:
            module: follows transformers' experts interface, or has stacks (`float_stack_shapes`), packed as they lie.
            compute_dtype: dtype of the weights as forward will see them; `None` is that of the parameters.

        Raises:
            ValueError: a shape or format that cannot be packed, or weights that are not finite.
        """
        names = list(float_stack_shapes(module))
        compute_dtype = compute_dtype or getattr(module, names[0]).dtype
        shapes = {name: tuple(getattr(module, name).shape) for name in names}
        stacks = pack_float_stacks(module, quant_type, blocksize, double_quant)
        module.__class__ = _pending_class(type(module))
        assert isinstance(module, PendingParametrization)
        module._experts = {name: stack.num_experts for name, stack in stacks.items()}
        module._shapes = shapes
        module._set_stacks(stacks, compute_dtype)
        module._is_hf_initialized = True  # type: ignore[assignment]
        return module

    @property
    def stack_names(self) -> tuple[str, ...]:
        """Names of the packed parameters."""
        return tuple(self._experts)

    def num_experts_of(self, name: str) -> int:
        """E of one stack."""
        return self._experts[name]

    def float_shape(self, name: str) -> tuple[int, ...]:
        """Shape of the float parameter that `name` stands for."""
        return self._shapes[name]

    def parametrize(self) -> nn.Module:
        """Makes the module what it was, of its own class, with parametrized parameters."""
        stacks = self.stacks()
        shapes = self._shapes
        transposed, dtype = self.packs_transposed, self.compute_dtype
        assert dtype is not None
        self._forget_stacks()
        del self._experts, self._shapes
        self.__class__ = self._model_class  # type: ignore[assignment]
        for name, stack in stacks.items():
            attach_stack(self, name, stack, shapes[name], dtype, fixed_dtype=True, transposed=transposed)
        return self


@once
def _pending_class(model_class: type[nn.Module]) -> type[PendingParametrization]:
    members = {"_model_class": model_class, "__module__": __name__}
    return type(f"Pending{model_class.__name__}", (PendingParametrization, model_class), members)
