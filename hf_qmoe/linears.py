"""`nn.Linear` to bitsandbytes' `Linear4bit` and back: on the meta device for a loader, or with weights in memory."""

from collections.abc import Iterable
from typing import Any

import torch
from bitsandbytes.functional import QuantState, dequantize_4bit
from bitsandbytes.nn.modules import Linear4bit, Params4bit, fix_4bit_weight_quant_state_from_module
from torch import Tensor, nn

from hf_qmoe.config import QMoEConfig
from hf_qmoe.matmul import matmul_4bit
from hf_qmoe.offload import unload_when_interrupted
from hf_qmoe.ops.formats import NESTED_BLOCKSIZE, codebook, compress_absmax, quantize


class QMoELinear4bit(Linear4bit):
    """bitsandbytes' linear with a forward that sets nothing on the module, and `matmul_4bit` as its product.

    The arguments are those of `Linear4bit`; without a `compute_dtype` the input's dtype is taken. It never rewrites
    its weight for inference on AVX512-BF16 CPUs, as bitsandbytes' does in the first eval-mode forward: that rounds
    scales to bfloat16 for good and computes without autograd from then on, in training too.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[no-untyped-call]
        self.support_avx512bf16_for_cpu = False
        unload_when_interrupted(self)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: Any, strict: bool, *messages: list[str]
    ) -> None:
        # bitsandbytes writes scales and codebooks beside the bytes but reads the bytes alone, under the scales it has.
        start = f"{prefix}weight."
        stored = {key: state_dict.pop(key) for key in list(state_dict) if key.startswith(start)}
        current = getattr(self.weight, "quant_state", None) or self.quant_state
        bytes_of = state_dict.get(f"{prefix}weight")
        if isinstance(bytes_of, Tensor) and current is not None and not bytes_of.is_floating_point():
            if not stored:
                messages[-1].append(f"{prefix}weight holds packed bytes without their scales")
                return
            state = QuantState.from_dict({k.removeprefix(start): v for k, v in stored.items()}, self.weight.device)
            if tuple(state.shape) != tuple(current.shape):
                messages[-1].append(f"{prefix}weight was packed as {tuple(state.shape)}, expected {current.shape}")
                return
            state.dtype = current.dtype
            self.quant_state = state
            if isinstance(self.weight, Params4bit):
                self.weight.quant_state = state
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, *messages)

    def forward(self, x: Tensor) -> Tensor:
        """``[..., in_features]`` to ``[..., out_features]``, in the dtype of `x`.

        Raises:
            ValueError: the weight is not quantized yet.
        """
        fix_4bit_weight_quant_state_from_module(self)
        compute_dtype = self.compute_dtype or x.dtype
        bias = None if self.bias is None else self.bias.to(compute_dtype)
        weight: Any = self.weight
        return matmul_4bit(x.to(compute_dtype), weight, weight.quant_state, bias=bias).to(x.dtype)


def replace_linears(
    model: nn.Module,
    skipped: Iterable[str],
    config: QMoEConfig,
    compute_dtype: torch.dtype,
    pre_quantized: bool = False,
) -> None:
    """Replaces every plain `nn.Linear` whose full name is not in `skipped`.

    Args:
        pre_quantized: the weights to come are packed already (only matters on the meta device).
    """
    skipped = set(skipped)
    for name, linear in list(model.named_modules()):
        if type(linear) is nn.Linear and name not in skipped:
            model.set_submodule(name, _linear_4bit(linear, config, compute_dtype, pre_quantized))


def _linear_4bit(
    linear: nn.Linear, config: QMoEConfig, compute_dtype: torch.dtype, pre_quantized: bool
) -> QMoELinear4bit:
    with torch.device("meta"):
        new = QMoELinear4bit(
            linear.in_features,
            linear.out_features,
            linear.bias is not None,
            compute_dtype,
            compress_statistics=config.bnb_4bit_use_double_quant,
            quant_type=config.bnb_4bit_quant_type,
            quant_storage=config.bnb_4bit_quant_storage,
        )
    if linear.weight.is_meta:
        new._is_hf_initialized = True  # type: ignore[assignment]  # nothing may be drawn anew; see `refuse_incomplete`
        if pre_quantized:
            new.weight.data = new.weight.data.to(config.bnb_4bit_quant_storage)
    else:
        new.weight = quantize_linear_weight(linear.weight.data, new.weight)  # type: ignore[arg-type]
        new.bias = linear.bias
    return new.train(linear.training)


def quantize_linear_weight(weight: Tensor, placeholder: Params4bit) -> Params4bit:
    """What ``Params4bit(weight, ...).to(device)`` gives, bit for bit, without its large temporaries on a CPU.

    Args:
        weight: float ``[out_features, in_features]``.
        placeholder: the parameter to replace, which says how to quantize and knows its module.

    Raises:
        ValueError: the weight holds values that are not finite.
    """
    quant_type, blocksize = placeholder.quant_type, placeholder.blocksize
    packed, absmax = quantize(weight, quant_type, blocksize)
    assert absmax is not None
    facts = {
        "shape": weight.shape,
        "code": codebook(quant_type, weight.device).clone(),
        "blocksize": blocksize,
        "quant_type": quant_type,
        "dtype": weight.dtype,
    }
    if placeholder.compress_statistics:
        codes, nested_absmax, offset = compress_absmax(absmax)
        code = codebook("int8", weight.device).clone()
        nested = QuantState(nested_absmax, code=code, blocksize=NESTED_BLOCKSIZE, dtype=torch.float32)
        state = QuantState(codes, offset=offset, state2=nested, **facts)
    else:
        state = QuantState(absmax, **facts)
    settings = {**placeholder.__dict__, "quant_state": state, "bnb_quantized": True}
    placeholder.module.quant_state = state
    return Params4bit(packed.view(-1).view(placeholder.quant_storage).unsqueeze(1), requires_grad=False, **settings)


def restore_linears(model: nn.Module, dtype: torch.dtype) -> None:
    """Replaces every `Linear4bit` by an `nn.Linear` with its dequantized weight in `dtype`."""
    for name, linear in list(model.named_modules()):
        if not isinstance(linear, Linear4bit):
            continue
        with torch.device("meta"):
            new = nn.Linear(linear.in_features, linear.out_features, linear.bias is not None)
        # A pickled layer finds its weight's state on itself until its first forward.
        state = getattr(linear.weight, "quant_state", None) or linear.quant_state
        new.weight = nn.Parameter(dequantize_4bit(linear.weight.data, state).to(dtype))
        if linear.bias is not None:
            new.bias = nn.Parameter(linear.bias.data.to(dtype))
        model.set_submodule(name, new.train(linear.training))
