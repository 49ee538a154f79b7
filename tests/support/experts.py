"""Float experts modules to pack, and their oracle: the model's own eager code on what the packed bytes stand for.

The bytes are read here by the words of ``docs/format.md``, from the state dict, with none of the package's unpacking.
"""

import copy
import importlib
import pkgutil
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import torch
import transformers.models
from torch import Tensor, nn
from torch.nn.functional import linear, silu
from transformers.integrations.moe import use_experts_implementation
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from hf_qmoe.experts import ExpertsNbit
from hf_qmoe.ops.formats import codebook
from hf_qmoe.ops.reference import dequantize


EXPERTS, HIDDEN, INTERMEDIATE, TOP_K = 4, 64, 128, 2
SCALE_SUFFIXES = ("_absmax", "_nested_absmax", "_nested_offset")
STACKS = ("gate_up_proj", "up_proj", "down_proj")


def config(hidden: int = HIDDEN, intermediate: int = INTERMEDIATE, num_experts: int = EXPERTS) -> SimpleNamespace:
    """A stand-in for a model's config that every experts class of transformers can be built from."""
    return SimpleNamespace(
        _experts_implementation="eager",
        **dict.fromkeys(("hidden_size", "moe_hidden_size"), hidden),
        **dict.fromkeys(("intermediate_size", "moe_intermediate_size"), intermediate),
        **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), num_experts),
        **dict.fromkeys(("hidden_act", "hidden_activation"), "silu"),
        mlp_hidden_act="relu2",
        moe_latent_size=None,
        mlp_gate_softcap=1.5,
        mlp_up_softcap=1.5,
        swiglu_alpha=1.702,
        swiglu_limit=0.7,
        post_norm_eps=1e-6,
    )


def randomized(module: nn.Module, scale: float = 0.3) -> nn.Module:
    """Fills every parameter with random numbers, large enough that a clamp at 0.7 is met."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=scale)
    return module


def float_experts(cls: type[nn.Module] = Qwen3MoeExperts, device: str = "cpu", **sizes: int) -> nn.Module:
    """An experts module of a model's class with random float32 weights."""
    return randomized(cls(config(**sizes))).to(device)


def packed_experts(cls: type[nn.Module] = Qwen3MoeExperts, quant_type: str = "nf4", **options: object) -> ExpertsNbit:
    """A packed module of a model's class with random weights."""
    return ExpertsNbit.from_experts(float_experts(cls), quant_type, **options)


def biased_layer(**options: object) -> ExpertsNbit:
    """A packed module with biases and transformers' own gate, always of the same weights."""
    torch.manual_seed(0)
    up, down = torch.randn(4, 256, 64) / 8, torch.randn(4, 64, 128) / 8
    biases = {"gate_up_proj_bias": torch.randn(4, 256), "down_proj_bias": torch.randn(4, 64)}
    return ExpertsNbit.from_float(up, down, **biases, **options).eval()


@cache
def decorated_classes() -> dict[str, type[nn.Module]]:
    """Every class in transformers under ``@use_experts_implementation`` that `config` can build, by name."""
    found = {}
    for package in pkgutil.iter_modules(transformers.models.__path__):
        folder = Path(transformers.models.__path__[0], package.name)
        for path in sorted(folder.glob("modeling_*.py")):
            names = re.findall(r"^@use_experts_implementation.*\nclass (\w+)", path.read_text("utf-8"), re.MULTILINE)
            if names:
                module = importlib.import_module(f"transformers.models.{package.name}.{path.stem}")
                found |= {name: getattr(module, name) for name in names}
    return found


@dataclass(frozen=True)
class Layout:
    """One combination of the flags of transformers' experts interface.

    ``gate`` is ``none``, ``concatenated`` (the interface's default), ``interleaved`` or ``clamped`` (a class's own).
    """

    gate: str = "concatenated"
    has_bias: bool = False
    is_transposed: bool = False
    has_norm: bool = False

    def __str__(self) -> str:
        flags = {"bias": self.has_bias, "transposed": self.is_transposed, "norm": self.has_norm}
        return "-".join([self.gate, *(name for name, on in flags.items() if on)])

    @property
    def has_gate(self) -> bool:
        """Whether the up projection holds gate rows too."""
        return self.gate != "none"

    @property
    def is_concatenated(self) -> bool:
        """Whether gate rows come before up rows, rather than in turn."""
        return self.gate != "interleaved"


