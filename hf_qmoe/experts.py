"""`ExpertsNbit`: the experts of one MoE layer, stored packed.

A drop-in for the experts modules of transformers v5 (``gate_up_proj [E, 2I, H]``, ``down_proj [E, H, I]``, called with
``hidden_states, top_k_index, top_k_weights``). Tokens are sorted by expert, each expert that was hit is unpacked into
one reused buffer, used, and forgotten; backward unpacks it again. What autograd keeps is activations and the packed
parameters themselves.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from hf_qmoe.autocast import autocast_dtype
from hf_qmoe.autograd import frozen_grouped_linear, gather_tokens
from hf_qmoe.factors import LoraFactors
from hf_qmoe.inference import activation_name, forward_again, forward_fused, gate_name, needs_gradient
from hf_qmoe.layout import follows_experts_interface, stack_names
from hf_qmoe.offload import unload
from hf_qmoe.once import once
from hf_qmoe.ops.bias import add_expert_bias
from hf_qmoe.ops.combine import combine_experts
from hf_qmoe.ops.gate import silu_gate
from hf_qmoe.ops.lora import add_expert_lora
from hf_qmoe.packed import PackedStack
from hf_qmoe.packed_module import PackedModule, pack_float_stacks
from hf_qmoe.routing import Routing, route


Activation = str | Callable[[Tensor], Tensor] | None


def _activation(activation: Activation) -> Callable[[Tensor], Tensor]:
    if activation is None:
        return nn.SiLU()
    if isinstance(activation, str):
        from transformers.activations import ACT2FN

        return ACT2FN[activation]  # type: ignore[no-any-return]
    return activation


class ExpertsNbit(PackedModule):
    """Packed experts of one layer.

    Args:
        num_experts: E.
        hidden_dim: H.
        intermediate_dim: I.
        has_gate: ``gate_up_proj [E, 2I, H]`` if true, ``up_proj [E, I, H]`` if not.
        activation: a name of transformers' ``ACT2FN``, a callable, or `None` for SiLU.
        compute_dtype: dtype of the products; `None` follows `hidden_states`. Autocast, where on, has precedence.
        quant_type: one of nf4, fp4, int8, fp8, bf16, fp16.
        blocksize: weights per scale.
        device: where the (zero) parameters are made.
        double_quant: quantize the scales too, as bitsandbytes' ``compress_statistics``.
        has_bias: add float ``gate_up_proj_bias [E, 2I]`` and ``down_proj_bias [E, H]``.
        is_transposed: the float layout is ``[E, in, out]``; packed bytes are ``[E, out, in]`` either way.
        is_concatenated: ``[gate; up]`` rows if true, interleaved ``gate0, up0, gate1, ...`` if not.

    Parameters (all ``requires_grad=False`` but the biases): ``gate_up_proj`` uint8 ``[E, N, K * bits / 8]``,
    ``gate_up_proj_absmax`` int32 ``[E, N, K / blocksize]`` (bits of float32, see `as_stored`), and so on for
    ``down_proj``; ``docs/format.md`` has the rest.

    Raises:
        ValueError: an unknown `quant_type`, or a shape that the format cannot hold.
    """

    _model_class: type[nn.Module] | None = None
    has_post_expert_norm = False
    _is_expert_parallel = False
    #: Whether products are those of dequantize and `F.linear` bit for bit; `None`: in training only.
    exact: bool | None = None

    def __init__(
        self,
        num_experts: int,
        hidden_dim: int,
        intermediate_dim: int,
        has_gate: bool = True,
        activation: Activation = None,
        compute_dtype: torch.dtype | None = None,
        quant_type: str = "nf4",
        blocksize: int = 64,
        device: torch.device | str | None = None,
        *,
        double_quant: bool = False,
        has_bias: bool = False,
        is_transposed: bool = False,
        is_concatenated: bool = True,
    ) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.has_gate, self.has_bias = has_gate, has_bias
        self.is_transposed, self.is_concatenated = is_transposed, is_concatenated
        self.act_fn = _activation(activation)
        up_name, down_name = stack_names(has_gate)
        up_features = (2 if has_gate else 1) * intermediate_dim
        shapes = {up_name: (up_features, hidden_dim), down_name: (hidden_dim, intermediate_dim)}
        self._set_stacks(
            {
                name: PackedStack.empty(num_experts, *shape, quant_type, blocksize, double_quant, device)
                for name, shape in shapes.items()
            },
            compute_dtype,
        )
        if has_bias:
            for name, (rows, _) in shapes.items():
                bias = torch.zeros(num_experts, rows, dtype=compute_dtype, device=device)
                self.register_parameter(f"{name}_bias", nn.Parameter(bias))

    @classmethod
    def from_float(
        cls,
        gate_up_proj: Tensor,
        down_proj: Tensor,
        has_gate: bool = True,
        activation: Activation = None,
        compute_dtype: torch.dtype | None = None,
        quant_type: str = "nf4",
        blocksize: int = 64,
        *,
        double_quant: bool = False,
        gate_up_proj_bias: Tensor | None = None,
        down_proj_bias: Tensor | None = None,
        is_transposed: bool = False,
        is_concatenated: bool = True,
    ) -> "ExpertsNbit":
        """Packs float stacks.

        Args:
            gate_up_proj: ``[E, 2I, H]`` (``[E, I, H]`` without a gate; ``[E, H, 2I]`` if `is_transposed`).
            down_proj: ``[E, H, I]`` (``[E, I, H]`` if `is_transposed`).
            gate_up_proj_bias: ``[E, 2I]``, with `down_proj_bias` ``[E, H]``, or neither.

        The other arguments are those of the constructor.

        Raises:
            ValueError: shapes that do not belong together, or weights that are not finite.
        """
        if gate_up_proj.ndim != 3 or down_proj.ndim != 3:
            raise ValueError(
                f"expected two stacks [E, N, K], got {tuple(gate_up_proj.shape)} and {tuple(down_proj.shape)}"
            )
        stacks = [w.transpose(1, 2) if is_transposed else w for w in (gate_up_proj, down_proj)]
        experts, hidden, intermediate = stacks[1].shape
        expected = (experts, (2 if has_gate else 1) * intermediate, hidden)
        if tuple(stacks[0].shape) != expected:
            raise ValueError(
                f"gate_up_proj is {tuple(stacks[0].shape)} as [E, N, K], but down_proj {tuple(stacks[1].shape)} "
                f"{'with' if has_gate else 'without'} a gate needs {expected}"
            )
        biases = (gate_up_proj_bias, down_proj_bias)
        if (gate_up_proj_bias is None) != (down_proj_bias is None):
            raise ValueError("give both gate_up_proj_bias and down_proj_bias, or neither")
        for bias, weights in zip(biases, stacks, strict=True):
            if bias is not None and bias.shape != weights.shape[:2]:
                raise ValueError(f"a bias is {tuple(bias.shape)}, its stack needs {tuple(weights.shape[:2])}")
        module = cls(
            experts,
            hidden,
            intermediate,
            has_gate,
            activation,
            compute_dtype,
            quant_type,
            blocksize,
            gate_up_proj.device,
            double_quant=double_quant,
            has_bias=gate_up_proj_bias is not None,
            is_transposed=is_transposed,
            is_concatenated=is_concatenated,
        )
        for name, weights, bias in zip(module.stack_names, stacks, biases, strict=True):
            for expert, weight in enumerate(weights):
                module.stack(name).quantize_expert_(expert, weight.detach())
            if bias is not None:
                setattr(module, f"{name}_bias", nn.Parameter(bias.detach().clone()))
        return module

    @classmethod
    def from_experts(
        cls,
        module: nn.Module,
        quant_type: str = "nf4",
        blocksize: int = 64,
        double_quant: bool = False,
        compute_dtype: torch.dtype | None = None,
    ) -> "ExpertsNbit":
        """Turns a transformers experts module into a packed one, in place.

        The module becomes an instance of a subclass of both `ExpertsNbit` and its own class, so its gate function,
        activation, biases, norm, flags and ``config`` stay what they were. Layout is read from its flags, never
        guessed from shapes. On the meta device only shapes are made, for a loader to fill.

        Args:
            module: has transformers' flags (``has_gate``, ``is_transposed``, ...) and float stacks.

        Returns:
            `module` itself.

        Raises:
            TypeError: `module` has no such flags, or is packed already.
            ValueError: a shape or format that cannot be packed.
        """
        if isinstance(module, ExpertsNbit):
            raise TypeError(f"{type(module).__name__} is packed already")
        if not follows_experts_interface(module):
            raise TypeError(f"{type(module).__name__} is not an experts module of transformers' experts interface")
        cls._check_quant_type(quant_type)
        return cls.from_stacks(module, pack_float_stacks(module, quant_type, blocksize, double_quant), compute_dtype)

    @classmethod
    def from_stacks(
        cls, module: nn.Module, stacks: dict[str, PackedStack], compute_dtype: torch.dtype | None
    ) -> "ExpertsNbit":
        """As `from_experts`, with `stacks` that are packed already, by parameter name."""
        module.__class__ = _packed_class(cls, type(module))
        assert isinstance(module, ExpertsNbit)
        module._set_stacks(stacks, compute_dtype)
        # Otherwise transformers' `_init_weights` draws normal numbers into the bytes.
        module._is_hf_initialized = True  # type: ignore[assignment]
        return module

    def to_experts(self, dtype: torch.dtype) -> nn.Module:
        """Undoes `from_experts`, in place: float parameters in the model's own layout, the model's own class.

        Raises:
            TypeError: the module was not made by `from_experts`.
        """
        if self._model_class is None:
            raise TypeError("only a module made by `ExpertsNbit.from_experts` has a float class to return to")
        for name in self.stack_names:
            weights = self.stack(name).dequantize(dtype)
            weights = weights.transpose(1, 2).contiguous() if self.is_transposed else weights
            setattr(self, name, nn.Parameter(weights))
        self._forget_stacks()
        self.__class__ = self._model_class  # type: ignore[assignment]
        return self

    @property
    def plain_class(self) -> type["ExpertsNbit"]:
        """`ExpertsNbit` or `Experts4bit`, whatever model's class the module is an instance of besides."""
        return next(c for c in type(self).__mro__ if issubclass(c, ExpertsNbit) and c._model_class is None)

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self._model_class is None:
            return super().__reduce_ex__(protocol)
        return _new_packed, (self.plain_class, self._model_class), self.__dict__.copy()

    def _apply_gate(self, gate_up_out: Tensor) -> Tensor:
        """``[S, 2I]`` to ``[S, I]``; a model's own ``_apply_gate`` takes the place of this one."""
        if self.is_concatenated:
            gate, up = gate_up_out.chunk(2, dim=-1)
        else:
            gate, up = gate_up_out[..., ::2], gate_up_out[..., 1::2]
        return self.act_fn(gate) * up

    def forward(
        self,
        hidden_states: Tensor,
        top_k_index: Tensor | None = None,
        top_k_weights: Tensor | None = None,
        *,
        router_indices: Tensor | None = None,
        routing_weights: Tensor | None = None,
        lora_factors: Mapping[str, Sequence[LoraFactors]] | None = None,
    ) -> Tensor:
        """Runs each token through its experts.

        Args:
            hidden_states: ``[T, H]``.
            top_k_index: int ``[T, k]``, experts of each token (gpt-oss calls it ``router_indices``).
            top_k_weights: ``[T, k]``, weight of each (``routing_weights``).
            lora_factors: adapters by parameter name; each adds its low-rank term for the routed rows, in the dtype of
                the products. Arguments rather than state, so that nothing is left behind by a forward that raises.

        Returns:
            ``[T, H]`` in the dtype of `hidden_states`. Products run in the compute dtype; the k experts of a token are
            weighted and added in float32 (float64 for float64 products).

        Raises:
            RuntimeError: a parametrization sits on the packed parameters, as PEFT without `hf_qmoe` would put there.
            ValueError: shapes that do not belong together.
        """
        top_k_index = router_indices if top_k_index is None else top_k_index
        top_k_weights = routing_weights if top_k_weights is None else top_k_weights
        try:
            if not lora_factors:
                again = forward_again(self, hidden_states, top_k_index, top_k_weights)
                if again is not None:
                    return again
            return self._forward(hidden_states, top_k_index, top_k_weights, lora_factors or {})
        except BaseException:
            unload(self)
            raise

    def _forward(
        self,
        hidden_states: Tensor,
        top_k_index: Tensor | None,
        top_k_weights: Tensor | None,
        lora: Mapping[str, Sequence[LoraFactors]],
    ) -> Tensor:
        self._check_call(hidden_states, top_k_index, top_k_weights)
        assert top_k_index is not None
        assert top_k_weights is not None
        compute_dtype = self._product_dtype(hidden_states)
        up_name, down_name = self.stack_names
        factors = [factor for adapters in lora.values() for adapter in adapters for factor in adapter[:2]]
        differentiates = needs_gradient(chain((hidden_states, top_k_weights, *factors), self.parameters()))
        exact = self.training or differentiates if self.exact is None else self.exact
        if not exact and not factors and not differentiates:
            fused = forward_fused(self, hidden_states, top_k_index, top_k_weights, compute_dtype, _OWN_GATE)
            if fused is not None:
                return fused

        routing = route(top_k_index, self.num_experts)
        rows = gather_tokens(hidden_states.to(compute_dtype), routing.perm, routing.inverse, top_k_index.shape[1])
        rows = self._project(rows, up_name, routing, lora.get(up_name, ()), exact)
        rows = self._gated(rows)
        rows = self._project(rows.to(compute_dtype), down_name, routing, lora.get(down_name, ()), exact)
        if self.has_post_expert_norm:
            rows = self.post_expert_norm(rows)  # type: ignore[operator]  # the model's submodule
        inverse = routing.inverse.view(top_k_index.shape)
        out: Tensor = combine_experts(rows, top_k_weights, inverse, routing.offsets, hidden_states.dtype)
        return out

    def _gated(self, rows: Tensor) -> Tensor:
        """What comes between the projections, by an operator that keeps less for backward where one has its bits."""
        if not self.has_gate:
            return self.act_fn(rows)
        gate = gate_name(self, _OWN_GATE)
        if gate is None or activation_name(self.act_fn) != "silu":
            return self._apply_gate(rows)
        gated: Tensor = silu_gate(rows, gate == "concatenated")
        return gated

    def _project(self, rows: Tensor, name: str, routing: Routing, lora: Sequence[LoraFactors], exact: bool) -> Tensor:
        out = frozen_grouped_linear(rows, self.stack(name), routing.offsets, exact)
        for lora_A, lora_B, scaling, dropout in lora:
            x = rows if dropout is None else dropout(rows)
            out = add_expert_lora(out, x, lora_A, lora_B, routing.offsets, scaling)
        if not self.has_bias:
            return out
        bias: Tensor = getattr(self, f"{name}_bias")
        biased: Tensor = add_expert_bias(out, bias.to(out.dtype), routing.offsets)
        return biased

    def _product_dtype(self, hidden_states: Tensor) -> torch.dtype:
        cast = None if hidden_states.dtype == torch.float64 else autocast_dtype(hidden_states.device.type)
        return cast or self.compute_dtype or hidden_states.dtype

    def _check_call(self, hidden_states: Tensor, top_k_index: Tensor | None, top_k_weights: Tensor | None) -> None:
        # Asking `parametrize` takes several microseconds where there is nothing.
        has_any = "parametrizations" in self._modules
        if has_any and any(parametrize.is_parametrized(self, name) for name in self.stored_names):
            raise RuntimeError(
                f"a parametrization was put on the packed weights of {type(self).__name__}. It would train without "
                "them: packed bytes cannot be parametrized. If this is PEFT's LoRA: `import hf_qmoe` before the "
                "adapter is made, and use a `LoraConfig`."
            )
        if top_k_index is None or top_k_weights is None:
            raise ValueError("experts need hidden_states, top_k_index and top_k_weights")
        if hidden_states.ndim != 2 or top_k_index.ndim != 2 or top_k_index.shape[0] != hidden_states.shape[0]:
            raise ValueError(
                f"expected hidden_states [T, H] and top_k_index [T, k], got {tuple(hidden_states.shape)} and "
                f"{tuple(top_k_index.shape)}"
            )
        if top_k_index.is_floating_point() or top_k_index.is_complex() or top_k_index.dtype == torch.bool:
            raise ValueError(f"top_k_index must hold integers, got {top_k_index.dtype}")
        if not top_k_weights.is_floating_point():
            raise ValueError(f"top_k_weights must be floats, got {top_k_weights.dtype}")
        device = hidden_states.device
        biases = [getattr(self, f"{name}_bias") for name in self.stack_names] if self.has_bias else []
        if any(bias is None for bias in biases):
            raise RuntimeError(f"{type(self).__name__} has biases (`has_bias`), but one of them is None")
        stored = (tensor for name in self.stack_names for tensor in self.stored_tensors(name))
        tensors = (top_k_index, top_k_weights, *stored, *biases)
        if any(tensor is not None and tensor.device != device for tensor in tensors):
            devices = {device, *(tensor.device for tensor in tensors if tensor is not None)}
            # A tensor without data would have the operators compute shapes, and give what memory happens to hold.
            raise RuntimeError(
                f"hidden states, routing and packed weights are on {', '.join(sorted(map(str, devices)))}; move them "
                "to one device (weights on meta have not been loaded, or are offloaded and lost their hooks)"
            )
        if top_k_weights.shape != top_k_index.shape:
            raise ValueError(
                f"top_k_weights {tuple(top_k_weights.shape)} differs from top_k_index {tuple(top_k_index.shape)}"
            )


# As it was written: a function that someone puts there is a gate of another kind.
_OWN_GATE = ExpertsNbit._apply_gate


class Experts4bit(ExpertsNbit):
    """`ExpertsNbit` restricted to the 4-bit formats, nf4 and fp4."""

    _quant_types = ("nf4", "fp4")


@once
def _packed_class(packed: type[ExpertsNbit], model_class: type[nn.Module]) -> type[ExpertsNbit]:
    members = {"_model_class": model_class, "__module__": packed.__module__, "__doc__": packed.__doc__}
    own_gate = getattr(model_class, "_apply_gate", None)
    if own_gate is not None:
        members["_apply_gate"] = own_gate
    return type(f"{model_class.__name__}Nbit", (packed, model_class), members)


def _new_packed(packed: type[ExpertsNbit], model_class: type[nn.Module]) -> ExpertsNbit:
    cls = _packed_class(packed, model_class)
    return cls.__new__(cls)
