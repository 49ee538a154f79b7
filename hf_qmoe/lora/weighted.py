"""``add_weighted_adapter`` for stacks of experts.

PEFT refuses adapters with ``target_parameters``: its concatenation and its SVD take the two matrices for those of one
linear. Elementwise combinations of factors hold for a stack as they are; concatenation and SVD are done here for each
expert, the SVD on the factors (exact, since the sum has a rank of at most ``sum(R_i)``), never on ``[E, N, K]``.
"""

from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from hf_qmoe.factors import split_lora_A, split_lora_B
from hf_qmoe.lora.wrapper import ParamWrapper


#: Combinations of PEFT that work on each entry of the factors.
ELEMENTWISE = ("linear", "ties", "dare_linear", "dare_ties", "magnitude_prune")
SUPPORTED = (*ELEMENTWISE, "cat", "svd")


def _wrappers(tuner: Any) -> list[ParamWrapper]:
    return [module for module in tuner.model.modules() if isinstance(module, ParamWrapper)]


def allow_stacks(original: Callable[..., Any]) -> Callable[..., Any]:
    """PEFT's check of the arguments, without its refusal of ``target_parameters`` if they are packed experts."""

    def check_add_weighted_adapter(self: Any, adapters: list[str], combination_type: str, svd_rank: int | None) -> Any:
        if not _wrappers(self):
            return original(self, adapters, combination_type, svd_rank)
        if combination_type not in SUPPORTED and len(adapters) > 1:
            raise ValueError(
                f"combination_type={combination_type!r} needs the whole update of each expert stack; for adapters of "
                f"packed experts choose one of {', '.join(SUPPORTED)}"
            )
        configs = [self.peft_config[name] for name in adapters if name in self.peft_config]
        if any(config.use_rslora for config in configs):
            raise ValueError("PEFT takes the scaling of rslora adapters for alpha / r here; they cannot be combined")
        if any(config.rank_pattern for config in configs) and combination_type in ELEMENTWISE:
            raise ValueError(
                f"combination_type={combination_type!r} keeps the ranks of rank_pattern, which the new adapter's "
                "config would not say; use 'cat' or 'svd'"
            )
        with _without_target_parameters(self, adapters):
            return original(self, adapters, combination_type, svd_rank)

    return check_add_weighted_adapter


@contextmanager
def _without_target_parameters(tuner: Any, adapters: list[str]) -> Any:
    configs = [tuner.peft_config[name] for name in adapters if name in tuner.peft_config]
    targets = [config.target_parameters for config in configs]
    for config in configs:
        config.target_parameters = None
    try:
        yield
    finally:
        for config, target in zip(configs, targets, strict=True):
            config.target_parameters = target


def combine(original: Callable[..., Any]) -> Callable[..., Any]:
    """PEFT's ``add_weighted_adapter``, with the experts' factors of ``cat`` and ``svd`` set right."""

    def add_weighted_adapter(
        self: Any,
        adapters: list[str],
        weights: list[float],
        adapter_name: str,
        combination_type: str = "svd",
        svd_rank: int | None = None,
        svd_clamp: float | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        wrappers = [] if adapter_name in self.peft_config else _wrappers(self)
        if wrappers and svd_clamp is not None:
            raise ValueError("svd_clamp is not supported for adapters of packed experts")
        original(self, adapters, weights, adapter_name, combination_type, svd_rank, svd_clamp, *args, **kwargs)
        if len(adapters) == 1 or combination_type in ELEMENTWISE:
            return
        for wrapper in wrappers:
            present = [(name, w) for name, w in zip(adapters, weights, strict=True) if name in wrapper.lora_A]
            if present and adapter_name in wrapper.lora_A:
                _set_factors(wrapper, adapter_name, _joined(wrapper, present), combination_type)

    return add_weighted_adapter


def skip_stacks(original: Callable[..., Any]) -> Callable[..., Any]:
    """PEFT's SVD of a linear's update; for experts, whose factors `combine` sets, the tensors as they are."""

    def svd_weighted_adapter(self: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        target, lora_A, lora_B = args[4:7]
        if isinstance(target, ParamWrapper):
            return lora_A.data, lora_B.data
        return original(self, *args, **kwargs)  # type: ignore[no-any-return]

    return svd_weighted_adapter


def _joined(wrapper: ParamWrapper, adapters: list[tuple[str, float]]) -> tuple[Tensor, Tensor]:
    """Factors ``[E, sum R, in]`` and ``[E, out, sum R]`` of the weighted sum, in float32."""
    downs, ups = [], []
    for name, weight in adapters:
        lora_A, lora_B, scaling, _ = wrapper.factors(name)
        downs.append(split_lora_A(lora_A.detach().float(), wrapper.num_experts) * (weight * scaling))
        ups.append(split_lora_B(lora_B.detach().float(), wrapper.num_experts))
    return torch.cat(downs, dim=1), torch.cat(ups, dim=2)


def _set_factors(wrapper: ParamWrapper, name: str, factors: tuple[Tensor, Tensor], combination_type: str) -> None:
    down, up = factors
    if combination_type == "svd":
        down, up = _truncated(down, up, wrapper.r[name])
    lora_A, lora_B, scaling, _ = wrapper.factors(name)
    for weight, value, split in ((lora_A, down / scaling, split_lora_A), (lora_B, up, split_lora_B)):
        target = split(weight.data, wrapper.num_experts)
        target.zero_()
        target[tuple(slice(size) for size in value.shape)].copy_(value)


def _truncated(down: Tensor, up: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """The best factors of `rank` for ``up @ down``, for each expert."""
    q_up, r_up = torch.linalg.qr(up)
    q_down, r_down = torch.linalg.qr(down.transpose(1, 2))
    u, s, vh = torch.linalg.svd(r_up @ r_down.transpose(1, 2), full_matrices=False)
    return vh[:, :rank] @ q_down.transpose(1, 2), q_up @ (u[:, :, :rank] * s[:, None, :rank])
