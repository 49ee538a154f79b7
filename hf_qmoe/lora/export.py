"""Writing a LoRA adapter of fused experts with one pair of factors for each expert's projection.

PEFT saves the factors of a stack as two matrices, in an order of its own; vLLM and others read an adapter as it would
be had each expert's projections been linears: ``experts.{i}.gate_proj.lora_A.weight`` and so on. The update is the
same.
"""

import copy
import re
from pathlib import Path
from typing import Any, NamedTuple

import torch
from peft import PeftType
from peft.tuners.lora.layer import LoraLayer
from peft.utils.other import get_pattern_key
from peft.utils.save_and_load import get_peft_model_state_dict
from safetensors.torch import save_file
from torch import Tensor, nn

from hf_qmoe.factors import split_lora_A, split_lora_B
from hf_qmoe.layout import follows_experts_interface
from hf_qmoe.logging import get_logger
from hf_qmoe.lora.export_names import Names, original_names
from hf_qmoe.lora.packed import without_base_layer


logger = get_logger(__name__)

LAYOUTS = ("per_expert", "fused")
_PREFIX = "base_model.model."


class _Stack(NamedTuple):
    """An adapted stack of experts: PEFT's wrapper, the wrapper's and the experts module's names, names to write."""

    wrapper: Any
    wrapper_path: str
    path: str
    names: Names


def export_adapter(
    model: nn.Module, path: str | Path, layout: str = "per_expert", adapter_name: str = "default"
) -> None:
    """Writes an adapter directory, ``adapter_config.json`` and ``adapter_model.safetensors``.

    ``per_expert``: an adapted stack becomes ``base_model.model.<path>.experts.{i}.<projection>.lora_A.weight``
    ``[R, in]`` and ``lora_B.weight`` ``[out, R]`` for every expert. The projections are ``gate_proj`` and ``up_proj``
    (which share ``lora_A``) or ``up_proj``, and ``down_proj``, unless transformers' conversion of the model's original
    checkpoint says otherwise: ``block_sparse_moe.experts.{i}.w1``, ``w3``, ``w2`` for Mixtral. Everything else of the
    adapter stays as PEFT saves it. If only one of an experts module's two stacks is adapted, only that one is written;
    vLLM wants both, and stock PEFT does not load gate and up alone. Where ranks or scalings differ, the config says so
    in ``rank_pattern`` and ``alpha_pattern``, which not all readers know. ``use_rslora`` is written out as an alpha.

    Stock PEFT reads this layout back into the fused model where it has a conversion (Qwen3-MoE, OLMoE, Mixtral and
    their kin; not gpt-oss). There it loses linears of shared experts and dense MLPs (huggingface/peft#3711), unless
    they were adapted as parameters, as `LoraTargets.config_arguments` has it.

    ``fused``: what ``model.save_pretrained`` writes.

    Before anything is written, the update of every expert is put together from what would be written, tensors and
    config, and compared with the model's.

    Args:
        model: a `PeftModel`, on a float or a packed model.
        path: of the directory; made if need be, files of an adapter in it are replaced.
        layout: ``per_expert`` or ``fused``.
        adapter_name: which of the model's adapters.

    Raises:
        TypeError: `model` is not a `PeftModel`, or the adapter is not LoRA.
        ValueError: an unknown layout or adapter; an adapter that is merged, is DoRA or adapts no experts; experts
            whose module does not say how its weights lie; factors that are spread over ranks or on the meta device.
        RuntimeError: what would be written is not the model's update.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout is {layout!r}, expected one of {', '.join(LAYOUTS)}")
    config = copy.deepcopy(_lora_config(model, adapter_name))
    layers = _adapted_layers(model, adapter_name)
    if any(adapter_name in layer.merged_adapters for layer in layers.values()):
        raise ValueError(f"adapter {adapter_name!r} is merged into the weights; call `unmerge_adapter` first")
    tensors: dict[str, Tensor] = dict(get_peft_model_state_dict(model, adapter_name=adapter_name))
    if layout == "per_expert":
        stacks = _stacks(model, layers)
        if not stacks:
            raise ValueError(
                f"adapter {adapter_name!r} adapts no experts (target_parameters={config.target_parameters}); "
                "save it with layout='fused' or `save_pretrained`"
            )
        for stack in stacks:
            _replace_factors(tensors, stack, adapter_name)
        _rewrite_config(config, model, layers, stacks, adapter_name)
        for stack in stacks:
            _check(stack, tensors, config, adapter_name)
    _write(Path(path), tensors, config, model)


def _lora_config(model: Any, adapter_name: str) -> Any:
    configs = getattr(model, "peft_config", None)
    if not isinstance(configs, dict) or not hasattr(model, "get_base_model"):
        raise TypeError(f"expected a PeftModel, got {type(model).__name__}")
    if adapter_name not in configs:
        raise ValueError(f"the model has no adapter {adapter_name!r}, only {sorted(configs)}")
    config = configs[adapter_name]
    if config.peft_type != PeftType.LORA:
        raise TypeError(f"adapter {adapter_name!r} is {config.peft_type}, not LoRA")
    if config.use_dora:
        raise ValueError(f"adapter {adapter_name!r} is DoRA, whose magnitudes the per-expert layout cannot hold")
    return config


def _adapted_layers(model: Any, adapter_name: str) -> dict[str, Any]:
    """PEFT's layers that hold the adapter, by their names in the base model (``base_layer`` for inner wrappers)."""
    named = model.get_base_model().named_modules()
    return {name: m for name, m in named if isinstance(m, LoraLayer) and adapter_name in m.scaling}


