"""Models without weights: what a loader would leave of a checkpoint, on the meta device, for counting.

`from_pretrained` builds a model on the meta device, replaces modules and fills them. A skeleton goes through the same
steps, by the same code, and in place of filling gets empty tensors of the shapes that filling leaves. So the functions
that count a loaded model (`hf_qmoe.report`, `hf_qmoe.memory`) count a skeleton, and there is no second arithmetic.
"""

import copy
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from bitsandbytes.functional import QuantState
from bitsandbytes.nn.modules import Linear4bit, Params4bit
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedConfig, PreTrainedModel
from transformers.core_model_loading import build_glob_alternation
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.models.auto.auto_factory import _get_model_class
from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer

from hf_qmoe.config import QMoEConfig
from hf_qmoe.ops.formats import NESTED_BLOCKSIZE, codebook
from hf_qmoe.pending import PendingParametrization
from hf_qmoe.quantizer import prepare_model


@dataclass(frozen=True)
class Skeleton:
    """How to build a checkpoint's model without weights.

    Attributes:
        model_class: the class that would be loaded.
        config: its config, without what it says of quantization.
        dtype: dtype of its float weights.
    """

    model_class: type[PreTrainedModel]
    config: PreTrainedConfig
    dtype: torch.dtype

    @classmethod
    def read(cls, folder: Path, stored_dtype: torch.dtype | None, trust_remote_code: bool = False) -> "Skeleton":
        """Reads the ``config.json`` of `folder`.

        Args:
            stored_dtype: dtype of the weights on disk, taken where the config names none (float32 if that is `None`).
            trust_remote_code: run Python files of the folder.

        Raises:
            ValueError: transformers does not know the model, or the folder needs code of its own.
        """
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)
        dtype = getattr(config, "dtype", None) or stored_dtype or torch.float32
        dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
        for part in (config, *(getattr(config, name, None) for name in config.sub_configs)):
            if part is not None:
                part.dtype = dtype
                part.__dict__.pop("quantization_config", None)
        return cls(_model_class(config, folder, trust_remote_code), config, dtype)

    def plain(self) -> PreTrainedModel:
        """The float model."""
        return self._build(lambda model: None)

    def packed(self, config: QMoEConfig, pre_quantized: bool = False) -> PreTrainedModel:
        """The model as loaded with `config`.

        Raises:
            ValueError: `config` does not suit the model.
        """
        return self._build(lambda model: prepare_model(model, config, pre_quantized))

    def bitsandbytes(self) -> PreTrainedModel:
        """The model as loaded with ``BitsAndBytesConfig(load_in_4bit=True)`` by transformers alone."""
        quantizer = Bnb4BitHfQuantizer(BitsAndBytesConfig(load_in_4bit=True), pre_quantized=False)
        return self._build(lambda model: quantizer._process_model_before_weight_loading(model, device_map=None))

    def _build(self, prepare: Callable[[PreTrainedModel], object]) -> PreTrainedModel:
        with ExitStack() as contexts:
            for context in self.model_class.get_init_context(self.dtype, True, False, None):
                contexts.enter_context(context)
            model = self.model_class(copy.deepcopy(self.config))
            prepare(model)
        for module in list(model.modules()):
            if isinstance(module, PendingParametrization):
                module.parametrize()
            elif isinstance(module, Linear4bit):
                _fill_linear(module)
        model.tie_weights(recompute_mapping=False)
        _cast_as_planned(model, self.dtype)
        return model


def _model_class(config: PreTrainedConfig, folder: Path, trust_remote_code: bool) -> type[PreTrainedModel]:
    """The class that ``config.json`` names, or that of `AutoModelForCausalLM`."""
    remote = (getattr(config, "auto_map", None) or {}).get("AutoModelForCausalLM")
    if remote is not None and trust_remote_code:
        found: type[PreTrainedModel] = get_class_from_dynamic_module(remote, folder)
        return found
    for name in config.architectures or []:
        named = getattr(transformers, name, None)
        if isinstance(named, type) and issubclass(named, PreTrainedModel):
            return named
    if type(config) not in AutoModelForCausalLM._model_mapping:
        raise ValueError(f"transformers has no class {config.architectures} and no causal LM of {config.model_type!r}")
    found = _get_model_class(config, AutoModelForCausalLM._model_mapping)
    return found


def _fill_linear(linear: Linear4bit) -> None:
    """Gives a linear the tensors that quantizing its weight makes."""
    old: Any = linear.weight
    numel = linear.in_features * linear.out_features
    blocks = -(numel // -old.blocksize)

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    facts = {
        "shape": torch.Size((linear.out_features, linear.in_features)),
        "code": empty(codebook(old.quant_type, "cpu").numel()),
        "blocksize": old.blocksize,
        "quant_type": old.quant_type,
    }
    if old.compress_statistics:
        code = empty(codebook("int8", "cpu").numel())
        nested = QuantState(empty(-(blocks // -NESTED_BLOCKSIZE)), code=code, blocksize=NESTED_BLOCKSIZE)
        state = QuantState(empty(blocks, dtype=torch.uint8), offset=empty(), state2=nested, **facts)
    else:
        state = QuantState(empty(blocks), **facts)
    packed = empty((numel + 1) // (2 * old.quant_storage.itemsize), 1, dtype=old.quant_storage)
    settings = {**old.__dict__, "quant_state": state, "bnb_quantized": True}
    linear.weight = Params4bit(packed, requires_grad=False, **settings)
    linear.quant_state = state


def _cast_as_planned(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Casts what the model keeps in float32 whatever the dtype of the rest."""
    plan = model._get_dtype_plan(dtype)
    if not plan:
        return
    pattern, group_names, _ = build_glob_alternation(list(plan))
    for name, tensor in model.state_dict(keep_vars=True).items():
        match = pattern.search(name)
        if match is not None and tensor.is_floating_point() and not isinstance(tensor, Params4bit):
            tensor.data = tensor.data.to(plan[group_names[match.lastgroup]])
