"""What a LoRA adapter does to each parameter of a float model, without the model's weights.

The model is built with parameters that have shapes and no memory, and stock PEFT attaches the adapter to it. So PEFT
resolves targets, ranks and scalings, and converts adapters of transformers v4, exactly as it does when training.
"""

import dataclasses
import re
import warnings
from pathlib import Path
from typing import Any, Protocol

import torch
from peft import LoraConfig, PeftConfig, PeftModel, PeftType
from peft.tuners.lora.layer import Embedding, Linear, LoraLayer, ParamWrapper
from peft.utils.other import ModulesToSaveWrapper
from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_qmoe.factors import split_lora_A, split_lora_B
from hf_qmoe.folders import CheckpointError, read_json
from hf_qmoe.lora.checks import swapped_axes
from hf_qmoe.lora.conversion_fixes import rescale, unmatched_patterns
from hf_qmoe.meta_model import config_fields, in_short, meta_model


_ADAPTER = "default"
#: Fields of `LoraConfig` that are looked at here, that PEFT acts on by itself, or that matter to training only. Any
#: other that differs from its default means a variant of LoRA whose update is not ``scaling * B @ A``.
# fmt: off
_HARMLESS_FIELDS = frozenset({
    "task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode",
    "r", "target_modules", "exclude_modules", "lora_alpha", "lora_dropout", "fan_in_fan_out", "use_rslora",
    "modules_to_save", "init_lora_weights", "layers_to_transform", "layers_pattern", "rank_pattern", "alpha_pattern",
    "megatron_core", "loftq_config", "eva_config", "corda_config", "lora_ga_config", "qalora_group_size",
    "runtime_config", "target_parameters", "ensure_weight_tying",
})
# fmt: on
#: Initialisations that change the base weights, so that the adapter belongs to other weights than BASE holds.
_BASE_CHANGING_INITS = ("pissa", "olora", "loftq", "corda", "lora_ga")


#: A merge that cannot be done, with the reason in words for the user.
MergeError = CheckpointError


class Update(Protocol):
    """The new value of, or what is added to, a parameter; asked for in slices along its first dimension."""

    replaces: bool

    def slice(self, start: int, stop: int) -> Tensor:
        """Rows (or experts) `start` to `stop`, ``[stop - start, ...]``."""


@dataclasses.dataclass
class LowRank:
    """``scaling * left @ right``: ``[N, R] @ [R, K]``, or ``[E, N, R] @ [E, R, K]`` for a stack; fp32."""

    left: Tensor
    right: Tensor
    scaling: float
    replaces: bool = dataclasses.field(default=False, init=False)

    def slice(self, start: int, stop: int) -> Tensor:
        """Part of the delta, fp32."""
        right = self.right[start:stop] if self.right.ndim == 3 else self.right
        return (self.left[start:stop] @ right).mul_(self.scaling)


@dataclasses.dataclass
class Replacement:
    """A parameter that the adapter stores in full: trained (``modules_to_save``) or an embedding, with its `delta`."""

    value: Tensor
    delta: LowRank | None = None
    replaces: bool = dataclasses.field(default=True, init=False)

    def slice(self, start: int, stop: int) -> Tensor:
        """Part of the new value, fp32."""
        value = self.value[start:stop].float()
        return value if self.delta is None else value + self.delta.slice(start, stop)


def empty_model(base: Path) -> PreTrainedModel:
    """The model of `base`'s config, each parameter a single zero expanded to its shape (fp32, on the CPU).

    PEFT moves an adapter to the device of its base layer; on the meta device its weights would be lost.

    Raises:
        MergeError: no usable ``config.json``, or one of a quantized model.
    """
    if _is_quantized(config_fields(base)):
        raise MergeError(
            f"{base} is quantized (its config.json has a quantization_config), and a small update of coarse weights "
            "is lost. Merge into the float checkpoint it was made from, then quantize the result."
        )
    model = meta_model(base)
    expanded: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                if id(parameter) not in expanded:
                    expanded[id(parameter)] = nn.Parameter(torch.zeros(()).expand(parameter.shape), False)
                module._parameters[name] = expanded[id(parameter)]
    return model


def _is_quantized(fields: dict[str, Any]) -> bool:
    names = ("quantization_config", "compression_config")
    nested = [value for value in fields.values() if isinstance(value, dict)]
    return any(part.get(name) for part in (fields, *nested) for name in names)


