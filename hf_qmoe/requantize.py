"""From a checkpoint that another method has quantized to packed experts, as transformers reads the shards.

Experts and linears are dequantized one at a time and packed as those of a float checkpoint are. Bytes of bitsandbytes
are kept: there the converters only put them where they belong.
"""

import copy
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from bitsandbytes.functional import QuantState
from bitsandbytes.nn.modules import Linear4bit, Params4bit
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    ConversionOps,
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    apply_renamings,
    rename_source_key,
)
from transformers.quantizers.quantizers_utils import get_module_from_name

from hf_qmoe.conversion import (
    PackingConverter,
    QMoEKeep,
    QMoEQuantize,
    identity_converters,
    is_concatenation,
    pack_parameter,
    packing_conversions,
    stored_parameters,
)
from hf_qmoe.layout import by_expert, follows_experts_interface, stack_names
from hf_qmoe.naming import check_pattern, first_match
from hf_qmoe.packed import PackedStack
from hf_qmoe.packed_module import PackedModule
from hf_qmoe.sources.bitsandbytes_4bit import BitsAndBytes4bit, packed_bytes
from hf_qmoe.sources.fp8 import Fp8
from hf_qmoe.sources.source import Parts, Source
from hf_qmoe.sources.tensors import CheckpointTensors


@dataclass
class Checkpoint:
    """A quantized checkpoint: its method and its tensors."""

    source: Source
    tensors: CheckpointTensors

    def __deepcopy__(self, memo: Any) -> "Checkpoint":
        return self


@dataclass
class _Stored:
    """What a checkpoint stores for one weight: name of each part, by role, and the loader's way to read it."""

    names: dict[str, str] = field(default_factory=dict)
    loads: dict[str, Callable[[], Tensor]] = field(default_factory=dict)


class _ScaleRenaming(WeightRenaming):
    """Another name of ``weight_scale_inv``: of tensors that lie beside a ``weight``, and no others of that name."""

    def __init__(self, source_patterns: str, target_patterns: str, tensors: CheckpointTensors) -> None:
        super().__init__(source_patterns, target_patterns)
        self.tensors = tensors

    def rename_source_key(self, source_key: str) -> tuple[str, str | None]:
        """The name that the conversions know."""
        if f"{source_key.rpartition('.')[0]}.weight" not in self.tensors:
            return source_key, None
        renamed: tuple[str, str | None] = super().rename_source_key(source_key)
        return renamed


