"""`parametrize_experts`: values, state, refusals, other parametrizations, and torch's cache left alone."""

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path

import bitsandbytes.functional as bnb
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from hf_qmoe import parametrize_experts, parametrize_experts_prequantized
from hf_qmoe.lazy_weight import LazyWeight
from hf_qmoe.parametrize import restore_parameter
from tests.support.oracle import (
    assert_same_bits,
    bnb_dequantize,
    bnb_quantize,
    control_weights,
    dtype_name,
    storage_params,
)
from tests.support.parametrized import SHAPE, TOKENS, Experts, assert_equivalent, packed_and_twin


by_storage = pytest.mark.parametrize(("quant_type", "double_quant"), storage_params())


def snapshot(module: nn.Module) -> dict[str, Tensor]:
    """A copy of the state dict."""
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def assert_same_state(module: nn.Module, expected: dict[str, Tensor]) -> None:
    """Same names, dtypes and bits."""
    assert module.state_dict().keys() == expected.keys()
    for name, tensor in module.state_dict().items():
        assert_same_bits(tensor, expected[name])


@pytest.mark.parametrize("shape", [SHAPE, (32, 64), (1, 2, 32), (2, 3, 128), (5, 6, 32)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=dtype_name)
@by_storage
def test_values_and_gradients(quant_type: str, double_quant: bool, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Weight, output and gradients are those of a float module with bitsandbytes' values, for stacks and matrices."""
    packed, twin = packed_and_twin(quant_type, double_quant, shape, dtype)
    assert type(packed.weight) is LazyWeight
    assert [name for name, p in packed.named_parameters() if p.requires_grad] == ["bias"]
    assert_equivalent(packed, twin)


@pytest.mark.parametrize("blocksize", [64, 128, 512, 2048])
@pytest.mark.parametrize(("quant_type", "double_quant"), storage_params([("nf4", True), ("int8", False)]))
def test_block_sizes(quant_type: str, double_quant: bool, blocksize: int) -> None:
    """Blocks may run over several rows, up to a whole expert; a larger one shrinks to what divides an expert."""
    packed, twin = packed_and_twin(quant_type, double_quant, blocksize=blocksize)
    assert_equivalent(packed, twin)
    shrunk = copy.deepcopy(twin)
    parametrize_experts(shrunk, "weight", quant_type, 4096, double_quant)
    assert shrunk.parametrizations.weight[0].absmax.shape[1:].numel() == 1


def through_torch_save(state: dict[str, Tensor], folder: Path) -> dict[str, Tensor]:
    """`state` by way of a file of ``torch.save``."""
    torch.save(state, folder / "state.pt")
    return torch.load(folder / "state.pt", weights_only=True)


def through_safetensors(state: dict[str, Tensor], folder: Path) -> dict[str, Tensor]:
    """`state` by way of a safetensors file."""
    save_file(state, folder / "state.safetensors")
    return load_file(folder / "state.safetensors")


@pytest.mark.parametrize("through", [lambda state, _: state, through_torch_save, through_safetensors])
@pytest.mark.parametrize("assign", [False, True], ids=["copied", "assigned"])
@by_storage
def test_state_dict_round_trip(
    quant_type: str, double_quant: bool, assign: bool, through: Callable[..., dict[str, Tensor]], tmp_path: Path
) -> None:
    """Loading into another module keeps every bit, in memory and through files; float scales are the same scales."""
    packed, twin = packed_and_twin(quant_type, double_quant)
    expected = snapshot(packed)
    for floats in (False, True):
        state = {n: t.view(torch.float32) if floats and t.dtype == torch.int32 else t for n, t in expected.items()}
        other, _ = packed_and_twin(quant_type, double_quant)
        loaded = other.load_state_dict(through(state, tmp_path), strict=True, assign=assign)
        assert (loaded.missing_keys, loaded.unexpected_keys) == ([], [])
        assert_same_state(other, expected)
        assert not any(p.requires_grad for n, p in other.named_parameters() if n != "bias")
        assert_equivalent(other, twin)


REFUSED: dict[str, Callable[[dict[str, Tensor]], object]] = {
    "format": lambda s: s.update(snapshot(packed_and_twin("fp4", True)[0])),
    "scales-not-nested": lambda s: s.update(snapshot(packed_and_twin("nf4", False)[0])),
    "shape": lambda s: s.update(snapshot(packed_and_twin("nf4", True, (3, 64, 64))[0])),
    "experts": lambda s: s.update(snapshot(packed_and_twin("nf4", True, (4, 32, 64))[0])),
    "block-size": lambda s: s.update(snapshot(packed_and_twin("nf4", True, blocksize=128)[0])),
    "float-weight": lambda s: s.update({"parametrizations.weight.original": torch.randn(SHAPE)}),
    "bytes-as-int8": lambda s: s.update({k: t.to(torch.int8) for k, t in s.items() if k.endswith("original")}),
    "scales-as-bf16": lambda s: s.update({k: t.bfloat16() for k, t in s.items() if k.endswith("offset")}),
    "metadata": lambda s: s.update({"quant_metadata": torch.zeros(3, dtype=torch.uint8)}),
}


@pytest.mark.parametrize("change", REFUSED.values(), ids=REFUSED)
@pytest.mark.parametrize("assign", [False, True], ids=["copied", "assigned"])
def test_state_of_another_format_is_refused(change: Callable[[dict[str, Tensor]], object], assign: bool) -> None:
    """Bytes, scales or metadata that are not this module's raise, and its packed weight stays as it was."""
    packed, twin = packed_and_twin("nf4", True)
    before = snapshot(packed)
    state = snapshot(packed_and_twin("nf4", True)[0])
    change(state)
    state["bias"] = before["bias"]
    for strict in (True, False):
        with pytest.raises(RuntimeError, match=r"quant_metadata|expected|stored"):
            packed.load_state_dict(dict(state), strict=strict, assign=assign)
        assert_same_state(packed, before)
    assert_equivalent(packed, twin)


def by_torch_save(module: nn.Module) -> nn.Module:
    """A copy through ``torch.save`` of the whole module."""
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda m: pickle.loads(pickle.dumps(m)),
    "torch-save": by_torch_save,
    "of-a-copy": lambda m: pickle.loads(pickle.dumps(copy.deepcopy(nn.Sequential(m)))),
}


@pytest.mark.parametrize("copier", COPIES.values(), ids=COPIES)
@by_storage
def test_copies_are_independent(quant_type: str, double_quant: bool, copier: Callable[[nn.Module], nn.Module]) -> None:
    """A copy has every bit, and neither notices when the other is restored or overwritten."""
    packed, twin = packed_and_twin(quant_type, double_quant)
    for restored_first in (True, False):
        copied = copier(packed)
        copied = copied[0] if isinstance(copied, nn.Sequential) else copied
        assert isinstance(copied, Experts)
        assert_same_state(copied, snapshot(packed))
        one, other = (copied, packed) if restored_first else (packed, copied)
        restore_parameter(one, "weight")
        assert type(one) is Experts
        with torch.no_grad():
            one.weight.zero_()
        assert type(other.weight) is LazyWeight
        assert_equivalent(other, twin)


CASTS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "half": lambda m: m.half(),
    "bfloat16": lambda m: m.bfloat16(),
    "double": lambda m: m.double(),
    "to": lambda m: m.to("cpu", torch.bfloat16),
    "of-a-model": lambda m: nn.Sequential(m).to(torch.bfloat16)[0],
    "there-and-back": lambda m: m.half().float(),
}