GATES = ("none", "concatenated", "interleaved", "clamped")
LAYOUTS = [Layout(g, b, t, n) for g in GATES for b in (False, True) for t in (False, True) for n in (False, True)]


def gate_function(gate: str) -> Callable[[Tensor], Tensor]:
    """From ``[..., 2I]`` (``[..., I]`` for ``none``) to ``[..., I]``, in the order of rows that `gate` names."""

    def apply(rows: Tensor) -> Tensor:
        if gate == "none":
            return silu(rows)
        half = rows.shape[-1] // 2
        if gate == "interleaved":
            return silu(rows[..., ::2]) * rows[..., 1::2]
        first, second = rows[..., :half], rows[..., half:]
        if gate == "concatenated":
            return silu(first) * second
        first, second = first.clamp(max=0.7), second.clamp(-0.7, 0.7)
        return (second + 1) * first * torch.sigmoid(1.702 * first)

    return apply


class _LayoutExperts(nn.Module):
    layout: Layout

    def __init__(self, config: SimpleNamespace) -> None:
        super().__init__()
        self.num_experts = config.num_experts
        up = config.intermediate_size * (2 if self.layout.has_gate else 1)
        shapes = {
            "gate_up_proj" if self.layout.has_gate else "up_proj": (up, config.hidden_size),
            "down_proj": (config.hidden_size, config.intermediate_size),
        }
        for name, (rows, columns) in shapes.items():
            shape = (columns, rows) if self.layout.is_transposed else (rows, columns)
            self.register_parameter(name, nn.Parameter(torch.zeros(self.num_experts, *shape)))
            if self.layout.has_bias:
                self.register_parameter(f"{name}_bias", nn.Parameter(torch.zeros(self.num_experts, rows)))
        self.act_fn = nn.SiLU()
        if self.layout.has_norm:
            self.post_expert_norm = nn.RMSNorm(config.hidden_size, eps=1e-6)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        up_name = "gate_up_proj" if self.layout.has_gate else "up_proj"
        out = torch.zeros_like(hidden_states)
        for expert in range(self.num_experts):
            for slot in range(top_k_index.shape[1]):
                tokens = (top_k_index[:, slot] == expert).nonzero().flatten()
                rows = gate_function(self.layout.gate)(self._product(hidden_states[tokens], up_name, expert))
                rows = self._product(rows, "down_proj", expert)
                if self.layout.has_norm:
                    rows = self.post_expert_norm(rows)
                out = out.index_add(0, tokens, rows * top_k_weights[tokens, slot, None])
        return out

    def _product(self, rows: Tensor, name: str, expert: int) -> Tensor:
        weight = getattr(self, name)[expert]
        rows = rows @ weight if self.layout.is_transposed else linear(rows, weight)
        return rows + getattr(self, f"{name}_bias")[expert] if self.layout.has_bias else rows


@cache
def layout_class(layout: Layout) -> type[nn.Module]:
    """An experts class with these flags, decorated as transformers decorates its own."""
    members: dict[str, object] = {"layout": layout, "__module__": __name__}
    if layout.gate in ("interleaved", "clamped"):
        members["_apply_gate"] = lambda self, rows: gate_function(layout.gate)(rows)
    return use_experts_implementation(
        type(f"Experts[{layout}]", (_LayoutExperts,), members),
        is_concatenated=layout.is_concatenated,
        is_transposed=layout.is_transposed,
        has_bias=layout.has_bias,
        has_gate=layout.has_gate,
        has_post_expert_norm=layout.has_norm,
    )


class Inputs(NamedTuple):
    """Arguments of an experts module."""

    hidden_states: Tensor
    top_k_index: Tensor
    top_k_weights: Tensor

    def to(self, dtype: torch.dtype, weights_dtype: torch.dtype | None = None) -> "Inputs":
        """Leaves in `dtype`, the routing weights in `weights_dtype` if given."""
        hidden_states = self.hidden_states.detach().to(dtype, copy=True)
        weights = self.top_k_weights.detach().to(weights_dtype or dtype, copy=True)
        return Inputs(hidden_states, self.top_k_index, weights)

    def requires_grad_(self) -> "Inputs":
        """Makes hidden states and routing weights trainable."""
        self.hidden_states.requires_grad_()
        self.top_k_weights.requires_grad_()
        return self


