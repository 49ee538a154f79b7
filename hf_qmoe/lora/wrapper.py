"""`ParamWrapper`: PEFT's LoRA wrapper of a parameter, for packed parameters.

PEFT's own builds ``W + scaling * B A`` for the whole stack in each forward. This one hands the factors to the experts,
which add ``scaling * (x A_e^T) B_e^T`` to the routed rows; an adapter's tensors, their names and their initial values
are PEFT's.
"""

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from peft import LoraConfig
from peft.tuners.lora import layer as peft_layer
from torch import Tensor, nn

from hf_qmoe.experts import ExpertsNbit
from hf_qmoe.factors import LoraFactors, split_lora_A, split_lora_B
from hf_qmoe.lora.merge import Merge
from hf_qmoe.lora.packed import packed_parameter
from hf_qmoe.lora_weight import terms_of
from hf_qmoe.parametrize import lora_terms


class ParamWrapper(peft_layer.ParamWrapper):
    """LoRA on one packed parameter. PEFT compares the name of the class: it must be ``ParamWrapper``.

    Beyond PEFT's: ``lora_dropout`` works, since the input of ``lora_A`` exists.

    Raises:
        ValueError: an option that a factored form cannot do; `hf_qmoe.lora.checks` raises earlier for a whole model.
    """

    def __init__(
        self,
        base_layer: nn.Module,
        adapter_name: str,
        parameter_name: str,
        config: LoraConfig,
        r: int = 0,
        lora_alpha: int = 1,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            base_layer,
            adapter_name,
            parameter_name=parameter_name,
            config=_without_dropout(config),
            r=r,
            lora_alpha=lora_alpha,
            **kwargs,
        )
        self._set_dropout(adapter_name, config.lora_dropout)
        self._merge: Merge | None = None
        #: Of the model around the experts, known while one is merged: what their float form must have.
        self.float_dtype: torch.dtype | None = None

    # -- one adapter's tensors -----------------------------------------------------------------------------------

    def _get_in_out_features(self, module: nn.Module) -> tuple[int, int]:
        parameter = packed_parameter(module, self.parameter_name)
        assert parameter is not None
        self._param_ndim = len(parameter.shape)
        self.num_experts = parameter.shape[0] if self._param_ndim == 3 else 1
        first, second = parameter.shape[-2:]
        return (first, second) if self._param_ndim == 3 else (second, first)  # as PEFT has them before its swap

    def update_layer(self, adapter_name: str, r: int, lora_alpha: int, config: LoraConfig, **kwargs: Any) -> None:
        """Adds an adapter; arguments are PEFT's."""
        super().update_layer(adapter_name, r, lora_alpha=lora_alpha, config=_without_dropout(config), **kwargs)
        self._set_dropout(adapter_name, config.lora_dropout)

    def _set_dropout(self, adapter_name: str, p: float) -> None:
        self.lora_dropout[adapter_name] = nn.Dropout(p) if p else nn.Identity()

    def _move_adapter_to_device_of_base_layer(self, adapter_name: str, device: torch.device | None = None) -> None:
        """To where the packed parameter is, and to the dtype its products have, as PEFT does for a float one."""
        module = self.get_base_layer()
        parameter = packed_parameter(module, self.parameter_name)
        if parameter is None:  # merged: an ordinary parameter
            super()._move_adapter_to_device_of_base_layer(adapter_name, device)
            return
        device = device or parameter.stack.packed.device
        if device.type == "meta" and hasattr(module, "_hf_hook"):  # offloaded
            device = torch.device(module._hf_hook.execution_device)
        for tensors in (self.lora_A, self.lora_B):
            if adapter_name in tensors and not any(p.is_meta for p in tensors[adapter_name].parameters()):
                tensors[adapter_name] = tensors[adapter_name].to(device, parameter.dtype)

    def factors(self, adapter_name: str) -> LoraFactors:
        """The factors of one adapter, with its dropout."""
        dropout = self.lora_dropout[adapter_name]
        return LoraFactors(
            self.lora_A[adapter_name].weight,
            self.lora_B[adapter_name].weight,
            self.scaling[adapter_name],
            dropout if isinstance(dropout, nn.Dropout) else None,
        )

    def expert_delta(self, adapter_name: str, expert: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """One expert's update in `dtype`, ``[out, in]`` as packed stacks lie, in whatever layout the model has."""
        lora_A, lora_B, scaling, _ = self.factors(adapter_name)
        down, up = split_lora_A(lora_A, self.num_experts)[expert], split_lora_B(lora_B, self.num_experts)[expert]
        return (up.detach().to(dtype) @ down.detach().to(dtype)) * scaling

    def get_delta_factors(self, adapter_name: str) -> Any:
        """Not available: PEFT would add their product to packed bytes."""
        if packed_parameter(self.get_base_layer(), self.parameter_name) is None:
            return super().get_delta_factors(adapter_name)
        raise NotImplementedError("packed experts are not updated by delta factors; see `factors`")

    def get_delta_weight(self, adapter_name: str, *args: Any, **kwargs: Any) -> Tensor:
        """The whole update, in the parameter's float layout and the dtype of its products."""
        parameter = packed_parameter(self.get_base_layer(), self.parameter_name)
        dtype = self.get_param().dtype if parameter is None else parameter.dtype
        experts = torch.stack([self.expert_delta(adapter_name, e).to(dtype) for e in range(self.num_experts)])
        if self._param_ndim == 2:
            return experts[0]
        return experts if self._did_swap_in_out_features else experts.transpose(1, 2)

    # -- forward -------------------------------------------------------------------------------------------------

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Calls the experts with the factors of the active adapters.

        Raises:
            ValueError: ``adapter_names`` (a mixed batch), which rows that are routed by expert cannot have.
        """
        self._check_forward_args(x, *args, **kwargs)
        kwargs.pop("adapter_names", None)
        if self.disable_adapters and self.merged:
            self.unmerge()
        active = [] if self.disable_adapters or self.merged else [n for n in self.active_adapters if n in self.lora_A]
        if not active:
            return self.base_layer(x, *args, **kwargs)
        module = self.get_base_layer()
        if packed_parameter(module, self.parameter_name) is None:
            return self._forward_float(active, x, *args, **kwargs)
        with self._loaded(active):
            if not isinstance(module, ExpertsNbit):
                return self._forward_parametrized(module, active, x, *args, **kwargs)
            factors = [self.factors(name) for name in active]
            kwargs["lora_factors"] = {**kwargs.get("lora_factors", {}), self.parameter_name: factors}
            return self.base_layer(x, *args, **kwargs)

    # What a forward that is not ours does with the weight is seen when it runs, not when it is traced.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _forward_parametrized(self, module: nn.Module, active: list[str], x: Tensor, *args: Any, **kwargs: Any) -> Any:
        swapped = self._did_swap_in_out_features
        terms = [terms_of(self.factors(name), self.num_experts, self._param_ndim, swapped) for name in active]
        with lora_terms(module, self.parameter_name, terms):
            return self.base_layer(x, *args, **kwargs)

    @contextmanager
    def _loaded(self, names: list[str]) -> Iterator[None]:
        """Loads factors that accelerate has offloaded: it would when the linears that hold them are called."""
        linears = [linear[name] for name in names for linear in (self.lora_A, self.lora_B)]
        offloaded = [linear for linear in linears if linear.weight.is_meta]
        if not offloaded:
            yield
            return
        trained = torch.is_grad_enabled() and any(linear.weight.requires_grad for linear in offloaded)
        if trained or not all(hasattr(linear, "_hf_hook") for linear in offloaded):
            raise RuntimeError(
                f"LoRA factors of {self.parameter_name} are on the meta device. Offloaded ones serve inference only "
                "(`torch.no_grad()`); to train, offload the experts modules alone: "
                "`accelerate.cpu_offload(wrapper.get_base_layer())`"
            )
        for linear in offloaded:
            linear._hf_hook.pre_forward(linear)
        try:
            yield
        finally:
            for linear in offloaded:
                linear._hf_hook.post_forward(linear, None)

    def _forward_float(self, active: list[str], x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """PEFT's own forward, on experts that another parameter's merge has un-quantized."""
        if self.training and any(isinstance(self.lora_dropout[name], nn.Dropout) for name in active):
            raise RuntimeError(
                f"{self.parameter_name} has lora_dropout, but its experts are un-quantized, since another of their "
                "parameters is merged; call `unmerge_adapter()` before training"
            )
        return super().forward(x, *args, **kwargs)

    # -- merge ---------------------------------------------------------------------------------------------------

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None, requantize: bool = False) -> Any:
        """Adds adapters to the weights; un-quantizes the experts module, unless `requantize`.

        Args:
            safe_merge: check that the result is finite before anything is changed.
            adapter_names: all active ones if omitted.
            requantize: pack the sum again, in the same format. What of the update survives the rounding is returned.

        Returns:
            with `requantize`, the relative error of the update that was kept; else `None`.

        Raises:
            ValueError: values that are not finite (`safe_merge`).
            TypeError: the module has no float form to return to.
        """
        names = [n for n in peft_layer.check_adapters_to_merge(self, adapter_names) or [] if n in self.lora_A]
        if not names:
            return None

        def delta(expert: int) -> Tensor:
            return torch.stack([self.expert_delta(name, expert) for name in names]).sum(dim=0)

        merge = self._merge or Merge(self.get_base_layer(), self.parameter_name, self.float_dtype)
        error = merge.add(delta, safe_merge, requantize)
        self._merge = merge
        self.merged_adapters.extend(names)
        return error

    def unmerge(self) -> None:
        """Puts back the packed bytes that were there before `merge`."""
        if not self.merged or self._merge is None:
            warnings.warn("Already unmerged. Nothing to do.", stacklevel=2)
            return
        self._merge.undo()
        self._merge = None
        self.merged_adapters.clear()


def _without_dropout(config: LoraConfig) -> LoraConfig:
    """PEFT's wrapper refuses dropout; this class applies it itself."""
    config = copy.copy(config)
    config.lora_dropout = 0.0
    return config