def read_updates(model: PreTrainedModel, adapter: Path) -> dict[str, Update]:
    """Attaches the adapter to `model`, an `empty_model`, and lists what it changes.

    Returns:
        an update for each adapted parameter, by the parameter's name in the model before the adapter was attached.

    Raises:
        MergeError: `adapter` is not a plain LoRA adapter, or belongs to another model.
    """
    tied = _tied_names(model)
    placeholders = list(model.parameters())
    config, fields = _lora_config(adapter)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what PEFT warns of is checked here, and is an error
            _convert(config, model)
            peft_model = PeftModel(model, config, _ADAPTER, low_cpu_mem_usage=True)
            _refuse_swapped_features(peft_model, fields)
            _refuse_unmatched_patterns(peft_model, config)
            loaded = peft_model.load_adapter(
                str(adapter),
                _ADAPTER,
                torch_device="cpu",
                low_cpu_mem_usage=True,
                key_mapping=getattr(model, "_checkpoint_conversion_mapping", None),
            )
    except MergeError:
        raise
    except (ValueError, RuntimeError, KeyError, OSError) as error:
        raise MergeError(f"the adapter does not fit this base model: {in_short(error)}") from error
    if loaded.unexpected_keys:
        raise MergeError(
            f"the adapter has weights for modules the base model lacks: {_listed(loaded.unexpected_keys)}"
        )
    if loaded.missing_keys:
        raise MergeError(f"the adapter lacks weights that its config promises: {_listed(loaded.missing_keys)}")
    updates = _updates_of(peft_model.get_base_model(), {id(parameter) for parameter in placeholders})
    if not updates:
        raise MergeError("the adapter changes no parameter of the base model")
    if names := tied.intersection(updates):
        raise MergeError(
            f"{_listed(names)} is adapted, but tied to another parameter (tie_word_embeddings): merging would change "
            "both. Untie the base model first."
        )
    return updates


def _lora_config(adapter: Path) -> tuple[LoraConfig, dict[str, Any]]:
    """The adapter's config, made fit for attaching to an empty model, and its fields as they are stored."""
    file = adapter / "adapter_config.json"
    if not file.is_file():
        raise MergeError(f"{adapter} has no adapter_config.json, so it is not a PEFT adapter")
    if not any((adapter / name).is_file() for name in ("adapter_model.safetensors", "adapter_model.bin")):
        raise MergeError(f"{adapter} has no adapter_model.safetensors")
    fields = read_json(file)
    if fields.get("peft_type") != PeftType.LORA:
        raise MergeError(f"{adapter} is not a LoRA adapter (peft_type is {fields.get('peft_type')!r})")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            config = PeftConfig.from_pretrained(str(adapter))
        except (ValueError, TypeError) as error:
            raise MergeError(f"{file} cannot be used: {in_short(error)}") from error
    _refuse_variants(config, fields)
    config.lora_dropout = 0.0  # no part of the merged weights, and PEFT refuses it on stacks
    config.init_lora_weights = True
    config.inference_mode = True
    return config, fields


def _refuse_variants(config: LoraConfig, fields: dict[str, Any]) -> None:
    default = LoraConfig()
    known = {field.name for field in dataclasses.fields(LoraConfig)}
    variants = [f for f in known - _HARMLESS_FIELDS if getattr(config, f) != getattr(default, f)]
    variants += [f for f, value in fields.items() if f not in known and value]  # of a PEFT that is newer or altered
    if variants:
        names = _listed(f"{f}={fields.get(f)!r}" for f in variants)
        raise MergeError(f"the adapter uses {names}, which cannot be merged here: only plain LoRA can")
    init = config.init_lora_weights
    if isinstance(init, str) and init.startswith(_BASE_CHANGING_INITS):
        raise MergeError(
            f"the adapter was initialised with init_lora_weights={init!r}, which changes the base weights as well; "
            "convert it with PEFT's save_pretrained(..., path_initial_model_for_weight_conversion=...) first"
        )


def _refuse_swapped_features(peft_model: nn.Module, fields: dict[str, Any]) -> None:
    if not fields.get("target_parameters"):
        return
    version = fields.get("peft_version") or "0.17"  # the first with target_parameters, which did not say its version
    for name, layer in peft_model.named_modules():
        if isinstance(layer, ParamWrapper) and layer.get_param().ndim == 3:
            problem = swapped_axes(version, _parameter_name(name, layer), _is_transposed(layer))
            if problem:
                raise MergeError(problem)


