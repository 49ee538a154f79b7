"""A model's own converters, of experts or others, over the weights of a quantized checkpoint."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from bitsandbytes.functional import QuantState
from torch import Tensor
from transformers.core_model_loading import WeightConverter
from transformers.quantizers.quantizers_utils import get_module_from_name

from hf_qmoe.conversion import PackingConverter, QMoEKeep, is_concatenation, pack_parameter, stored_parameters
from hf_qmoe.layout import by_expert
from hf_qmoe.packed import PackedStack
from hf_qmoe.packed_module import PackedModule
from hf_qmoe.requantize.collect import Checkpoint, FromQuantized, Stored, check_shape
from hf_qmoe.sources.bitsandbytes_4bit import BitsAndBytes4bit, packed_bytes
from hf_qmoe.sources.source import Parts


class ConvertedFromQuantized(FromQuantized):
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
        self, weights: dict[str, list[Stored]], layer_name: str, model: Any, *others: Any
    ) -> dict[str, Any]:
        """What the model's converter makes of the weights, each of them read when it is asked for."""

        def reader(stored: Stored) -> Callable[[], Tensor]:
            return lambda: self.value(stored, layer_name, model.dtype)

        inner = self.inner
        for pattern, found in weights.items():
            inner.collected_tensors[pattern] = [reader(stored) for stored in found]
        inner.quantization_operation = self.quantization_operation
        converted: dict[str, Any] = inner.convert(layer_name, model, *others)
        return converted

    def _expert_by_expert(self, stored: Stored, layer_name: str, model: Any) -> Iterator[Tensor]:
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

    def _keep(self, layer_name: str, module: PackedModule, weights: dict[str, list[Stored]]) -> dict[str, Any]:
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
    check_shape(name, tuple(state.shape), shape)
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
