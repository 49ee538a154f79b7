"""Parameters called ``weight`` of a quantized checkpoint: linears, routers, whatever else it has quantized."""

from typing import Any

from bitsandbytes.nn.modules import Linear4bit, Params4bit
from torch import Tensor
from transformers import PreTrainedModel
from transformers.quantizers.quantizers_utils import get_module_from_name

from hf_qmoe.conversion import QMoEQuantize
from hf_qmoe.requantize.collect import Checkpoint, FromQuantized, check_shape
from hf_qmoe.sources.bitsandbytes_4bit import BitsAndBytes4bit, packed_bytes
from hf_qmoe.sources.source import Parts


class WeightFromQuantized(FromQuantized):
    """For a parameter called ``weight``, whether quantized in the checkpoint or not."""

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
        ((stored,),) = self.weights().values()
        module, name = get_module_from_name(model, layer_name)
        is_quantized, is_linear = self.is_quantized(stored), isinstance(module, Linear4bit)
        if is_linear and is_quantized and isinstance(self.checkpoint.source, BitsAndBytes4bit):
            return {layer_name: _kept_linear(module, self.parts(stored), layer_name)}
        value = self.value(stored, layer_name, model.dtype)
        if is_linear:
            return _quantized_linear(model, layer_name, value)
        # What is not quantized was read in the right dtype by the loader.
        return {layer_name: value.to(getattr(module, name).dtype) if is_quantized else value}


def _quantized_linear(model: PreTrainedModel, name: str, weight: Tensor) -> dict[str, Any]:
    module, _ = get_module_from_name(model, name)
    check_shape(name, tuple(weight.shape), (module.out_features, module.in_features))
    return QMoEQuantize().convert(
        {name: weight}, source_patterns=[], target_patterns=[], model=model, full_layer_name=name
    )


def _kept_linear(module: Linear4bit, parts: Parts, name: str) -> Params4bit:
    _, _, state = packed_bytes(parts)
    check_shape(name, tuple(state.shape), (module.out_features, module.in_features))
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