def _convert(config: LoraConfig, model: nn.Module) -> None:
    """PEFT's conversion of targets, with the scaling put right; PEFT finds nothing left to convert then."""
    before = dict(config.alpha_pattern or {})
    convert_peft_config_for_transformers(config, model=model, conversions=None)
    rescale(config, before)


def _refuse_unmatched_patterns(peft_model: Any, config: LoraConfig) -> None:
    layers = peft_model.get_base_model().named_modules()
    adapted = [_parameter_name(name, layer) for name, layer in layers if isinstance(layer, LoraLayer)]
    unmatched = unmatched_patterns(config, [*adapted, *(name.removesuffix(".weight") for name in adapted)])
    if unmatched:
        raise MergeError(
            "rank_pattern or alpha_pattern of the adapter has keys that match nothing it adapts: "
            f"{_listed(unmatched)}. If they name projections of experts, name the stacks instead, such as "
            "'.*\\.gate_up_proj' (with twice the rank and alpha)"
        )


def _updates_of(model: nn.Module, placeholders: set[int]) -> dict[str, Update]:
    """Updates by parameter name; `placeholders` are the ids of the parameters that loading has not replaced."""
    deltas: dict[str, LowRank] = {}
    stored: dict[str, Tensor] = {}
    for path, module in model.named_modules():
        if isinstance(module, ModulesToSaveWrapper):
            trained = module.modules_to_save[_ADAPTER].state_dict()
            stored |= {f"{path}.{name}": value for name, value in trained.items()}
        elif isinstance(module, LoraLayer) and _ADAPTER in {**module.lora_A, **module.lora_embedding_A}:
            name = _parameter_name(path, module)
            if name in deltas:
                raise MergeError(f"{name} is adapted twice, which cannot be merged")
            deltas[name] = _low_rank(path, module)
    for name, parameter in model.named_parameters():
        if id(parameter) not in placeholders and not re.search(r"\.(lora_\w+|modules_to_save)\.", name):
            stored[name.replace(".base_layer.", ".")] = parameter.detach()
    replaced = {name: Replacement(value, deltas.pop(name, None)) for name, value in stored.items()}
    return {**deltas, **replaced}


def _low_rank(path: str, layer: LoraLayer) -> LowRank:
    scaling = layer.scaling[_ADAPTER]
    if isinstance(layer, Embedding):
        lora_A, lora_B = layer.lora_embedding_A[_ADAPTER], layer.lora_embedding_B[_ADAPTER]
        return LowRank(lora_A.detach().float().t(), lora_B.detach().float().t(), scaling)
    if type(layer) not in (Linear, ParamWrapper):
        raise MergeError(f"{path} is adapted by a {type(layer).__name__} layer, which this command cannot merge")
    lora_A = layer.lora_A[_ADAPTER].weight.detach().float()
    lora_B = layer.lora_B[_ADAPTER].weight.detach().float()
    swap = layer.fan_in_fan_out
    if isinstance(layer, ParamWrapper) and layer.get_param().ndim == 3:
        lora_A, lora_B = split_lora_A(lora_A, layer.num_experts), split_lora_B(lora_B, layer.num_experts)
        swap = _is_transposed(layer)
    if swap:
        return LowRank(lora_A.transpose(-1, -2), lora_B.transpose(-1, -2), scaling)
    return LowRank(lora_B, lora_A, scaling)


def _is_transposed(layer: LoraLayer) -> bool:
    return bool(getattr(layer.get_base_layer(), "is_transposed", False))


def _parameter_name(path: str, layer: LoraLayer) -> str:
    """Full name of the parameter that `layer` adapts, in the model without adapter."""
    parts = [part for part in path.removeprefix("base_model.model.").split(".") if part != "base_layer"]
    return ".".join([*parts, getattr(layer, "parameter_name", "weight")])


def _tied_names(model: PreTrainedModel) -> set[str]:
    tied: dict[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    return {*tied, *tied.values()}


def _listed(items: Any) -> str:
    ordered = sorted(items)
    return ", ".join(ordered[:3]) + (f" and {len(ordered) - 3} more" if len(ordered) > 3 else "")