def _is_stack(layer: Any) -> bool:
    """Whether a layer of PEFT adapts a parameter other than the weight of a linear."""
    return type(layer).__name__ == "ParamWrapper" and not isinstance(layer.get_base_layer(), nn.Linear)


def _stacks(model: Any, layers: dict[str, Any]) -> list[_Stack]:
    stacks = []
    base_model = model.get_base_model()
    for wrapper_path, wrapper in layers.items():
        if not _is_stack(wrapper):
            continue
        path, experts = without_base_layer(wrapper_path), wrapper.get_base_layer()
        if not follows_experts_interface(experts):
            raise ValueError(
                f"{path} ({type(experts).__name__}) has no flags that say how its weights lie, so its adapter cannot "
                "be split by expert; use layout='fused'"
            )
        names = original_names(base_model, path, wrapper.parameter_name)
        stacks.append(_Stack(wrapper, wrapper_path, path, names))
    return stacks


def _replace_factors(tensors: dict[str, Tensor], stack: _Stack, adapter_name: str) -> None:
    """Replaces the two tensors of a stack ``[E * R, in]``, ``[out, R * E]`` by those of its experts."""
    wrapper = stack.wrapper
    lora_A, lora_B = (tensors.pop(f"{_PREFIX}{stack.wrapper_path}.{f}.weight") for f in ("lora_A", "lora_B"))
    columns = wrapper.num_experts * wrapper.r[adapter_name]
    if lora_A.is_meta or lora_A.ndim != 2 or lora_B.ndim != 2 or (len(lora_A), lora_B.shape[1]) != (columns, columns):
        raise ValueError(
            f"{stack.path}: the factors of {wrapper.parameter_name} are {tuple(lora_A.shape)} and "
            f"{tuple(lora_B.shape)} on {lora_A.device}, expected {columns} rows and columns; gather them first"
        )
    matrices_A, matrices_B = split_lora_A(lora_A, wrapper.num_experts), split_lora_B(lora_B, wrapper.num_experts)
    for expert, (of_A, of_B) in enumerate(zip(matrices_A, matrices_B, strict=True)):
        for name, rows in zip(stack.names.projections, _split_rows(stack, of_B), strict=True):
            key = f"{_PREFIX}{stack.names.path}.{expert}.{name}"
            tensors[f"{key}.lora_A.weight"] = of_A.detach().clone()
            tensors[f"{key}.lora_B.weight"] = rows.detach().clone(memory_format=torch.contiguous_format)


