"""Casts and copies of packed experts keep every byte; what a module cannot hold is refused."""

import copy
import io
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import nn
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.muse_spark.modeling_muse_spark import MuseSparkExperts
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from hf_qmoe.experts import Experts4bit, ExpertsNbit
from tests.support.experts import EXPERTS, HIDDEN, INTERMEDIATE, float_experts, inputs, packed_experts
from tests.support.oracle import assert_same_bits, storage_params
from tests.support.state import assert_same_state, filled, plain, snapshot


CLASSES = (Qwen3MoeExperts, GptOssExperts, NemotronHExperts, MuseSparkExperts)
by_class = pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
by_storage = pytest.mark.parametrize(("quant_type", "double_quant"), storage_params())


CASTS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "half": lambda m: m.half(),
    "bfloat16": lambda m: m.bfloat16(),
    "double": lambda m: m.double(),
    "float": lambda m: m.float(),
    "to-bf16": lambda m: m.to(torch.bfloat16),
    "to-device-fp16": lambda m: m.to("cpu", torch.float16),
    "bf16-and-back": lambda m: m.bfloat16().float(),
    "train-eval": lambda m: m.train().eval(),
    "frozen": lambda m: m.requires_grad_(False),
    "shared": lambda m: m.share_memory(),
}


@pytest.mark.parametrize("cast", CASTS.values(), ids=CASTS)
@by_storage
def test_casts_change_no_bit(quant_type: str, double_quant: bool, cast: Callable[[nn.Module], nn.Module]) -> None:
    """No cast of the module, or of a model that holds it, changes a byte or an output bit."""
    packed = packed_experts(Qwen3MoeExperts, quant_type, double_quant=double_quant, compute_dtype=torch.float32)
    packed.exact = True  # in eval mode too
    arguments = inputs()
    before, expected = snapshot(packed), packed(*arguments)
    cast(packed)
    assert_same_state(packed, before)
    assert_same_bits(packed(*arguments), expected)
    cast(nn.Sequential(nn.Linear(4, 4), packed))
    assert_same_state(packed, before)
    assert_same_bits(packed(*arguments), expected)


def test_casts_reach_biases_and_norms() -> None:
    """Float parameters beside the packed ones follow the cast, as in any module."""
    for cls, count in ((GptOssExperts, 2), (MuseSparkExperts, 1)):
        floats = [p for p in packed_experts(cls).bfloat16().parameters() if p.is_floating_point()]
        assert [p.dtype for p in floats] == [torch.bfloat16] * count


def test_type_is_refused_at_the_next_call() -> None:
    """`module.type(dtype)` casts integers too; the module then refuses to compute."""
    packed = packed_experts().type(torch.float32)
    with pytest.raises(RuntimeError, match="uint8"):
        packed(*inputs())


def test_to_empty_then_load(device: str) -> None:
    """A module whose memory was dropped, or that was made on the meta device, is complete after `load_state_dict`."""
    packed = filled(double_quant=True)
    arguments = inputs(device=device)
    expected = packed.to(device)(*arguments)
    state = copy.deepcopy(packed.state_dict())
    emptied = copy.deepcopy(packed).to_empty(device=device)
    emptied.load_state_dict(state)
    from_meta = plain(double_quant=True, device="meta").to_empty(device=device)
    from_meta.load_state_dict(state)
    assigned = plain(double_quant=True, device="meta")
    assigned.load_state_dict(state, assign=True)
    for module in (emptied, from_meta, assigned):
        assert_same_state(module, snapshot(packed))
        assert not any(p.requires_grad for p in module.parameters())
        assert_same_bits(module(*arguments), expected)


def by_torch_save(module: nn.Module) -> nn.Module:
    """A copy through ``torch.save`` of the whole module."""
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda m: pickle.loads(pickle.dumps(m)),
    "torch-save": by_torch_save,
    "deepcopy-of-model": lambda m: copy.deepcopy(nn.ModuleList([m]))[0],
    "twice": lambda m: pickle.loads(pickle.dumps(copy.deepcopy(m))),
}
by_copy = pytest.mark.parametrize("copier", COPIES.values(), ids=COPIES)


