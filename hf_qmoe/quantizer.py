"""`QMoEHfQuantizer`: the hooks that transformers calls while it loads, saves and dequantizes a model."""

import copy
import re
from typing import Any, ClassVar

import torch
from bitsandbytes.nn.modules import Linear4bit
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import ConversionOps, PrefixChange, WeightTransform
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer
from transformers.quantizers.quantizers_utils import get_module_from_name

from hf_qmoe.checkpoint import check_files
from hf_qmoe.config import QMoEConfig
from hf_qmoe.conversion import (
    QMoEQuantize,
    packing_conversions,
    parametrized_names,
    quantized_parameter_names,
    targets_any,
    without_quantized_targets,
)
from hf_qmoe.experts import ExpertsNbit
from hf_qmoe.guard import refuse_leftovers, refuse_unplanned
from hf_qmoe.layout import check_values, follows_experts_interface, stack_names
from hf_qmoe.linears import replace_linears, restore_linears
from hf_qmoe.logging import get_logger, warn_once
from hf_qmoe.memory import attach_counters, detach_counters
from hf_qmoe.naming import first_match
from hf_qmoe.ops.cuda import READS_ON_HOST
from hf_qmoe.packed_module import SUFFIXES, PackedModule
from hf_qmoe.parametrize import packed_parametrizations, restore_parameter
from hf_qmoe.pending import PendingParametrization
from hf_qmoe.requantize.collect import Checkpoint
from hf_qmoe.requantize.conversions import requantizing_conversions, skipped_modules, without_requantizing
from hf_qmoe.selection import (
    experts_modules,
    experts_to_pack,
    is_parametrized_form,
    linears_to_skip,
    warn_unused_patterns,
)
from hf_qmoe.sources.tensors import CheckpointTensors
from hf_qmoe.stored_linears import lacking, linear_conversions
from hf_qmoe.ties import describe_tied, tie_scales


logger = get_logger(__name__)

#: Where a loaded model remembers the conversions of its float checkpoint, for `dequantize`.
_FLOAT_CONVERSIONS = "_qmoe_float_conversions"