class _Collect(ConversionOps):
    """Stands where transformers wants an operation: the converters here override `convert`."""

    supports_many_to_many = True

    def convert(self, input_dict: dict[str, Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Passes on what it is given."""
        return input_dict


class _FromQuantized(WeightConverter):
    """Collects the parts of the weights that its sources stand for; `weights` has them in the experts' order."""

    def __init__(self, sources: list[str], targets: list[str], checkpoint: Checkpoint) -> None:
        self.roles: dict[str, tuple[str, str]] = {}
        for source in sources:
            end = "$" if source.endswith("$") else ""
            for role, name in checkpoint.source.stored_names(source.removesuffix(end)).items():
                self.roles[name + end] = (source, role)
        super().__init__(list(self.roles), targets, operations=[_Collect()])
        # A converter may rewrite its patterns; what it hands to `add_tensor` is the rewritten ones.
        self.roles = dict(zip(self.source_patterns, self.roles.values(), strict=True))
        self.checkpoint = checkpoint
        self.stored: dict[str, dict[tuple[int, ...], _Stored]] = {}

    def add_tensor(self, target_key: str, source_key: str, source_pattern: str, future: Any) -> None:
        """Takes note of one part; the numbers in its name say which expert's it is."""
        source, role = self.roles[source_pattern]
        numbers = tuple(int(part) for part in source_key.split(".") if part.isdigit())
        stored = self.stored.setdefault(source, {}).setdefault(numbers, _Stored())
        stored.names[role], stored.loads[role] = source_key, future
        self.layer_targets[target_key].add(source_key)

    def weights(self) -> dict[str, list[_Stored]]:
        """What is stored for each source, in the order of the experts."""
        return {source: [found[n] for n in sorted(found)] for source, found in self.stored.items()}

    def parts(self, stored: _Stored) -> Parts:
        """The parts of a quantized weight, read as they are, where the loader wants them."""
        tensors = self.checkpoint.tensors
        # Only the loader knows the device: the smallest part is read its way (and cast, so its values are not used).
        smallest = min(stored.names, key=lambda role: tensors.numel(stored.names[role]))
        device = stored.loads[smallest]().device
        return {role: tensors.read(name, device) for role, name in stored.names.items()}

    def is_quantized(self, stored: _Stored) -> bool:
        """Whether these are the parts of a quantized weight."""
        return self.checkpoint.source.is_quantized(stored.names)

    def value(self, stored: _Stored, target: str, dtype: torch.dtype) -> Tensor:
        """The float weight: dequantized, or as it is stored."""
        if self.is_quantized(stored):
            return self.decoded(self.parts(stored), stored.names.get("", target), dtype)
        if "" not in stored.loads:
            raise ValueError(f"{target}: the checkpoint has {sorted(stored.names.values())}, but not the weight")
        if self.checkpoint.tensors.is_eight_bit(stored.names[""]):
            raise ValueError(
                f"{stored.names['']} is stored in 8 bit, and no scales of {self.checkpoint.source.method} were found "
                "for it: the checkpoint is incomplete, or calls them by names that are not known here"
            )
        return stored.loads[""]()

    def decoded(self, parts: Parts, name: str, dtype: torch.dtype) -> Tensor:
        """The weight `name` of these parts, dequantized."""
        try:
            return self.checkpoint.source.decode(parts, dtype)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None


class WeightFromQuantized(_FromQuantized):
    """For a parameter called ``weight`` (of a linear, a router, a norm), whether quantized or not."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(["weight"], ["weight"], checkpoint)

    def convert(
        self,
        layer_name: str,
        model: Any = None,
        config: Any = None,
        hf_quantizer: Any = None,
        loading_info: Any = None,
    ) -> dict[str, Any]:
        """The parameter in the form that its module has.

        Raises:
            ValueError: parts are missing, or have another shape than the module.
        """
        (stored,) = (s for found in self.weights().values() for s in found)
        module, name = get_module_from_name(model, layer_name)
        if not self.is_quantized(stored) or not isinstance(module, Linear4bit):
            parameter = getattr(module, name)
            value = self.value(stored, layer_name, model.dtype)
            if not isinstance(module, Linear4bit):
                if self.is_quantized(stored):
                    value = value.to(parameter.dtype)
                return {layer_name: value}
            return quantize_linear(model, layer_name, value)
        if isinstance(self.checkpoint.source, BitsAndBytes4bit):
            return {layer_name: _kept_linear(module, self.parts(stored), layer_name)}
        return quantize_linear(model, layer_name, self.value(stored, layer_name, model.dtype))


def quantize_linear(model: PreTrainedModel, name: str, weight: Tensor) -> dict[str, Any]:
    """Quantizes the weight of a linear.

    Raises:
        ValueError: its shape is not that of the linear.
    """
    module, _ = get_module_from_name(model, name)
    _check_shape(name, tuple(weight.shape), (module.out_features, module.in_features))
    return QMoEQuantize().convert(
        {name: weight}, source_patterns=[], target_patterns=[], model=model, full_layer_name=name
    )


def _kept_linear(module: Linear4bit, parts: Parts, name: str) -> Params4bit:
    _, _, state = packed_bytes(parts)
    _check_shape(name, tuple(state.shape), (module.out_features, module.in_features))
    if module.in_features % state.blocksize:
        raise ValueError(
            f"{name} has blocks of {state.blocksize} weights, which run on from row to row: bitsandbytes (0.50.2) "
            "reads wrong scales for those on AVX512 CPUs. Listed in `modules_to_not_convert`, it is dequantized"
        )
    statistics = {role.removeprefix("."): tensor for role, tensor in parts.items() if role}
    weight = Params4bit.from_prequantized(parts[""], statistics, device=parts[""].device, module=module)
    # The state was saved with the dtype of that time, in which bitsandbytes' backward would still dequantize.
    weight.quant_state.dtype = module.compute_dtype
    module._is_hf_initialized = True  # type: ignore[assignment]  # or its bytes would be drawn anew
    return weight


class ConvertedFromQuantized(_FromQuantized):
    """One of a model's converters, of experts or others, for a quantized checkpoint."""

    def __init__(self, inner: WeightConverter, checkpoint: Checkpoint) -> None:
        super().__init__(list(inner._original_source_patterns), list(inner._original_target_patterns), checkpoint)
        self.inner = inner
        self.scope_prefix, self.base_model_prefix = inner.scope_prefix, inner.base_model_prefix

    def convert(
        self,
        layer_name: str,
        model: Any = None,
        config: Any = None,
        hf_quantizer: Any = None,
        loading_info: Any = None,
    ) -> dict[str, Any]:
        """Does what the model's converter does; packs experts from kept bytes, or dequantized one at a time.

        Raises:
            ValueError: as `PackingConverter.convert`, or bytes to be kept that the config contradicts.
        """
        inner = self.inner
        patterns = dict(zip(inner._original_source_patterns, inner.source_patterns, strict=True))
        weights = {patterns[source]: found for source, found in self.weights().items()}
        for found in weights.values():
            inner.layer_targets[layer_name].update(s.names[""] for s in found if "" in s.names)
        module, name = get_module_from_name(model, layer_name)
        if isinstance(module, PackedModule) and name in module.stack_names:
            quantized = [self.is_quantized(stored) for found in weights.values() for stored in found]
            if any(quantized) and isinstance(self.checkpoint.source, BitsAndBytes4bit):
                if not all(quantized):
                    raise ValueError(f"{layer_name}: some of its experts are quantized and some are not")
                return self._keep(layer_name, module, weights)
            if quantized == [True] and isinstance(self.inner.operations[0], QMoEKeep):
                ((stored,),) = weights.values()
                return pack_parameter(module, layer_name, self._expert_by_expert(stored, layer_name, model))
        return self._convert_floats(weights, layer_name, model, config, hf_quantizer, loading_info)

    def _convert_floats(
        self, weights: dict[str, list[_Stored]], layer_name: str, model: Any, *others: Any
    ) -> dict[str, Any]:
        """What the model's converter makes of the weights, each of them read when it is asked for."""

        def reader(stored: _Stored) -> Callable[[], Tensor]:
            return lambda: self.value(stored, layer_name, model.dtype)

        inner = self.inner
        for pattern, found in weights.items():
            inner.collected_tensors[pattern] = [reader(stored) for stored in found]
        inner.quantization_operation = self.quantization_operation
        converted: dict[str, Any] = inner.convert(layer_name, model, *others)
        return converted

    def _expert_by_expert(self, stored: _Stored, layer_name: str, model: Any) -> Iterator[Tensor]:
        """The experts of a stack that is stored as a whole."""
        module, name = get_module_from_name(model, layer_name)
        parts, source = self.parts(stored), self.checkpoint.source
        if len(module.float_shape(name)) == 2:  # the experts' rows in one matrix, whose blocks may cross experts
            yield from by_expert(self.decoded(parts, layer_name, model.dtype), module.num_experts_of(name))
            return
        count, expected = source.num_experts(parts), module.num_experts_of(name)
        if count != expected:
            raise ValueError(f"{layer_name}: the checkpoint has {count} experts, expected {expected}")
        for index in range(count):
            yield self.decoded(source.expert(parts, index), layer_name, model.dtype)

    def _keep(self, layer_name: str, module: PackedModule, weights: dict[str, list[_Stored]]) -> dict[str, Any]:
        name = layer_name.rpartition(".")[2]
        if not is_concatenation(self.inner.operations) or module.packs_transposed:
            raise ValueError(
                f"{layer_name}: bitsandbytes has quantized its experts one by one, in a layout whose bytes cannot be "
                "kept for this model. Start from the bf16 checkpoint"
            )
        num_experts = module.num_experts_of(name)
        assert isinstance(self.inner, PackingConverter)
        self.inner.check_complete(layer_name, num_experts, {s: len(found) for s, found in weights.items()})
        experts = ([self.parts(found[e]) for found in weights.values()] for e in range(num_experts))
        return stored_parameters(module, layer_name, kept_stack(module, layer_name, experts))


def kept_stack(module: PackedModule, full_name: str, experts: Iterable[list[Parts]]) -> PackedStack:
    """The stack that bitsandbytes' matrices make up, without a change to a byte.

    Args:
        module: the (meta) module, which gives sizes and format.
        full_name: the parameter's name in the model.
        experts: for each expert the matrices whose rows follow one another in the stack.

    Raises:
        ValueError: a matrix has another format or shape than the module, or blocks that run over its end.
    """
    template = module.stack(full_name.rpartition(".")[2])
    rows = template.out_features
    stack: PackedStack | None = None
    for index, matrices in enumerate(experts):
        at_byte = at_scale = 0
        for parts in matrices:
            packed, absmax, state = packed_bytes(parts)
            _check_format(full_name, template, state, (rows // len(matrices), template.in_features))
            if stack is None:
                stack = PackedStack.empty(
                    *(template.num_experts, rows, template.in_features),
                    template.quant_type,
                    template.blocksize,
                    device=packed.device,
                )
                assert stack.absmax is not None
            stack.packed[index].view(-1)[at_byte : at_byte + packed.numel()] = packed
            stack.absmax[index].view(-1)[at_scale : at_scale + absmax.numel()] = absmax  # type: ignore[index]
            at_byte, at_scale = at_byte + packed.numel(), at_scale + absmax.numel()
    assert stack is not None
    return stack


def _check_format(name: str, stack: PackedStack, state: QuantState, shape: tuple[int, int]) -> None:
    _check_shape(name, tuple(state.shape), shape)
    if state.quant_type != stack.quant_type:
        raise ValueError(
            f"{name}: the checkpoint's experts are packed as {state.quant_type}, and their bytes are kept; set "
            f"experts_quant_type={state.quant_type!r} (it is {stack.quant_type!r})"
        )
    if shape[0] * shape[1] % state.blocksize:
        raise ValueError(
            f"{name}: the last block of an expert {list(shape)} is not full at blocksize {state.blocksize}, so its "
            "bytes cannot be kept. Start from the bf16 checkpoint"
        )
    if state.blocksize != stack.blocksize:
        raise ValueError(
            f"{name}: the checkpoint's experts have blocks of {state.blocksize} weights, and their bytes are kept; "
            f"set experts_blocksize={state.blocksize} (it is {stack.blocksize} for this shape)"
        )


def _check_shape(name: str, found: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if found != expected:
        raise ValueError(
            f"{name}: the checkpoint has shape {found}, expected {expected}; it belongs to another config"
        )


def requantizing_conversions(
    conversions: list[WeightTransform], model: PreTrainedModel, checkpoint: Checkpoint
) -> list[WeightTransform]:
    """The conversions of a load from a quantized checkpoint: of `model`'s own, those of experts are replaced."""
    result = _scale_renamings(checkpoint)
    for conversion in [*packing_conversions(conversions, model), *identity_converters(_float_stack_names(model))]:
        is_converter = isinstance(conversion, WeightConverter)
        result.append(ConvertedFromQuantized(conversion, checkpoint) if is_converter else conversion)
    result.append(WeightFromQuantized(checkpoint))
    _refuse_unread(result, model, checkpoint)
    return result


def _refuse_unread(conversions: list[WeightTransform], model: PreTrainedModel, checkpoint: Checkpoint) -> None:
    """Raises `ValueError` if a matrix in 8 bit would be cast to a float parameter as if its codes were values."""
    conversions = copy.deepcopy(conversions)  # they take note of the names they have seen
    renaming = [c for c in conversions if isinstance(c, WeightRenaming)]
    converters = [c for c in conversions if isinstance(c, WeightConverter)]
    parameters = model.state_dict()
    for name in checkpoint.tensors.eight_bit_matrices():
        target, pattern = rename_source_key(name, renaming, converters, model.base_model_prefix, parameters)
        if pattern is None and target in parameters and parameters[target].is_floating_point():
            raise ValueError(
                f"{name} is stored in 8 bit, and {checkpoint.source.method} has no scales for a weight of this name; "
                "start from the bf16 checkpoint"
            )


def _float_stack_names(model: nn.Module) -> list[str]:
    """Full names of the stacks of experts that are left in full precision."""
    return [
        f"{path}.{name}" if path else name
        for path, module in model.named_modules()
        if follows_experts_interface(module) and not isinstance(module, PackedModule)
        for name in stack_names(bool(module.has_gate))
    ]


def skipped_modules(model: PreTrainedModel, source: Source) -> list[str]:
    """Patterns of the modules of `model` that the source has left alone, whose names may be those of older layouts."""
    renaming = [c for c in get_model_conversion_mapping(model) if isinstance(c, WeightRenaming)]
    known = dict(model.named_modules())
    patterns: list[str] = []
    for name in source.skipped:
        # Renamings are written for weights, as in `block_sparse_moe.gate.weight`.
        renamed = apply_renamings(f"{name}.", renaming).removesuffix(".")
        for candidate in (name, renamed):
            expert = re.match(r"(.+)\.\d+(\.\D*)?$", candidate)
            module = known.get(expert[1]) if expert else None
            if expert and module is not None and not isinstance(module, nn.ModuleList | nn.ModuleDict):
                candidate = expert[1]  # one expert of what is a stack here
            pattern = candidate if _is_pattern(candidate) else re.escape(candidate)
            if any(first_match(n, [pattern]) for n in known):
                patterns.append(pattern)
    return list(dict.fromkeys(patterns))


def _is_pattern(name: str) -> bool:
    with suppress(ValueError):
        check_pattern(name)
        return True
    return False


def _scale_renamings(checkpoint: Checkpoint) -> list[WeightTransform]:
    """What stands for ``weight_scale_inv`` in some fp8 checkpoints (DeepSeek-V4, Mistral), as transformers has it."""
    if not isinstance(checkpoint.source, Fp8):
        return []
    return [
        _ScaleRenaming(rf"\.{name}$", ".weight_scale_inv", checkpoint.tensors) for name in ("scale", "qscale_weight")
    ]


def without_requantizing(conversions: Iterable[WeightTransform]) -> list[WeightTransform]:
    """The model's own conversions among those of `requantizing_conversions`, for saving."""
    return [c for c in conversions if not isinstance(c, _FromQuantized | _ScaleRenaming)]