def _split_rows(stack: _Stack, weight: Tensor) -> tuple[Tensor, ...]:
    """Rows of gate and of up, or of the only projection."""
    if len(stack.names.projections) == 1:
        return (weight,)
    if stack.wrapper.get_base_layer().is_concatenated:
        gate, up = weight.chunk(2)
        return gate, up
    return weight[::2], weight[1::2]


# -- the config -----------------------------------------------------------------------------------------------------


class _Entry(NamedTuple):
    """Rank and alpha of one adapted module or stack, and a pattern for every name that a reader may know it by."""

    leaves: tuple[str, ...]
    pattern: str
    r: int
    alpha: float
    #: Name of the fused parameter and how many projections make it up: PEFT's own reader multiplies both by that.
    fused: tuple[str, int] | None = None


def _rewrite_config(config: Any, model: Any, layers: dict[str, Any], stacks: list[_Stack], adapter_name: str) -> None:
    entries = [_stack_entry(stack, adapter_name) for stack in stacks]
    linears = {without_base_layer(name): layer for name, layer in layers.items() if not _is_stack(layer)}
    by_weight = [n for n in linears if any(f".{n}.weight".endswith(f".{t}") for t in config.target_parameters or ())]
    for name, layer in linears.items():
        pattern = re.escape(name) + (r"(\.weight)?" if name in by_weight else "")
        entries.append(_Entry((name.rpartition(".")[2],), pattern, *_rank_and_alpha(layer, adapter_name)))
    first = entries[0]  # of experts, which readers that know no patterns are most likely to want right
    config.r, config.lora_alpha, config.use_rslora = first.r, first.alpha, False
    config.lora_dropout = 0.0  # what PEFT fuses again takes none, and only training reads it
    config.rank_pattern = _patterns(entries, [e.r for e in entries], first.r)
    config.alpha_pattern = _patterns(entries, [e.alpha for e in entries], first.alpha)
    of_experts = {name for stack in stacks for name in stack.names.projections}
    config.target_modules = of_experts | _linear_targets(model, set(linears), of_experts)
    config.target_parameters = [f"{name}.weight" for name in by_weight] or None
    config.layers_to_transform = config.layers_pattern = config.exclude_modules = None  # names say it all
    if len({entry.alpha / entry.r for entry in entries}) > 1:
        logger.warning(
            "the adapter's scalings differ from module to module, which its config says in rank_pattern and "
            "alpha_pattern; readers that know only r and lora_alpha would scale some modules wrongly"
        )


def _rank_and_alpha(layer: Any, adapter_name: str) -> tuple[int, float]:
    """Rank, and the alpha that gives the layer's scaling as ``alpha / r``."""
    r, alpha, scaling = layer.r[adapter_name], layer.lora_alpha[adapter_name], layer.scaling[adapter_name]
    alpha = alpha if alpha / r == scaling else scaling * r
    return r, int(alpha) if float(alpha).is_integer() else alpha


def _stack_entry(stack: _Stack, adapter_name: str) -> _Entry:
    leaves = stack.names.projections
    pattern = rf"{re.escape(stack.names.path)}\.\d+\.({'|'.join(map(re.escape, leaves))})"
    fused = f"{stack.path}.{stack.wrapper.parameter_name}", len(leaves)
    return _Entry(leaves, pattern, *_rank_and_alpha(stack.wrapper, adapter_name), fused)


def _patterns(entries: list[_Entry], values: list[Any], default: Any) -> dict[str, Any]:
    """Patterns of those `values` that are not the default; no name matches two that differ."""
    by_leaf: dict[str, set[Any]] = {}
    for entry, value in zip(entries, values, strict=True):
        for leaf in entry.leaves:
            by_leaf.setdefault(leaf, set()).add(value)
    patterns: dict[str, Any] = {}
    for entry, value in zip(entries, values, strict=True):
        if value == default:
            continue
        if all(len(by_leaf[leaf]) == 1 for leaf in entry.leaves) and not entry.pattern.endswith("?"):
            patterns |= dict.fromkeys(map(re.escape, entry.leaves), value)
        else:
            patterns[entry.pattern] = value
        if entry.fused:
            name, parts = entry.fused
            if patterns.get(get_pattern_key(patterns, name)) != value * parts:
                patterns[re.escape(name)] = value * parts
    return patterns


