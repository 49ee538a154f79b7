"""Packing a model's experts module in place, from float stacks, and back."""

import copy

import pytest
import torch
from torch import Tensor, nn
from transformers.models.aria.modeling_aria import AriaExperts
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.muse_spark.modeling_muse_spark import MuseSparkExperts
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts
from transformers.models.olmoe.modeling_olmoe import OlmoeExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from hf_qmoe.experts import Experts4bit, ExpertsNbit
from tests.support.experts import (
    EXPERTS,
    HIDDEN,
    INTERMEDIATE,
    config,
    decoded_stack,
    float_experts,
    inputs,
    packed_experts,
)
from tests.support.oracle import assert_same_bits, dtype_name, storage_params


CLASSES = (Qwen3MoeExperts, OlmoeExperts, GptOssExperts, AriaExperts, NemotronHExperts, MuseSparkExperts)
by_class = pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)


@by_class
def test_the_module_stays_what_it_was(cls: type[nn.Module]) -> None:
    """The same object, an instance of both classes, with its config, flags, activation, hooks and float parameters."""
    module = float_experts(cls)
    called = []
    module.register_forward_pre_hook(lambda *_: called.append("pre"))
    floats = {n: p for n, p in module.named_parameters() if n not in ("gate_up_proj", "up_proj", "down_proj")}
    kept = ("config", "has_gate", "has_bias", "is_transposed", "is_concatenated", "has_post_expert_norm")
    kept += (
        "num_experts",
        "_is_expert_parallel",
        "training",
        *(name for name in ("act_fn",) if hasattr(module, name)),
    )
    before = {name: getattr(module, name) for name in kept}
    packed = ExpertsNbit.from_experts(module)
    assert packed is module
    assert isinstance(packed, ExpertsNbit)
    assert isinstance(packed, cls)
    assert type(packed).__name__ == f"{cls.__name__}Nbit"
    assert all(getattr(packed, name) is value for name, value in before.items())
    assert all(packed.get_parameter(name) is parameter for name, parameter in floats.items())
    packed(*inputs())
    assert called == ["pre"]


