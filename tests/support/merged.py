"""Adapted packed models of many shapes whose adapters are merged in memory, and what merging has to leave alone."""

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, NemotronHConfig, PreTrainedModel

from hf_qmoe import QMoEConfig, quantize_experts
from hf_qmoe.lora.packed import packed_parameter
from hf_qmoe.lora.wrapper import ParamWrapper
from tests.support.checkpoints import load
from tests.support.lora import EXPERTS, lora_config, randomize
from tests.support.models import VOCAB, tiny_model
from tests.support.oracle import assert_same_bits


def _nemotron_h() -> PreTrainedModel:
    """Experts without a gate, in a model without Mamba layers."""
    torch.manual_seed(0)
    config = NemotronHConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        layers_block_type=["attention", "moe", "moe"],
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=96,
        moe_shared_expert_intermediate_size=64,
        n_shared_experts=1,
    )
    model = AutoModelForCausalLM.from_config(config, experts_implementation="eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2 and "gate" not in name:
                parameter.normal_(std=0.1)
    return model.eval()


class Case(NamedTuple):
    """How a float model is made, and what its experts' projections are called."""

    make: Callable[[], PreTrainedModel]
    experts: tuple[str, str] = EXPERTS

    def build(self, dtype: torch.dtype) -> PreTrainedModel:
        """The float model. Buffers stay in float32, as where a checkpoint is loaded."""
        model = self.make()
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype)
        return model


CASES = {
    "qwen3_moe": Case(lambda: tiny_model("qwen3_moe")),
    "gpt_oss": Case(lambda: tiny_model("gpt_oss")),  # transposed, interleaved, with biases
    "mixtral": Case(lambda: tiny_model("mixtral")),
    "nemotron_h": Case(_nemotron_h, ("experts.up_proj", "experts.down_proj")),
    "narrow": Case(lambda: tiny_model("qwen3_moe", moe_intermediate_size=48)),
    "square-up": Case(lambda: tiny_model("qwen3_moe", moe_intermediate_size=32)),  # 2I == H
    "square-down": Case(lambda: tiny_model("gpt_oss", intermediate_size=64)),  # I == H, transposed
}


def packed_model(
    case: str = "qwen3_moe", form: str = "nbit", dtype: torch.dtype = torch.float32, **options: object
) -> PreTrainedModel:
    """A model with packed experts; `options` are fields of its config."""
    fields: dict[str, object] = {"quantize_linears": False, "experts_module": form}
    return quantize_experts(CASES[case].build(dtype), QMoEConfig(**(fields | options)))


def adapt(model: PreTrainedModel, case: str = "qwen3_moe", **changes: object) -> PeftModel:
    """LoRA with random factors on the query projection and the experts; `changes` are of the adapter's config."""
    adapted = get_peft_model(model, experts_config(case, **changes))
    randomize(adapted)
    return adapted.eval()


def adapted_model(
    case: str = "qwen3_moe", form: str = "nbit", dtype: torch.dtype = torch.float32, **options: object
) -> PeftModel:
    """`packed_model` under `adapt`."""
    return adapt(packed_model(case, form, dtype, **options), case)


def experts_config(case: str = "qwen3_moe", **changes: object) -> LoraConfig:
    """`lora_config` for the experts of a case."""
    return lora_config(**({"target_parameters": list(CASES[case].experts)} | changes))


@contextmanager
def quietly() -> Iterator[None]:
    """Without the warning of what merging costs."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Merging LoRA into packed experts")
        warnings.filterwarnings("ignore", message="Merge lora module to 4-bit linear")
        yield


def merge_and_unload(model: PeftModel, **kwargs: object) -> PreTrainedModel:
    """PEFT's, without the warning."""
    with quietly():
        return model.merge_and_unload(**kwargs)


def merge_adapter(model: PeftModel, *args: object, **kwargs: object) -> None:
    """PEFT's, without the warning."""
    with quietly():
        model.merge_adapter(*args, **kwargs)


def reload(path: Path) -> PreTrainedModel:
    """A saved model, copied: tensors of a mapped file lie where products may round otherwise."""
    return copy.deepcopy(load(path, dtype="auto"))


def wrappers(model: nn.Module) -> list[ParamWrapper]:
    """The wrappers of packed experts, outer ones first."""
    return [module for module in model.modules() if isinstance(module, ParamWrapper)]


def exact_sums(model: nn.Module, adapters: tuple[str, ...] = ("default",)) -> dict[tuple[str, str], Tensor]:
    """Before a merge: dequantized weight plus update of each adapted parameter, fp32, in the model's layout."""
    sums = {}
    for path, wrapper in model.named_modules():
        if isinstance(wrapper, ParamWrapper):
            module, name = wrapper.get_base_layer(), wrapper.parameter_name
            parameter = packed_parameter(module, name)
            assert parameter is not None
            weight = parameter.stack.dequantize(torch.float32)
            for adapter in adapters:
                weight = weight + torch.stack([wrapper.expert_delta(adapter, e) for e in range(len(weight))])
            sums[clean(path), name] = weight.transpose(1, 2) if module.is_transposed else weight
    return sums


def clean(path: str) -> str:
    """The path of the experts module in the model without adapters."""
    parts = [part for part in path.removeprefix("base_model.model.").split(".") if part != "base_layer"]
    return ".".join(parts)


def state(model: nn.Module) -> dict[str, Tensor]:
    """Copies of all tensors but the adapters', in order."""
    return {name: t.clone() for name, t in model.state_dict().items() if "lora_" not in name}


def assert_state(model: nn.Module, expected: dict[str, Tensor]) -> None:
    """The same tensors in the same order, bit for bit."""
    actual = state(model)
    assert list(actual) == list(expected)
    for name, tensor in expected.items():
        assert_same_bits(actual[name], tensor)


def kinds(model: nn.Module) -> dict[str, tuple[str, str]]:
    """Module and name of the class of each module (each parametrized module has a class of its own)."""
    return {name: (type(m).__module__, type(m).__qualname__) for name, m in model.named_modules()}


def hook_counts(model: nn.Module) -> dict[str, int]:
    """How many hooks of all kinds each module has."""
    kinds_of_hooks = [key for key in nn.Module().__dict__ if key.endswith("_hooks")]
    return {name: sum(len(m.__dict__[key]) for key in kinds_of_hooks) for name, m in model.named_modules()}


class LargestTensors(TorchDispatchMode):
    """Records the sizes of the tensors that operations make, by dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.numels: dict[torch.dtype, int] = {}

    def __torch_dispatch__(
        self, func: Callable, types: object, args: tuple = (), kwargs: dict | None = None
    ) -> object:
        out = func(*args, **(kwargs or {}))
        inputs = {t.untyped_storage().data_ptr() for t in args if isinstance(t, Tensor)}
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() not in inputs:
                self.numels[tensor.dtype] = max(self.numels.get(tensor.dtype, 0), tensor.numel())
        return out