def _linear_targets(model: Any, adapted: set[str], of_experts: set[str]) -> set[str]:
    """Names that hit the adapted linears alone: the last part, or all of it where that would hit others too."""
    others = {without_base_layer(name) for name, _ in model.get_base_model().named_modules()} - adapted
    taken = {name.rpartition(".")[2] for name in others} | of_experts
    return {name if name.rpartition(".")[2] in taken else name.rpartition(".")[2] for name in adapted}


# -- checking and writing -------------------------------------------------------------------------------------------


def _check(stack: _Stack, tensors: dict[str, Tensor], config: Any, adapter_name: str) -> None:
    """Raises `RuntimeError` unless each expert's update, read from what will be written, is the model's."""
    wrapper = stack.wrapper
    lora_A, lora_B = (getattr(wrapper, f)[adapter_name].weight.detach() for f in ("lora_A", "lora_B"))
    rank, experts = wrapper.r[adapter_name], wrapper.num_experts
    is_concatenated = wrapper.get_base_layer().is_concatenated
    for expert in range(experts):
        of_B = lora_B[:, expert::experts].float() * wrapper.scaling[adapter_name]
        live = of_B @ lora_A[expert * rank : (expert + 1) * rank].float()
        parts = len(stack.names.projections)
        for index, projection in enumerate(stack.names.projections):
            rows = live.tensor_split(parts)[index] if is_concatenated or parts == 1 else live[index::2]
            if not _is_same(_read_delta(f"{stack.names.path}.{expert}.{projection}", tensors, config), rows):
                raise RuntimeError(
                    f"{stack.path}.{wrapper.parameter_name}: the update of expert {expert} would not be the model's "
                    "if read from the exported adapter; nothing was written"
                )


def _read_delta(name: str, tensors: dict[str, Tensor], config: Any) -> Tensor:
    """``[out, in]``, as a reader of the adapter finds it."""
    of_A, of_B = (tensors[f"{_PREFIX}{name}.{f}.weight"].float() for f in ("lora_A", "lora_B"))
    r = config.rank_pattern.get(get_pattern_key(config.rank_pattern, name), config.r)
    alpha = config.alpha_pattern.get(get_pattern_key(config.alpha_pattern, name), config.lora_alpha)
    delta: Tensor = (of_B * (alpha / r)) @ of_A
    return delta


def _is_same(delta: Tensor, expected: Tensor) -> bool:
    if delta.shape != expected.shape:
        return False
    # Mostly they are equal bit for bit, and `allclose` makes several copies.
    return torch.equal(delta, expected) or torch.allclose(delta, expected, rtol=1e-5, atol=1e-6, equal_nan=True)


def _write(path: Path, tensors: dict[str, Tensor], config: Any, model: Any) -> None:
    base_model, config.inference_mode = model.get_base_model(), True
    if config.base_model_name_or_path is None:
        config.base_model_name_or_path = getattr(base_model, "name_or_path", None) or None
    mapping = None
    if config.task_type is None:
        mapping = {"base_model_class": type(base_model).__name__, "parent_library": type(base_model).__module__}
    path.mkdir(parents=True, exist_ok=True)
    own: dict[int, Tensor] = {}  # by address: safetensors takes no two tensors of the same memory (tied modules)
    for name, tensor in tensors.items():
        contiguous = tensor.detach().contiguous()
        address = contiguous.untyped_storage().data_ptr()
        tensors[name] = contiguous.clone() if address in own else own.setdefault(address, contiguous)
    save_file(tensors, path / "adapter_model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(path, auto_mapping_dict=mapping)