def inputs(
    tokens: int = 10,
    top_k: int = TOP_K,
    num_experts: int = EXPERTS,
    hidden: int = HIDDEN,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> Inputs:
    """Random hidden states ``[T, H]``, distinct experts per token ``[T, k]`` and their weights ``[T, k]``."""
    scores = torch.rand(tokens, num_experts).softmax(dim=-1)
    weights, index = scores.topk(top_k, dim=-1)
    weights = weights / weights.sum(dim=-1, keepdim=True)
    hidden_states = torch.randn(tokens, hidden)
    return Inputs(hidden_states.to(device, dtype), index.to(device), weights.to(device, dtype))


def decoded_stack(module: ExpertsNbit, name: str) -> Tensor:
    """What the stored tensors of one projection stand for by ``docs/format.md``: fp32 ``[E, N, K]``."""
    state = module.state_dict()

    def scales(suffix: str) -> Tensor | None:
        tensor = state.get(name + suffix)
        return tensor.view(torch.float32) if tensor is not None and tensor.dtype == torch.int32 else tensor

    packed, absmax = state[name], scales("_absmax")
    nested, offset = scales("_nested_absmax"), scales("_nested_offset")
    experts = []
    for expert, codes in enumerate(packed):
        values = None if absmax is None else absmax[expert].reshape(-1)
        if values is not None and nested is not None:
            blocks = nested[expert].repeat_interleave(256)[: values.numel()]
            values = codebook("int8", packed.device)[values.long()] * blocks + offset[expert]
        weights_per_byte = 2 if module.quant_type in ("nf4", "fp4") else 1
        blocksize = 0 if values is None else codes.numel() * weights_per_byte // values.numel()
        experts.append(dequantize(codes, values, module.quant_type, blocksize))
    return torch.stack(experts)


def float_twin(
    original: nn.Module,
    packed: ExpertsNbit,
    dtype: torch.dtype = torch.float64,
    weights_dtype: torch.dtype = torch.float32,
) -> nn.Module:
    """The eager oracle: `original` with the weights that `packed` stands for in `weights_dtype`, cast to `dtype`."""
    twin = copy.deepcopy(original)
    for name in packed.stack_names:
        weights = decoded_stack(packed, name).to(weights_dtype)
        getattr(twin, name).data = weights.transpose(1, 2).contiguous() if packed.is_transposed else weights
    return twin.to(dtype)


def packed_and_twin(original: nn.Module, *args: object, **kwargs: object) -> tuple[ExpertsNbit, nn.Module]:
    """`original` packed by `from_experts`, and its float64 oracle."""
    packed = ExpertsNbit.from_experts(copy.deepcopy(original), *args, **kwargs)
    return packed, float_twin(original, packed)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Largest difference, relative to the largest value of `expected`; infinite where anything is not finite."""
    assert actual.shape == expected.shape
    difference = (actual.double() - expected.double()).abs()
    if not torch.isfinite(difference).all():
        return float("inf")
    return (difference.max() / expected.double().abs().max().clamp(min=1e-30)).item() if difference.numel() else 0.0


def gradients(module: nn.Module, arguments: Inputs, seed: int = 0) -> dict[str, Tensor]:
    """Gradients of a random linear function of the output, by name of the input or trainable parameter."""
    arguments.requires_grad_()
    module.zero_grad()
    out = module(*arguments)
    direction = torch.randn(out.shape, generator=torch.Generator().manual_seed(seed))
    out.backward(direction.to(out))
    found = {"hidden_states": arguments.hidden_states.grad, "top_k_weights": arguments.top_k_weights.grad}
    found |= {name: p.grad for name, p in module.named_parameters() if name not in STACKS and p.requires_grad}
    assert all(gradient is not None for gradient in found.values())
    return found


def outputs(module: nn.Module, arguments: Inputs) -> Tensor:
    """What the module gives in inference."""
    with torch.no_grad():
        out: Tensor = module(*arguments)
    return out
