"""State dicts of packed experts: names, shapes, and round trips that keep every byte."""

import copy
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.muse_spark.modeling_muse_spark import MuseSparkExperts
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from tests.support.experts import EXPERTS, HIDDEN, INTERMEDIATE, inputs, packed_experts
from tests.support.oracle import assert_same_bits, dtype_name, storage_params
from tests.support.state import assert_same_state, filled, plain, snapshot


CLASSES = (Qwen3MoeExperts, GptOssExperts, NemotronHExperts, MuseSparkExperts)
by_class = pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
by_storage = pytest.mark.parametrize(("quant_type", "double_quant"), storage_params())


@by_storage
@pytest.mark.parametrize("assign", [False, True], ids=["copied", "assigned"])
def test_state_dict_round_trip(quant_type: str, double_quant: bool, assign: bool) -> None:
    """`load_state_dict` into an empty module keeps every byte, and nothing becomes trainable."""
    packed = filled(quant_type, double_quant=double_quant)
    other = plain(quant_type, double_quant=double_quant)
    result = other.load_state_dict(copy.deepcopy(packed.state_dict()), assign=assign)
    assert (result.missing_keys, result.unexpected_keys) == ([], [])
    assert_same_state(other, snapshot(packed))
    assert all(isinstance(p, nn.Parameter) and not p.requires_grad for p in other.parameters())
    arguments = inputs()
    assert_same_bits(other(*arguments), packed(*arguments))


@by_class
@by_storage
def test_safetensors_round_trip(quant_type: str, double_quant: bool, cls: type[nn.Module], tmp_path: Path) -> None:
    """The state dict of a model goes through a safetensors file unchanged, and holds plain integers and floats."""
    model = nn.ModuleDict({"experts": packed_experts(cls, quant_type, double_quant=double_quant)})
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    on_disk = load_file(tmp_path / "model.safetensors")
    for name, tensor in model.state_dict().items():
        assert_same_bits(on_disk[name], tensor)
    assert {on_disk[f"experts.{name}"].dtype for name in model["experts"].stack_names} == {torch.uint8}

    other = nn.ModuleDict({"experts": packed_experts(cls, quant_type, double_quant=double_quant)})
    assert not torch.equal(other["experts"].down_proj, model["experts"].down_proj)
    other.load_state_dict(on_disk)
    assert_same_state(other, snapshot(model))
    arguments = inputs()
    assert_same_bits(other["experts"](*arguments), model["experts"](*arguments))


@by_storage
def test_tensors_mapped_from_a_file(quant_type: str, double_quant: bool, tmp_path: Path) -> None:
    """Parameters that lie where the file has them, at odd addresses too, compute the same bits.

    safetensors packs tensors without gaps, so what follows bytes of odd length is aligned to nothing.
    """
    packed = filled(quant_type, double_quant=double_quant)
    save_file({"0": torch.zeros(1, dtype=torch.uint8), **packed.state_dict()}, tmp_path / "model.safetensors")
    state = load_file(tmp_path / "model.safetensors")
    del state["0"]
    mapped = plain(quant_type, double_quant=double_quant, device="meta")
    mapped.load_state_dict(state, assign=True)
    assert mapped.down_proj.data_ptr() % 2 == 1
    for dtype in (torch.float32, torch.bfloat16):
        arguments = inputs(dtype=dtype)
        assert_same_bits(mapped(*arguments), packed(*arguments))


@by_storage
def test_names_and_order_of_parameters(quant_type: str, double_quant: bool) -> None:
    """The up projection comes before the down projection, scales carry the suffixes of the format document."""
    suffixes = [""]
    if quant_type not in ("bf16", "fp16"):
        suffixes += ["_absmax", "_nested_absmax", "_nested_offset"] if double_quant else ["_absmax"]
    made = {
        "gate_up_proj": plain(quant_type, double_quant=double_quant),
        "up_proj": plain(quant_type, double_quant=double_quant, has_gate=False),
    }
    for up_name, module in made.items():
        stacks = [up_name, "down_proj"]
        names = [name for name, _ in module.named_parameters()]
        assert names == [name + suffix for name in stacks for suffix in suffixes]
        assert module.state_dict().keys() == {*names, "quant_metadata"}
    for cls in CLASSES:
        packed = packed_experts(cls, quant_type, double_quant=double_quant)
        names = [name for name, _ in packed.named_parameters()]
        assert [name for name in names if name in ("gate_up_proj", "up_proj", "down_proj")] == list(packed.stack_names)
        assert {n + s for n in packed.stack_names for s in suffixes} <= set(names)


@by_storage
def test_dtypes_and_shapes_of_parameters(quant_type: str, double_quant: bool) -> None:
    """Bytes are ``[E, N, K * bits / 8]``, scales ``[E, N, K / blocksize]``, double-quantized ones in bytes."""
    bits = {"nf4": 4, "fp4": 4, "int8": 8, "fp8": 8, "bf16": 16, "fp16": 16}[quant_type]
    module = filled(quant_type, double_quant=double_quant)
    for name, rows, columns in (("gate_up_proj", 2 * INTERMEDIATE, HIDDEN), ("down_proj", HIDDEN, INTERMEDIATE)):
        expected = {name: (torch.uint8, (EXPERTS, rows, columns * bits // 8))}
        blocks = (EXPERTS, rows, columns // 64)
        if bits < 16:
            expected[f"{name}_absmax"] = (torch.uint8 if double_quant else torch.int32, blocks)
        if double_quant:
            nested = -(-rows * columns // 64 // 256)
            expected[f"{name}_nested_absmax"] = (torch.int32, (EXPERTS, nested))
            expected[f"{name}_nested_offset"] = (torch.int32, (EXPERTS,))
        actual = {n: (p.dtype, tuple(p.shape)) for n, p in module.named_parameters() if n.startswith(name)}
        assert actual == expected


def test_float32_scales_load_as_their_bits() -> None:
    """Scales that someone kept as float32 values are the same scales."""
    packed = filled(double_quant=True)
    state = {n: t.view(torch.float32) if t.dtype == torch.int32 else t for n, t in packed.state_dict().items()}
    for assign in (False, True):
        other = plain(double_quant=True)
        other.load_state_dict(state, assign=assign)
        assert_same_state(other, snapshot(packed))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.int64], ids=dtype_name)
@pytest.mark.parametrize("assign", [False, True], ids=["copied", "assigned"])
def test_cast_scales_are_refused(dtype: torch.dtype, assign: bool) -> None:
    """Scales in another dtype have lost bits or are not scales: copied into the parameter they would be garbage."""
    state = filled().state_dict()
    state["down_proj_absmax"] = state["down_proj_absmax"].view(torch.float32).to(dtype)
    with pytest.raises(RuntimeError, match="down_proj_absmax"):
        plain().load_state_dict(state, assign=assign)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float32], ids=dtype_name)
def test_cast_metadata_is_read_or_refused(dtype: torch.dtype) -> None:
    """Metadata in another dtype does not make another format readable."""
    state = filled("nf4").state_dict()
    state["quant_metadata"] = state["quant_metadata"].to(dtype)
    with pytest.raises(RuntimeError, match=r"quant_metadata|quant_type"):
        plain("fp4").load_state_dict(state)