class QMoEHfQuantizer(Bnb4BitHfQuantizer):
    """Linears as its parent does them, fused experts as `ExpertsNbit`."""

    quantization_config: QMoEConfig
    serialized_names: ClassVar[dict[str, list[str]]] = {
        **Bnb4BitHfQuantizer.serialized_names,
        # The suffixes let a parallel plan for `experts.gate_up_proj` cover its scales too.
        **{name: [name + s for s in SUFFIXES.values()] for name in ("gate_up_proj", "up_proj", "down_proj")},
    }

    def __init__(self, quantization_config: QMoEConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        if quantization_config.source is not None:  # to be packed as it is loaded, as a float checkpoint is
            self.pre_quantized = False
        self._checkpoint: Checkpoint | None = None
        self._left_alone: set[str] = set()

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        """Checks as bitsandbytes' quantizer; without quantized linears any placement is fine."""
        device_map = kwargs.get("device_map")
        if not self.quantization_config.quantize_linears:
            kwargs["device_map"] = None
        elif isinstance(device_map, dict) and not self.quantization_config.llm_int8_enable_fp32_cpu_offload:
            values = {str(value) for value in device_map.values()}
            if values != {"cpu"} and values & {"cpu", "disk"}:
                raise ValueError(
                    "device_map places modules on the CPU or the disk, where bitsandbytes' linears cannot be "
                    "offloaded. Packed experts can: set quantize_linears=False (linears stay in full precision), or "
                    "llm_int8_enable_fp32_cpu_offload=True (only those on CPU or disk do)."
                )
        super().validate_environment(*args, **kwargs)

    @property
    def is_compileable(self) -> bool:
        """True: `generate` may compile the model for a static cache."""
        return bool(READS_ON_HOST)  # without the tag a CUDA graph, which is transformers' default, would fail

    # -- before loading -----------------------------------------------------------------------------------------

    def _process_model_before_weight_loading(
        self, model: PreTrainedModel, device_map: Any = None, checkpoint_files: list[str] | None = None, **kwargs: Any
    ) -> None:
        source = self.quantization_config.source
        check_files(checkpoint_files, self.pre_quantized or source is not None)
        if source is not None:
            if not checkpoint_files:
                raise ValueError(
                    "quantized weights are read from a checkpoint's files; `state_dict=` cannot hold them"
                )
            self._checkpoint = Checkpoint(source, CheckpointTensors(checkpoint_files))
            skipped = [*(self.quantization_config.modules_to_not_convert or []), *skipped_modules(model, source)]
            self.quantization_config.modules_to_not_convert = skipped or None
        self._left_alone = prepare_model(model, self.quantization_config, self.pre_quantized, device_map)

    def param_needs_quantization(self, model: PreTrainedModel, param_name: str, **kwargs: Any) -> bool:
        """True for tensors of packed experts and the weights of bitsandbytes' linears."""
        module, name = get_module_from_name(model, param_name)
        if isinstance(getattr(module, name, None), DTensor):
            raise NotImplementedError(
                "loading a QMoEConfig model in shards (transformers' tensor, expert or fully sharded parallelism) is "
                "not supported; load it whole on each rank, and shard it then, for example with FSDP2's fully_shard"
            )
        if isinstance(module, PackedModule):
            # True for stored tensors also turns off the loader's shape check: it would offer to initialise them anew
            # (`ignore_mismatched_sizes`). `refuse_incomplete` checks shapes.
            return name in module.stored_names if self.pre_quantized else name in module.stack_names
        return bool(super().param_needs_quantization(model, param_name, **kwargs))

    def param_element_size(self, model: PreTrainedModel, param_name: str, param: torch.Tensor) -> float:
        """Bytes per element: packed placeholders have their packed shape already."""
        module, _ = get_module_from_name(model, param_name)
        if isinstance(module, PackedModule):
            return param.element_size()
        return float(super().param_element_size(model, param_name, param))

    def adjust_max_memory(self, max_memory: dict[str, Any]) -> dict[str, Any]:
        """As given: bitsandbytes' quantizer keeps a tenth for buffers, of which an expert at a time needs few."""
        return max_memory

    def get_new_dtype(self, converter: Any, param: Any, dtype: torch.dtype | None) -> torch.dtype | None:
        """The dtype a checkpoint tensor is cast to; never from float to the integers that packed tensors are."""
        new = super().get_new_dtype(converter, param, dtype)
        return new if new is None or new.is_floating_point else None

    def get_quantize_ops(self) -> ConversionOps:
        """The operation that quantizes one parameter as it is loaded."""
        return QMoEQuantize()

    def get_weight_conversions(self) -> list[WeightTransform]:
        """None beside those of `update_weight_conversions`."""
        return []

    def update_weight_conversions(
        self, weight_conversions: list[WeightTransform], model: PreTrainedModel
    ) -> list[WeightTransform]:
        """Replaces the model's expert converters by packing ones, or drops them where the checkpoint is packed."""
        setattr(model, _FLOAT_CONVERSIONS, list(weight_conversions))
        if self._checkpoint is not None:
            return requantizing_conversions(weight_conversions, model, self._checkpoint)
        if not self.pre_quantized:
            return packing_conversions(weight_conversions, model)
        return without_quantized_targets(weight_conversions, model) + linear_conversions(model, self)

    # -- after loading ------------------------------------------------------------------------------------------

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> PreTrainedModel:
        describe_tied(model)
        refuse_incomplete(model)
        parametrize_pending(model)
        refuse_unplanned(model, self._left_alone)
        names = quantized_parameter_names(model)
        floats: list[WeightTransform] = getattr(model, _FLOAT_CONVERSIONS)
        setattr(model, _FLOAT_CONVERSIONS, [c for c in floats if c.was_used() or targets_any(c, names)])
        conversions = getattr(model, "_weight_conversions", None) or []
        if self._checkpoint is not None:
            conversions = without_requantizing(conversions)
            _forget_source(model)
            self.quantization_config.source = self._checkpoint = None
        set_saved_conversions(model, conversions)
        model.is_loaded_in_4bit = True
        attach_counters(model)
        return model

    # -- partly float -----------------------------------------------------------------------------------------------

    def leave_out(self, model: PreTrainedModel, paths: list[str]) -> None:
        """Takes note that the modules at `paths` hold float weights now (a merge has un-quantized them).

        The config lists them from then on, so that the model can be saved and loaded again. A model with nothing
        quantized in it is an ordinary float one.
        """
        if not quantized_parameter_names(model):
            self._dequantize(model, model.dtype)
            self.remove_quantization_config(model)
            return
        config = self.quantization_config
        config.modules_to_not_convert = [*(config.modules_to_not_convert or []), *paths]
        set_saved_conversions(model, getattr(model, _FLOAT_CONVERSIONS, None) or default_conversions(model))

    # -- back to float ------------------------------------------------------------------------------------------

    def _dequantize(self, model: PreTrainedModel, dtype: torch.dtype | None = None) -> PreTrainedModel:
        if isinstance(dtype, str):  # saving a model leaves its config with the dtype's name
            dtype = getattr(torch, dtype)
        before = model.dtype
        dtype = dtype or before
        names = [name for name, module in model.named_modules() if isinstance(module, ExpertsNbit)]
        if any(parameter.is_meta for parameter in model.parameters()):
            raise ValueError("parts of the model are offloaded; load it without offloading to dequantize it")
        if _has_adapters(model):
            raise ValueError("the model has adapters; unload or merge them before it is dequantized")
        for module in model.modules():
            if isinstance(module, PreTrainedModel):
                module._weight_conversions = None
        model._weight_conversions = getattr(model, _FLOAT_CONVERSIONS, None)
        restore_linears(model, dtype)
        for name in names:
            model.get_submodule(name).to_experts(dtype)
        for module in model.modules():
            for name in [name for name, _, _ in packed_parametrizations(module)]:
                restore_parameter(module, name, dtype)
        model.tie_weights()  # what was tied packed has been unpacked twice
        if dtype != before:
            for tensor in (*model.parameters(), *model.buffers()):
                if tensor.dtype == before:  # what the model keeps in float32 stays
                    tensor.data = tensor.data.to(dtype)
            model.config.dtype = dtype
        detach_counters(model)
        model.is_loaded_in_4bit = False
        model.__dict__.pop(_FLOAT_CONVERSIONS, None)
        return model

    def remove_quantization_config(self, model: PreTrainedModel) -> None:
        """Also clears the flags that this quantizer and transformers set on the configs."""
        super().remove_quantization_config(model)
        for module in model.modules():
            if isinstance(module, PreTrainedModel):
                module.config.__dict__.pop("_is_quantized", None)


def prepare_model(model: PreTrainedModel, config: QMoEConfig, pre_quantized: bool, device_map: Any = None) -> set[str]:
    """Replaces modules of a model on the meta device by their packed forms, for a loader to fill.

    Returns:
        names of the experts that stay in full precision.
    """
    warn_unused_patterns(model, config)
    chosen = experts_to_pack(model, config)
    skipped_linears = linears_to_skip(model, config)
    floats = refuse_leftovers(model, config, chosen, skipped_linears)
    compute_dtype = resolve_compute_dtype(model, config)
    with torch.device("meta"):
        for name, quant_type in chosen.items():
            pack_module(model.get_submodule(name), quant_type, config, compute_dtype)
    tie_scales(model)
    if not config.quantize_linears:
        return floats
    if config.llm_int8_enable_fp32_cpu_offload and isinstance(device_map, dict):
        offloaded = [re.escape(key) for key, value in device_map.items() if value in ("cpu", "disk")]
        skipped_linears += [name for name, _ in model.named_modules() if first_match(name, offloaded)]
    replace_linears(model, skipped_linears, config, compute_dtype, pre_quantized)
    return floats


def resolve_compute_dtype(model: PreTrainedModel, config: QMoEConfig) -> torch.dtype:
    """The config's compute dtype, or the model's."""
    dtype: torch.dtype = model.dtype if config.bnb_4bit_compute_dtype is None else config.bnb_4bit_compute_dtype
    return dtype


def pack_module(module: nn.Module, quant_type: str, config: QMoEConfig, compute_dtype: torch.dtype) -> PackedModule:
    """Packs an experts module in place, in the form and with the fields of `config`."""
    operands = module, quant_type, config.experts_blocksize, config.experts_double_quant, compute_dtype
    if is_parametrized_form(module, config):
        return PendingParametrization.pack(*operands)
    packed = ExpertsNbit.from_experts(*operands)
    packed.exact = config.experts_exact
    return packed


def parametrize_pending(model: nn.Module) -> None:
    """Parametrizes the modules that have been filled.

    Raises:
        NotImplementedError: such a module was offloaded to disk while it was loaded.
    """
    for path, module in model.named_modules():
        if not isinstance(module, PendingParametrization):
            continue
        if any(parameter.is_meta for parameter in module.parameters(recurse=False)):
            raise NotImplementedError(
                f"{path} is packed in the parametrized form, which cannot be offloaded to disk by a device_map. Place "
                "it on a device or the CPU, or take experts_module='nbit' where the model allows it."
            )
        module.parametrize()


def default_conversions(model: PreTrainedModel) -> list[WeightTransform]:
    """What transformers would reverse when saving a model that was not loaded from a checkpoint."""
    conversions = get_model_conversion_mapping(model, add_legacy=False)
    return [c for c in conversions if not isinstance(c, PrefixChange)]


def set_saved_conversions(model: PreTrainedModel, conversions: list[WeightTransform]) -> None:
    """Sets what saving reverses, on `model` and on the models inside it, which can be saved on their own."""
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            own = conversions if module is model else default_conversions(module)
            module._weight_conversions = without_quantized_targets(own, module) + parametrized_names(module)


def refuse_incomplete(model: nn.Module) -> None:
    """Raises unless every tensor of experts and quantized linears came from the checkpoint and is what it should be.

    Raises:
        ValueError: names the tensors that are missing, or the module whose bytes contradict the config.
    """
    missing: list[str] = []
    for path, module in model.named_modules():
        if isinstance(module, PackedModule):
            missing += _check_loaded(path, module)
        elif follows_experts_interface(module):
            for name in stack_names(bool(module.has_gate)):
                if not getattr(module, name).is_floating_point():
                    raise ValueError(f"{path}.{name} is stored packed, but the config leaves {path} unquantized")
            missing += [f"{path}.{name}" for name, p in module.named_parameters() if not _is_loaded(p)]
        elif isinstance(module, Linear4bit):
            own = lacking(module) or [n for n, p in module.named_parameters(recurse=False) if not _is_loaded(p)]
            missing += [f"{path}.{name}" for name in own]
    if missing:
        raise ValueError(
            f"the checkpoint lacks {len(missing)} tensors of experts or quantized linears: {', '.join(missing[:8])}"
            f"{', ...' if len(missing) > 8 else ''}. It is incomplete or belongs to another config; get it again. "
            "Nothing was initialised in their place. A new linear, such as a head to be trained, must be listed in "
            "`modules_to_not_convert`."
        )


def _is_loaded(tensor: torch.Tensor) -> bool:
    # Tensors on the meta device are offloaded: they were written to disk as they were loaded.
    return tensor.is_meta or getattr(tensor, "_is_hf_initialized", False)


def _check_loaded(path: str, module: PackedModule) -> list[str]:
    """Checks what was loaded into `module`; returns the full names of tensors that were not."""
    tensors = {n: t for n, t in (*module.named_parameters(), *module.named_buffers()) if not t.is_meta}
    loaded = {name for name, tensor in tensors.items() if _is_loaded(tensor)}
    try:
        module.check_stored(loaded.intersection(module.stored_names))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return [f"{path}.{name}" for name in tensors if name not in loaded]


def _forget_source(model: PreTrainedModel) -> None:
    """Takes a foreign method out of the configs of parts: some checkpoints name it for the language model alone."""
    for name in model.config.sub_configs:
        part = getattr(model.config, name, None)
        if part is not None:
            part.__dict__.pop("quantization_config", None)


def _has_adapters(model: nn.Module) -> bool:
    return any(hasattr(module, "base_layer") for module in model.modules())


def _refuse_unsuitable(model: PreTrainedModel) -> None:
    is_quantized = getattr(model, "is_quantized", False) or getattr(model, "hf_quantizer", None) is not None
    if is_quantized and not _is_unpacked_gguf(model):
        raise ValueError("the model is quantized already; start from a float model, or call model.dequantize()")
    if getattr(model, "peft_config", None) or _has_adapters(model):
        raise ValueError("the model has adapters; quantize it first, then add them")
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ValueError("the model has no weights (meta device); load it with `from_pretrained` and a QMoEConfig")


def _is_unpacked_gguf(model: PreTrainedModel) -> bool:
    """Whether `model` came from a GGUF file and is float all the same: transformers still calls it quantized."""
    is_gguf = str(getattr(model, "quantization_method", "")).lower().endswith("gguf")
    return is_gguf and all(parameter.is_floating_point() for parameter in model.parameters())


def quantize_experts(model: PreTrainedModel, config: QMoEConfig | None = None) -> PreTrainedModel:
    """Quantizes a float model that is in memory already, in place.

    The result is what `from_pretrained(..., quantization_config=config)` gives for the same weights: it saves, reloads
    and dequantizes the same way.

    Args:
        model: a float transformers model on a real device.
        config: `QMoEConfig()` if omitted.

    Returns:
        `model`.

    Raises:
        ValueError: the model is quantized already, has experts that cannot be packed, or weights that are not finite;
            the model is unchanged then.
    """
    config = copy.deepcopy(config or QMoEConfig())  # the caller may change or reuse theirs
    _refuse_unsuitable(model)
    warn_unused_patterns(model, config)
    compute_dtype = resolve_compute_dtype(model, config)
    skipped_linears = linears_to_skip(model, config)
    chosen = experts_to_pack(model, config)
    refuse_leftovers(model, config, chosen, skipped_linears)
    conversions = getattr(model, "_weight_conversions", None)
    setattr(model, _FLOAT_CONVERSIONS, conversions)
    for name, quant_type in chosen.items():  # all checks before the first change
        check_values(model.get_submodule(name), quant_type, name)
    if _is_unpacked_gguf(model):
        HfQuantizer.remove_quantization_config(model.hf_quantizer, model)
    for name, quant_type in chosen.items():
        pack_module(model.get_submodule(name), quant_type, config, compute_dtype)
    tie_scales(model)
    parametrize_pending(model)
    if config.quantize_linears:
        replace_linears(model, skipped_linears, config, compute_dtype)
    set_saved_conversions(model, default_conversions(model) if conversions is None else conversions)

    quantizer = QMoEHfQuantizer(config, pre_quantized=False)
    model.hf_quantizer = quantizer
    model.is_quantized, model.quantization_method, model.is_loaded_in_4bit = True, config.quant_method, True
    model.config.quantization_config = config
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            module.config._is_quantized = True
    attach_counters(model)
    return model


class HintingBnb4BitHfQuantizer(Bnb4BitHfQuantizer):
    """bitsandbytes' quantizer, saying once what it leaves in full precision."""

    def _process_model_before_weight_loading(self, model: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        if experts_modules(model, "auto"):
            problem = (
                "cannot be read from a checkpoint that stores each expert in 4 bit"
                if self.pre_quantized
                else "stay in full precision"
            )
            warn_once(
                logger,
                f"BitsAndBytesConfig(load_in_4bit=True) quantizes nn.Linear only: the fused experts of "
                f"{type(model).__name__} {problem}. To pack them, pass quantization_config=hf_qmoe.QMoEConfig(), or "
                "call hf_qmoe.enable() first.",
            )
        return super()._process_model_before_weight_loading(model, *args, **kwargs)