@by_copy
@by_class
def test_copies_keep_bytes_class_and_output(cls: type[nn.Module], copier: Callable[[nn.Module], nn.Module]) -> None:
    """A copy is an instance of the same classes, with every byte, flag and output bit, and memory of its own."""
    packed = packed_experts(cls, "fp4", double_quant=True, compute_dtype=torch.bfloat16)
    arguments = inputs()
    expected = packed(*arguments)
    copied = copier(packed)
    assert type(copied) is type(packed)
    assert isinstance(copied, ExpertsNbit)
    assert isinstance(copied, cls)
    assert [n for n, _ in copied.named_parameters()] == [n for n, _ in packed.named_parameters()]
    assert [p.requires_grad for p in copied.parameters()] == [p.requires_grad for p in packed.parameters()]
    assert (copied.quant_type, copied.compute_dtype) == ("fp4", torch.bfloat16)
    assert_same_state(copied, snapshot(packed))
    assert_same_bits(copied(*arguments), expected)

    with torch.no_grad():
        for parameter in packed.parameters():
            parameter.zero_()
    assert_same_bits(copied(*arguments), expected)


@by_copy
def test_copies_of_plain_modules(copier: Callable[[nn.Module], nn.Module]) -> None:
    """Modules of `from_float` copy as any module, and stay `Experts4bit` where they were."""
    for cls in (ExpertsNbit, Experts4bit):
        packed = cls.from_float(torch.randn(2, 64, 64), torch.randn(2, 64, 32), blocksize=32)
        copied = copier(packed)
        assert type(copied) is cls
        assert_same_state(copied, snapshot(packed))


@by_copy
def test_copies_can_return_to_float(copier: Callable[[nn.Module], nn.Module]) -> None:
    """A copy of a packed module still knows the class and layout it came from."""
    packed = packed_experts(GptOssExperts)
    copied = copier(packed).to_experts(torch.float32)
    original = packed.to_experts(torch.float32)
    assert type(copied) is type(original) is GptOssExperts
    for name, parameter in original.named_parameters():
        assert_same_bits(copied.get_parameter(name), parameter)


@pytest.mark.parametrize("quant_type", ["int8", "fp8", "bf16", "fp16"])
def test_experts4bit_refuses_wider_formats(quant_type: str) -> None:
    """`Experts4bit` holds nf4 and fp4 only, however it is made, and leaves a module that it refuses alone."""
    with pytest.raises(ValueError, match="Experts4bit holds nf4 or fp4"):
        Experts4bit(EXPERTS, HIDDEN, INTERMEDIATE, quant_type=quant_type)
    with pytest.raises(ValueError, match="Experts4bit holds nf4 or fp4"):
        Experts4bit.from_float(torch.randn(2, 64, 64), torch.randn(2, 64, 32), quant_type=quant_type)
    module = float_experts()
    with pytest.raises(ValueError, match="Experts4bit holds nf4 or fp4"):
        Experts4bit.from_experts(module, quant_type)
    assert type(module) is Qwen3MoeExperts
    assert module.gate_up_proj.dtype == torch.float32


def test_unknown_format_and_block_size() -> None:
    """The error lists what is allowed."""
    with pytest.raises(ValueError, match=r"'nf5'.*nf4, fp4, int8, fp8, bf16, fp16"):
        plain("nf5")
    with pytest.raises(ValueError, match=r"blocksize=48.*64"):
        plain("nf4", 48)
    with pytest.raises(ValueError, match=r"blocksize=32.*int8.*64"):
        plain("int8", 32)


def test_repr_names_shapes_and_format() -> None:
    """Printing a model shows what is stored how."""
    text = repr(filled("int8", 128, double_quant=True))
    assert f"gate_up_proj=[{EXPERTS}, {2 * INTERMEDIATE}, {HIDDEN}]" in text
    assert f"down_proj=[{EXPERTS}, {HIDDEN}, {INTERMEDIATE}]" in text
    assert "quant_type=int8, blocksize=128, double_quant=True" in text