@pytest.mark.parametrize("cast", CASTS.values(), ids=CASTS)
@by_storage
def test_casts(quant_type: str, double_quant: bool, cast: Callable[[nn.Module], nn.Module]) -> None:
    """A cast changes no packed bit; the weight's dtype follows, with the values bitsandbytes unpacks in it."""
    module = Experts()
    values = module.weight.detach().clone()
    parametrize_experts(module, "weight", quant_type, 64, double_quant)
    before = snapshot(module)
    module = cast(module)
    after = module.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items() if name != "bias")
    dtype = module.bias.dtype
    assert_same_bits(module.weight + 0, control_weights(values, quant_type, 64, double_quant, dtype))
    assert module(torch.randn(TOKENS, SHAPE[-1], dtype=dtype)).dtype == dtype


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=dtype_name)
def test_fixed_compute_dtype(dtype: torch.dtype) -> None:
    """Given, it stays through casts; the input is cast to it and the output back, but not under autocast."""
    packed, twin = packed_and_twin("nf4", dtype=dtype)
    restore_parameter(packed, "weight")
    parametrize_experts(packed, "weight", "nf4", compute_dtype=dtype)
    twin.weight.data = packed.weight + 0
    for outer in (torch.float32, torch.float16, torch.bfloat16):
        packed.to(outer).bias.data = twin.bias.detach()
        assert packed.weight.dtype == dtype
        x = torch.randn(TOKENS, SHAPE[-1], dtype=outer)
        expected = twin(x.to(dtype)).to(outer)
        assert_same_bits(packed(x), expected)
        assert_same_bits(packed(x=x), expected)
        with torch.autocast("cpu", torch.bfloat16):
            assert_same_bits(packed(x), twin(x))


@by_storage
def test_restore_parameter(quant_type: str, double_quant: bool) -> None:
    """Restoring gives an ordinary trainable module of the own class back, with the values it computed with."""
    packed, twin = packed_and_twin(quant_type, double_quant)
    restore_parameter(packed, "weight")
    assert (type(packed), type(packed.weight)) == (Experts, nn.Parameter)
    assert packed.state_dict().keys() == twin.state_dict().keys()
    assert_equivalent(packed, twin)
    with pytest.raises(ValueError, match="not a packed"):
        restore_parameter(packed, "weight")


