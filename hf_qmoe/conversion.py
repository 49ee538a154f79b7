"""From checkpoint tensors to packed experts, as transformers reads the shards.

transformers v5 loads a MoE by collecting the tensors of all experts, merging them into ``[E, N, K]`` and handing that
to the quantizer: at its peak a whole layer in full precision. `PackingConverter` takes the place of such a converter
and pulls one expert at a time through the model's own operations, so that a single expert is ever in full precision.
Packed models are saved fused, in our layout, and read back by name: no converter is left for them then.
"""

import re
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from typing import Any

from bitsandbytes.nn.modules import Linear4bit
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import (
    Concatenate,
    ConversionOps,
    Interleave,
    MergeModulelist,
    Transpose,
    WeightConverter,
    WeightRenaming,
    WeightTransform,
)
from transformers.quantizers.quantizers_utils import get_module_from_name

from hf_qmoe import metadata
from hf_qmoe.layout import by_expert
from hf_qmoe.linears import quantize_linear_weight
from hf_qmoe.packed import PackedStack
from hf_qmoe.packed_module import SUFFIXES, PackedModule, as_stored
from hf_qmoe.parametrize import packed_parametrizations


class QMoEKeep(ConversionOps):
    """Passes on the one tensor of a checkpoint that is fused already."""

    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> dict[str, Any]:
        """Renames the tensor to its target."""
        (value,) = input_dict.values()
        return {target_patterns[0]: value}

    @property
    def reverse_op(self) -> ConversionOps:
        """Itself."""
        return QMoEKeep()