@by_class
def test_one_class_per_model_class(cls: type[nn.Module]) -> None:
    """Two layers of a model have the same class, so that a plan or a wrapper that names it meets both."""
    assert type(packed_experts(cls)) is type(packed_experts(cls, "int8"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=dtype_name)
@pytest.mark.parametrize(("quant_type", "double_quant"), storage_params())
@by_class
def test_to_experts_restores_the_model(
    cls: type[nn.Module], quant_type: str, double_quant: bool, dtype: torch.dtype
) -> None:
    """Class, names, order, shapes and dtypes return; values are those the bytes stand for, in the model's layout."""
    original = float_experts(cls)
    packed = ExpertsNbit.from_experts(copy.deepcopy(original), quant_type, double_quant=double_quant)
    expected = {name: decoded_stack(packed, name).to(dtype) for name in packed.stack_names}
    if packed.is_transposed:
        expected = {name: weights.transpose(1, 2) for name, weights in expected.items()}
    restored = packed.to_experts(dtype)
    assert restored is packed
    assert type(restored) is cls
    assert [n for n, _ in restored.named_parameters()] == [n for n, _ in original.named_parameters()]
    assert list(restored.state_dict()) == list(original.state_dict())
    assert restored.__dict__.keys() - {"_is_hf_initialized"} == original.__dict__.keys()
    for name, parameter in original.named_parameters():
        actual = restored.get_parameter(name)
        assert actual.shape == parameter.shape
        assert actual.is_contiguous()
        assert actual.requires_grad
        assert_same_bits(actual.detach(), expected.get(name, parameter.detach()))
    if dtype == torch.float32:
        assert restored(*inputs()).shape == (10, HIDDEN)


@by_class
def test_packing_again_after_to_experts(cls: type[nn.Module]) -> None:
    """int8 there and back, twice, ends with the same bytes: the round trip is a fixed point."""
    packed = packed_experts(cls, "bf16")
    first = {name: tensor.clone() for name, tensor in packed.state_dict().items()}
    again = ExpertsNbit.from_experts(packed.to_experts(torch.float32), "bf16")
    for name, tensor in again.state_dict().items():
        assert_same_bits(tensor, first[name])


def test_on_the_meta_device() -> None:
    """On the meta device only shapes are made; a state dict then fills them to the same module."""
    source = packed_experts(GptOssExperts, "nf4", double_quant=True)
    with torch.device("meta"):
        module = ExpertsNbit.from_experts(GptOssExperts(config()), "nf4", double_quant=True)
    assert {p.device.type for p in module.parameters()} == {"meta"}
    shapes = {n: (p.shape, p.dtype, p.requires_grad) for n, p in source.named_parameters()}
    assert {n: (p.shape, p.dtype, p.requires_grad) for n, p in module.named_parameters()} == shapes
    module.load_state_dict(source.state_dict(), assign=True)
    arguments = inputs()
    assert_same_bits(module(*arguments), source(*arguments))


def test_experts4bit_from_experts() -> None:
    """`Experts4bit.from_experts` gives an `Experts4bit`, and copies stay one."""
    packed = Experts4bit.from_experts(float_experts(), "fp4")
    assert isinstance(packed, Experts4bit)
    assert isinstance(copy.deepcopy(packed), Experts4bit)
    assert isinstance(packed, Qwen3MoeExperts)
    assert type(packed) is not type(packed_experts(Qwen3MoeExperts, "fp4"))


def test_packing_twice_is_refused() -> None:
    """The second call raises, and the module keeps its bytes."""
    packed = packed_experts()
    before = packed.gate_up_proj.clone()
    with pytest.raises(TypeError, match="Qwen3MoeExpertsNbit is packed already"):
        ExpertsNbit.from_experts(packed)
    assert_same_bits(packed.gate_up_proj.detach(), before)


@pytest.mark.parametrize("module", [nn.Linear(4, 4), nn.Conv1d(4, 4, 3)], ids=["Linear", "Conv1d"])
def test_other_modules_are_refused(module: nn.Module) -> None:
    """A module without the flags of the experts interface is not guessed at."""
    with pytest.raises(TypeError, match=f"{type(module).__name__} is not an experts module"):
        ExpertsNbit.from_experts(module)


def test_flags_without_stacks_are_refused() -> None:
    """A module with the flags but without float stacks raises, naming what is missing."""
    module = float_experts()
    module.down_proj = None
    with pytest.raises(ValueError, match=r"Qwen3MoeExperts\.down_proj.*nothing"):
        ExpertsNbit.from_experts(module)


def with_nan(module: nn.Module) -> nn.Module:
    """Puts one NaN into the last stack."""
    with torch.no_grad():
        module.down_proj[-1, 0, 0] = float("nan")
    return module


REFUSED = {
    "nan": (lambda: with_nan(float_experts()), "nf4", 64),
    "odd-K": (lambda: float_experts(intermediate=7), "nf4", 64),
    "no-block-size": (lambda: float_experts(hidden=8, intermediate=4), "int8", 64),
    "unknown-block-size": (float_experts, "nf4", 48),
    "unknown-format": (float_experts, "nf5", 64),
}


@pytest.mark.parametrize(("make", "quant_type", "blocksize"), REFUSED.values(), ids=REFUSED)
def test_a_refused_module_is_unchanged(make: object, quant_type: str, blocksize: int) -> None:
    """Where packing raises, the float module still has its weights, all of them."""
    module = make()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    with pytest.raises(ValueError, match=r"odd|finite|block size|blocksize|quant_type"):
        ExpertsNbit.from_experts(module, quant_type, blocksize)
    assert type(module) is Qwen3MoeExperts
    after = module.state_dict()
    assert after.keys() == before.keys()
    for name, tensor in before.items():
        torch.testing.assert_close(after[name], tensor, rtol=0, atol=0, equal_nan=True)


def test_only_packed_model_classes_return_to_float() -> None:
    """A module of `from_float` has no float class to return to."""
    packed = ExpertsNbit.from_float(*stacks())
    with pytest.raises(TypeError, match="from_experts"):
        packed.to_experts(torch.float32)


def stacks() -> tuple[Tensor, Tensor]:
    """Float stacks ``[E, 2I, H]`` and ``[E, H, I]``."""
    return torch.randn(EXPERTS, 2 * INTERMEDIATE, HIDDEN), torch.randn(EXPERTS, HIDDEN, INTERMEDIATE)


MISFITS = {
    "another-E": lambda up, down: (up[:2], down),
    "another-H": lambda up, down: (up[..., :32], down),
    "another-I": lambda up, down: (up, down[..., :64]),
    "no-gate-rows": lambda up, down: (up[:, :INTERMEDIATE], down),
    "swapped": lambda up, down: (down, up),
    "one-expert": lambda up, down: (up[0], down[0]),
    "4-D": lambda up, down: (up[None], down[None]),
    "integers": lambda up, down: (up.long(), down.long()),
    "infinite": lambda up, down: (up, down / 0),
}


@pytest.mark.parametrize("is_transposed", [False, True], ids=["plain", "transposed"])
@pytest.mark.parametrize("misfit", MISFITS.values(), ids=MISFITS)
def test_float_stacks_that_do_not_fit(misfit: object, is_transposed: bool) -> None:
    """Each raises a `ValueError` that shows what was given."""
    up, down = misfit(*stacks())
    if is_transposed:
        up, down = up.transpose(-1, -2), down.transpose(-1, -2)
    with pytest.raises(ValueError, match=r"down_proj|expected|shape|finite"):
        ExpertsNbit.from_float(up, down, is_transposed=is_transposed)


@pytest.mark.parametrize("is_transposed", [False, True], ids=["plain", "transposed"])
def test_float_stacks_in_the_other_orientation(is_transposed: bool) -> None:
    """Stacks of a transposed model without the flag, and the other way round, raise."""
    up, down = stacks()
    if not is_transposed:
        up, down = up.transpose(1, 2), down.transpose(1, 2)
    with pytest.raises(ValueError, match="gate_up_proj is"):
        ExpertsNbit.from_float(up, down, is_transposed=is_transposed)


BIASES = {
    "one-missing": lambda up, down: (up, None),
    "another-E": lambda up, down: (up[:2], down[:2]),
    "more-E": lambda up, down: (up.repeat(2, 1), down.repeat(2, 1)),
    "another-N": lambda up, down: (up[:, :5], down),
    "broadcast": lambda up, down: (up, down[:, :1]),
    "one-expert": lambda up, down: (up[0], down[0]),
    "swapped": lambda up, down: (down, up),
}


@pytest.mark.parametrize("change", BIASES.values(), ids=BIASES)
def test_biases_that_do_not_fit(change: object) -> None:
    """Biases of other shapes than ``[E, 2I]`` and ``[E, H]`` raise when packed, not at the first call or never."""
    up, down = change(torch.randn(EXPERTS, 2 * INTERMEDIATE), torch.randn(EXPERTS, HIDDEN))
    with pytest.raises(ValueError, match="bias"):
        ExpertsNbit.from_float(*stacks(), gate_up_proj_bias=up, down_proj_bias=down)


def test_from_float_keeps_no_reference() -> None:
    """Later changes of the caller's weights and biases do not reach the module, and no graph is kept."""
    up, down = (weights.requires_grad_() for weights in stacks())
    biases = {
        "gate_up_proj_bias": torch.randn(EXPERTS, 2 * INTERMEDIATE),
        "down_proj_bias": torch.randn(EXPERTS, HIDDEN),
    }
    for quant_type in ("nf4", "bf16"):
        packed = ExpertsNbit.from_float(up, down, quant_type=quant_type, **biases)
        arguments = inputs()
        expected = packed(*arguments)
        with torch.no_grad():
            for tensor in (up, down, *biases.values()):
                tensor.add_(1)
        assert_same_bits(packed(*arguments), expected)
        assert all(p.is_leaf for p in packed.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=dtype_name)
@pytest.mark.parametrize("quant_type", ["nf4", "int8", "bf16", "fp16"])
def test_float_dtypes_of_weights(quant_type: str, dtype: torch.dtype) -> None:
    """Weights pack from any float dtype to what their float32 values pack to."""
    up, down = (weights.to(dtype) for weights in stacks())
    actual = ExpertsNbit.from_float(up, down, quant_type=quant_type).state_dict()
    for name, tensor in ExpertsNbit.from_float(up.float(), down.float(), quant_type=quant_type).state_dict().items():
        assert_same_bits(actual[name], tensor)