def test_refusals_leave_the_module_unchanged() -> None:
    """What cannot be packed raises by its kind; class, parameters and values stay."""
    cases = [
        (AttributeError, "missing", {}, lambda m: None),
        (TypeError, "training", {}, lambda m: None),
        (TypeError, "weight", {}, lambda m: setattr(m, "weight", nn.Parameter(torch.zeros(2, 2).int(), False))),
        (ValueError, "bias", {}, lambda m: None),
        (ValueError, "weight", {"quant_type": "nf5"}, lambda m: None),
        (ValueError, "weight", {"blocksize": 48}, lambda m: None),
        (ValueError, "weight", {}, lambda m: m.weight.data[1, 3].fill_(float("nan"))),
        (ValueError, "weight", {"quant_type": "int8"}, lambda m: m.weight.data[2, 0].fill_(float("inf"))),
        (ValueError, "weight", {"quant_type": "fp16"}, lambda m: m.weight.data[0, 0].fill_(1e6)),
        (ValueError, "weight", {}, lambda m: setattr(m, "weight", nn.Parameter(torch.zeros(2, 4, 63)))),
        (ValueError, "weight", {"quant_type": "int8"}, lambda m: setattr(m, "weight", nn.Parameter(torch.ones(3, 7)))),
        (ValueError, "weight", {}, lambda m: setattr(m, "weight", nn.Parameter(torch.ones(1, 2, 32, 64)))),
        (ValueError, "weight", {}, lambda m: setattr(m, "weight", nn.Parameter(torch.ones(4, 0, 64)))),
        (ValueError, "weight", {}, lambda m: setattr(m, "weight", nn.Parameter(torch.ones(4, 0)))),
        (ValueError, "weight", {}, lambda m: setattr(m, "quant_metadata", "of its own")),
        (ValueError, "weight", {}, lambda m: m.register_buffer("quant_metadata", torch.ones(3))),
    ]
    for error, name, options, prepare in cases:
        module = Experts()
        prepare(module)
        before = snapshot(module)
        with pytest.raises(error):
            parametrize_experts(module, name, **options)
        assert type(module) is Experts
        assert all(torch.equal(t, before[n]) or t.isnan().any() for n, t in module.state_dict().items())
    packed, twin = packed_and_twin()
    with pytest.raises(TypeError, match="already"):
        parametrize_experts(packed, "weight")
    with pytest.raises(NotImplementedError, match="restore_parameter"):
        packed.weight = torch.zeros(SHAPE)
    assert_equivalent(packed, twin)


PREQUANTIZED = [("nf4", False), ("nf4", True), ("fp4", True), ("int8", False), ("fp8", False)]


@pytest.mark.parametrize("given", ["state", "dict", "packed-dict", "bf16-bytes"])
@pytest.mark.parametrize("shape", [(3, 32, 64), (32, 64), (4, 3, 16), (4, 5, 48), (64, 1)], ids=str)
@pytest.mark.parametrize(("quant_type", "double_quant"), storage_params(PREQUANTIZED))
def test_bytes_of_bitsandbytes(quant_type: str, double_quant: bool, shape: tuple[int, ...], given: str) -> None:
    """Bytes that bitsandbytes packed as one tensor, blocks across experts too, are kept and mean what it says."""
    twin = Experts(shape)
    codes, state = bnb_quantize(twin.weight.detach(), quant_type, 64, double_quant)
    twin.weight.data = bnb_dequantize(codes, state, torch.float32, shape)
    state.shape = torch.Size(shape)
    if given == "bf16-bytes":
        codes = codes.view(-1).view(torch.bfloat16).view(-1, 1)
    module = copy.deepcopy(twin)
    module.weight = nn.Parameter(codes, requires_grad=False)
    form = {"dict": lambda: state.as_dict(), "packed-dict": lambda: state.as_dict(packed=True)}.get(given)
    parametrize_experts_prequantized(module, "weight", form() if form else state)
    assert torch.equal(module.parametrizations.weight.original.view(-1), codes.view(-1).view(torch.uint8))
    assert_equivalent(module, twin)


def test_bytes_that_do_not_fit_are_refused() -> None:
    """Bytes of another size, a state of no known format or shape: refused, the module unchanged."""
    codes, state = bnb.quantize_4bit(torch.randn(32, 64), quant_type="nf4")
    foreign = bnb.quantize_blockwise(torch.randn(32, 64), code=torch.linspace(-1, 1, 256), blocksize=64)
    flat = bnb.quantize_4bit(torch.randn(2048), quant_type="nf4")
    partial = bnb.quantize_4bit(torch.randn(3, 48), quant_type="nf4")  # ends in half a block
    for given, given_state in ((codes[:-1], state), (codes.repeat(2, 1), state), foreign, flat, partial):
        module = Experts((32, 64))
        module.weight = nn.Parameter(given, requires_grad=False)
        with pytest.raises(ValueError, match=r"."):
            parametrize_experts_prequantized(module, "weight", given_state)
        assert type(module) is Experts
        assert module.weight.data_ptr() == given.data_ptr()