class QMoETranspose(ConversionOps):
    """``Transpose(check_dims=True)`` for a packed target: compares with the logical shape, not with the bytes'."""

    def __init__(self, dim0: int, dim1: int) -> None:
        self.dim0, self.dim1 = dim0, dim1

    def convert(
        self,
        input_dict: dict[str, Any],
        source_patterns: list[str],
        target_patterns: list[str],
        *,
        model: PreTrainedModel,
        full_layer_name: str,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Transposes unless the tensor has the target's shape already (whatever its number of experts)."""
        (value,) = input_dict.values()
        tensor = value[0] if isinstance(value, list) else value
        module, name = get_module_from_name(model, full_layer_name)
        is_packed = isinstance(module, PackedModule)  # not so for a stack that the config leaves out
        expected = module.float_shape(name) if is_packed else tuple(getattr(module, name).shape)
        if tuple(tensor.shape[1:]) != expected[1:]:
            tensor = tensor.transpose(self.dim0, self.dim1).contiguous()
        return {target_patterns[0]: tensor}

    @property
    def reverse_op(self) -> ConversionOps:
        """The stock operation, which saving a dequantized model uses."""
        return Transpose(self.dim1, self.dim0, check_dims=True)


def _for_packed_target(op: ConversionOps) -> ConversionOps:
    if isinstance(op, Transpose) and op.check_dims:
        return QMoETranspose(op.dim0, op.dim1)
    return op


def _works_per_expert(operations: list[ConversionOps]) -> bool:
    """Whether `operations` can run on one expert at a time: merge along 0, then nothing across experts."""
    merge, *rest = operations
    if not (isinstance(merge, MergeModulelist) and merge.dim == 0):
        return False
    for op in rest:
        if isinstance(op, Transpose | QMoETranspose):
            keeps_experts_apart = 0 not in (op.dim0, op.dim1)
        else:
            keeps_experts_apart = isinstance(op, Concatenate | Interleave) and op.dim != 0
        if not keeps_experts_apart:
            return False
    return True


class PackingConverter(WeightConverter):
    """A model's converter for an experts parameter, packing as it reads.

    For targets that are not packed (experts left out by the config) it does what the original did.
    """

    __slots__ = ()

    @classmethod
    def replacing(cls, converter: WeightConverter) -> "PackingConverter":
        """The packing form of a model's own converter, with its patterns and scope."""
        new = cls(
            list(converter._original_source_patterns),
            list(converter._original_target_patterns),
            operations=[_for_packed_target(op) for op in converter.operations],
            force_cpu=converter.force_cpu,
        )
        new.scope_prefix, new.base_model_prefix = converter.scope_prefix, converter.base_model_prefix
        return new

    def convert(
        self,
        layer_name: str,
        model: PreTrainedModel | None = None,
        config: Any = None,
        hf_quantizer: Any = None,
        loading_info: Any = None,
    ) -> dict[str, Any]:
        """Packs the collected tensors of the parameter `layer_name`.

        Returns:
            the packed parameter, its scales and the module's metadata, by full name.

        Raises:
            ValueError: experts are missing or too many, have a wrong shape, or hold values that are not finite.
        """
        assert model is not None
        module, name = get_module_from_name(model, layer_name)
        if not isinstance(module, PackedModule) or name not in module.stack_names:
            untouched: dict[str, Any] = super().convert(layer_name, model, config, hf_quantizer, loading_info)
            return untouched
        if _works_per_expert(self.operations):
            return pack_parameter(
                module, layer_name, self._merged_one_by_one(layer_name, module.num_experts_of(name), model, config)
            )
        self.quantization_operation = None  # type: ignore[misc]  # packing is done here, from the merged stacks
        merged = super().convert(layer_name, model, config, hf_quantizer, loading_info)
        return pack_merged(model, merged)

    def _merged_one_by_one(
        self, layer_name: str, num_experts: int, model: PreTrainedModel, config: Any
    ) -> Iterator[Tensor]:
        collected = {p: self.collected_tensors.pop(p) for p in self.source_patterns if p in self.collected_tensors}
        self.check_complete(layer_name, num_experts, {p: len(tensors) for p, tensors in collected.items()})
        if is_concatenation(self.operations):
            yield from _concatenated_one_by_one(layer_name, num_experts, list(collected.values()))
            return
        for expert in range(num_experts):
            parts: dict[str, Any] = {}
            for pattern, tensors in collected.items():
                parts[pattern] = [_materialize(tensors[expert])]
                tensors[expert] = None
            for op in self.operations:
                parts = op.convert(
                    parts,
                    source_patterns=self.source_patterns,
                    target_patterns=self.target_patterns,
                    full_layer_name=layer_name,
                    model=model,
                    config=config,
                    missing_keys=None,
                )
            (merged,) = parts.values()
            parts.clear()
            yield (merged[0] if isinstance(merged, list) else merged)[0]
            del merged

    def check_complete(self, layer_name: str, num_experts: int, counts: dict[str, int]) -> None:
        """Checks that every source has each expert exactly once.

        A list that is one short would shift all experts behind it.

        Args:
            counts: tensors that were found, by source pattern.

        Raises:
            ValueError: experts are missing, or there are others.
        """
        keys = sorted({key for keys in self.layer_targets.values() for key in keys})
        expected = set(range(num_experts))
        for pattern in self.source_patterns:
            finder = re.compile(r"(?P<expert>\d+)".join(pattern.split("*", 1)))
            found = [int(match["expert"]) for match in map(finder.search, keys) if match]
            present = set(found) if found else set(range(counts.get(pattern, 0)))
            problems = []
            if missing := sorted(expected - present):
                problems.append(f"is missing experts {missing}")
            if extra := sorted(present - expected):
                problems.append(f"has unexpected experts {extra}")
            if not problems and counts.get(pattern, 0) != num_experts:
                problems.append(f"has {counts.get(pattern, 0)} tensors")
            if problems:
                raise ValueError(
                    f"{layer_name}: the checkpoint {' and '.join(problems)} for '{pattern.lstrip('.')}', where "
                    f"{num_experts} experts are expected. It is incomplete or belongs to another config; get it "
                    "again. Nothing was initialised in their place."
                )


def is_concatenation(operations: list[ConversionOps]) -> bool:
    """Whether `operations` merge experts and concatenate rows, as for gate and up, or merge one projection."""
    merge, *rest = operations
    if not (isinstance(merge, MergeModulelist) and merge.dim == 0):
        return False
    return not rest or (len(rest) == 1 and isinstance(rest[0], Concatenate) and rest[0].dim == 1)


def _concatenated_one_by_one(name: str, num_experts: int, sources: list[list[Any]]) -> Iterator[Tensor]:
    """What merge and concatenate give, with one buffer for all experts and one part at a time beside it."""
    buffer: Tensor | None = None
    for expert in range(num_experts):
        for index, tensors in enumerate(sources):
            part = _materialize(tensors[expert])
            tensors[expert] = None
            if buffer is None:
                if part.ndim != 2:
                    raise ValueError(f"{name}: expert {expert} has shape {tuple(part.shape)}, not [out, in]")
                rows, columns = part.shape
                buffer = part.new_empty(len(sources) * rows, columns)
            if part.shape != (rows, columns):
                raise ValueError(
                    f"{name}: expert {expert} has parts of shape {tuple(part.shape)} and {(rows, columns)}, which "
                    "should be equal; the checkpoint is damaged or belongs to another config"
                )
            buffer[index * rows : (index + 1) * rows] = part
            del part
        if buffer is not None:
            yield buffer


def _materialize(tensor: Any) -> Tensor:
    if isinstance(tensor, Future):
        tensor = tensor.result()
    elif callable(tensor):
        tensor = tensor()
    if not isinstance(tensor, Tensor):
        raise NotImplementedError("experts spread over ranks while loading are not supported yet")
    return tensor


def pack_merged(model: nn.Module, merged: dict[str, Any]) -> dict[str, Any]:
    """Packs those of the full-named float tensors in `merged` whose target is packed; passes the others on.

    Raises:
        ValueError: a stack has another number of experts than the module, or cannot be packed.
    """
    out: dict[str, Any] = {}
    for full_name, value in merged.items():
        stack = value[0] if isinstance(value, list) else value
        module, name = get_module_from_name(model, full_name)
        if not isinstance(module, PackedModule) or name not in module.stack_names:
            out[full_name] = stack
            continue
        if tuple(stack.shape) != module.float_shape(name):
            raise ValueError(
                f"{full_name}: the checkpoint has shape {tuple(stack.shape)}, expected {module.float_shape(name)}; "
                "it belongs to another config"
            )
        out.update(pack_parameter(module, full_name, by_expert(stack, module.num_experts_of(name))))
    return out


def pack_parameter(
    module: PackedModule, full_name: str, experts: Iterable[Tensor]
) -> dict[str, nn.Parameter | Tensor]:
    """Packs the experts of one projection into new tensors.

    Args:
        module: the (meta) module, which gives sizes and format.
        full_name: the parameter's name in the model.
        experts: E matrices in the model's own layout; each may be freed when the next is asked for.

    Returns:
        packed parameter, scales and ``quant_metadata``, by full name. Nothing is set on `module`.

    Raises:
        ValueError: a wrong shape, or values that are not finite.
    """
    template = module.stack(full_name.rpartition(".")[2])
    stack: PackedStack | None = None
    for index, expert in enumerate(experts):
        if stack is None:
            stack = PackedStack.empty(
                template.num_experts,
                template.out_features,
                template.in_features,
                template.quant_type,
                template.blocksize,
                template.double_quant,
                expert.device,
            )
        try:
            stack.quantize_expert_(index, expert.t() if module.packs_transposed else expert)
        except ValueError as error:
            raise ValueError(f"{full_name}: {error}") from None
    assert stack is not None
    return stored_parameters(module, full_name, stack)


def stored_parameters(module: PackedModule, full_name: str, stack: PackedStack) -> dict[str, nn.Parameter | Tensor]:
    """Packed parameter, scales and ``quant_metadata`` of `stack`, which is to be `module`'s, by full name."""
    out: dict[str, nn.Parameter | Tensor] = {
        full_name + SUFFIXES[field]: nn.Parameter(as_stored(tensor), requires_grad=False)
        for field, tensor in stack.tensors().items()
    }
    description = metadata.encode(module.description)
    out[f"{full_name.rpartition('.')[0]}.quant_metadata"] = description.to(stack.packed.device)
    return out


class QMoEQuantize(ConversionOps):
    """The quantization operation of a load, for one parameter: a fused experts stack or the weight of a linear."""

    def convert(
        self,
        input_dict: dict[str, Any],
        source_patterns: list[str],
        target_patterns: list[str],
        *,
        model: PreTrainedModel,
        full_layer_name: str,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Quantizes for the target, by what its module is."""
        module, _ = get_module_from_name(model, full_layer_name)
        if not isinstance(module, Linear4bit):
            return pack_merged(model, input_dict)
        ((name, value),) = input_dict.items()
        weight = value[0] if isinstance(value, list) else value
        try:
            quantized = quantize_linear_weight(weight, module.weight)  # type: ignore[arg-type]
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        module._is_hf_initialized = True  # type: ignore[assignment]  # or its bytes would be drawn anew
        return {name: quantized}


def packed_parameter_names(model: nn.Module) -> list[str]:
    """Full names of all packed parameters (not their scales), as a checkpoint has them."""
    names = []
    for path, module in model.named_modules():
        own = list(module.stack_names) if isinstance(module, PackedModule) else []
        own += [name for name, _, _ in packed_parametrizations(module)]
        names += [f"{path}.{name}" if path else name for name in own]
    return names


def parametrized_names(model: nn.Module) -> list[WeightTransform]:
    """Renames the tensors of parametrized weights from what a checkpoint calls them; saving reverses it.

    A checkpoint has ``experts.gate_up_proj`` and ``experts.gate_up_proj_absmax``, whichever form the module takes;
    torch calls them ``experts.parametrizations.gate_up_proj.original`` and ``....0.absmax``.
    """
    renamings = []
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        for name, parametrization, packed in packed_parametrizations(module):
            chain = f"{prefix}parametrizations.{name}"
            for field in parametrization.stack(packed).tensors():
                kept = f"{chain}.original" if field == "packed" else f"{chain}.0.{field}"
                renamings.append(WeightRenaming(f"{prefix}{name}{SUFFIXES[field]}", kept))
    return renamings


def targets_any(transform: WeightTransform, names: Iterable[str]) -> bool:
    """Whether `transform` is a converter with one of the parameters `names` as a target."""
    if not isinstance(transform, WeightConverter):
        return False
    patterns = [re.compile(t.replace("*", ".*") + r"(?!\w)") for t in transform.target_patterns if r"\1" not in t]
    return any(pattern.search(name) for pattern in patterns for name in names)


def identity_converters(names: Iterable[str]) -> list[PackingConverter]:
    """Converters for checkpoints that hold the stacks fused already, one per distinct name after the layer number."""
    tails = {re.split(r"\.\d+\.", name)[-1] for name in names}
    return [PackingConverter([re.escape(tail)], [tail], operations=[QMoEKeep()]) for tail in sorted(tails)]


def packing_conversions(conversions: list[WeightTransform], model: nn.Module) -> list[WeightTransform]:
    """The conversions of a load that packs: expert converters replaced, the others kept in their order."""
    names = packed_parameter_names(model)
    replaced = [PackingConverter.replacing(c) if targets_any(c, names) else c for c in conversions]
    return [*replaced, *identity_converters(names)]


def quantized_parameter_names(model: nn.Module) -> list[str]:
    """Full names of packed parameters and of the weights of bitsandbytes' linears."""
    linears = [f"{name}.weight" for name, module in model.named_modules() if isinstance(module, Linear4bit)]
    return [*packed_parameter_names(model), *linears]


def without_quantized_targets(conversions: list[WeightTransform], model: nn.Module) -> list[WeightTransform]:
    """The conversions that hold for a stored quantized model: its tensors are stored under the names they have."""
    names = quantized_parameter_names(model)
    return [c for c in conversions if not targets_any(c, names)]
