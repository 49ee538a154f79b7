"""Checkpoints, configs and environments that are wrong: one clear error that names the thing, and nothing touched."""

import copy
import importlib
import json
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from transformers.quantizers import auto
from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer

import hf_qmoe
from hf_qmoe import ExpertsNbit, QMoEConfig, quantize_experts
from hf_qmoe.register import register
from tests.support.checkpoints import (
    assert_same_tensors,
    digest,
    edited,
    expert_key,
    load,
    logits,
    packed_modules,
    packed_state,
    tensors_on_disk,
    with_config,
)
from tests.support.models import PER_EXPERT_FAMILIES, tiny_config, tiny_model


Tensors = dict[str, Tensor]
PREFIX = "model.layers.1.mlp.experts."


def refused(
    checkpoint: Path,
    config: QMoEConfig | None,
    *says: str,
    error: type[Exception] | tuple[type[Exception], ...] = ValueError,
    **kwargs: object,
) -> None:
    """Loading raises an error that holds each of `says`, and leaves the files as they are.

    Memory that nothing is loaded into holds NaN meanwhile: what is said of it must not depend on chance.
    """
    before = digest(checkpoint)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with pytest.raises(error) as raised:
            load(checkpoint, config, **kwargs)
    finally:
        torch.use_deterministic_algorithms(False)
    message = str(raised.value)
    for pattern in says:
        assert re.search(pattern, message), f"{pattern!r} not in {message!r}"
    assert digest(checkpoint) == before


# -- experts that are missing, too many, or in the wrong place ------------------------------------------------------


def drop(family: str, expert: int, *projections: str) -> Callable[[Tensors], None]:
    """Removes projections of one expert of layer 1."""

    def edit(tensors: Tensors) -> None:
        for projection in projections:
            del tensors[expert_key(family, 1, expert, projection)]

    return edit


def add(family: str, expert: int, *projections: str) -> Callable[[Tensors], None]:
    """Adds projections of a further expert to layer 1."""

    def edit(tensors: Tensors) -> None:
        for projection in projections:
            tensors[expert_key(family, 1, expert, projection)] = tensors[expert_key(family, 1, 0, projection)].clone()

    return edit


def both(*edits: Callable[[Tensors], None]) -> Callable[[Tensors], None]:
    """One edit after the other."""

    def edit(tensors: Tensors) -> None:
        for one in edits:
            one(tensors)

    return edit


ALL = ("gate", "up", "down")
WRONG_EXPERTS: dict[str, tuple[Callable[[str], Callable[[Tensors], None]], str]] = {
    "first_missing": (lambda f: drop(f, 0, *ALL), r"missing.*\[0\]"),
    "middle_missing": (lambda f: drop(f, 2, *ALL), r"missing.*\[2\]"),
    "last_missing": (lambda f: drop(f, 3, *ALL), r"missing.*\[3\]"),
    "two_missing": (lambda f: both(drop(f, 0, *ALL), drop(f, 2, *ALL)), r"missing.*\[0, 2\]"),
    "gate_missing": (lambda f: drop(f, 1, "gate"), r"missing.*\[1\]"),
    "up_missing": (lambda f: drop(f, 1, "up"), r"missing.*\[1\]"),
    "down_missing": (lambda f: drop(f, 3, "down"), r"missing.*\[3\]"),
    "all_gates_missing": (lambda f: both(*(drop(f, e, "gate") for e in range(4))), r"missing.*\[0, 1, 2, 3\]"),
    "one_too_many": (lambda f: add(f, 4, *ALL), r"unexpected.*\[4\]"),
    "one_projection_too_many": (lambda f: add(f, 4, "down"), r"unexpected.*\[4\]"),
    "index_swapped": (lambda f: both(add(f, 4, *ALL), drop(f, 1, *ALL)), r"missing.*\[1\].*unexpected.*\[4\]"),
}


@pytest.mark.parametrize(("edit", "says"), WRONG_EXPERTS.values(), ids=WRONG_EXPERTS)
@pytest.mark.parametrize("family", PER_EXPERT_FAMILIES)
def test_wrong_experts(
    family: str,
    edit: Callable[[str], Callable[[Tensors], None]],
    says: str,
    tiny_checkpoints: dict[str, Path],
    tmp_path: Path,
) -> None:
    """A gap or a surplus among the experts is named with layer, projection and expert: it would shift the others."""
    checkpoint = edited(tiny_checkpoints[family], tmp_path / "edited", edit(family))
    refused(checkpoint, QMoEConfig(), r"model\.layers\.1\.mlp\.experts\.(gate_up|down)_proj", says, "4 experts")


@pytest.mark.parametrize("family", PER_EXPERT_FAMILIES)
def test_all_experts_of_a_layer_missing(family: str, tiny_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """A layer without any expert is refused rather than initialised."""
    edit = both(*(drop(family, expert, *ALL) for expert in range(4)))
    checkpoint = edited(tiny_checkpoints[family], tmp_path / "edited", edit)
    refused(checkpoint, QMoEConfig(), rf"{PREFIX}gate_up_proj", rf"{PREFIX}down_proj", "incomplete")


@pytest.mark.parametrize("name", ["down_proj", "gate_up_proj", "down_proj_bias", "gate_up_proj_bias"])
def test_missing_tensor_of_a_fused_checkpoint(name: str, tiny_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """A stack or a bias that is not there is refused by name."""
    checkpoint = edited(tiny_checkpoints["gpt_oss"], tmp_path / "edited", lambda tensors: tensors.pop(PREFIX + name))
    refused(checkpoint, QMoEConfig(), re.escape(PREFIX + name), "incomplete")


def test_missing_bias_of_a_packed_checkpoint(packed_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """Biases are not packed, and are checked all the same."""
    name = f"{PREFIX}down_proj_bias"
    checkpoint = edited(packed_checkpoints["gpt_oss"], tmp_path / "edited", lambda tensors: tensors.pop(name))
    refused(checkpoint, None, re.escape(name), "incomplete")


@pytest.mark.parametrize("count", [3, 5])
@pytest.mark.parametrize("family", ["gpt_oss", "fused"])
def test_wrong_number_of_experts_in_a_fused_checkpoint(
    family: str, count: int, tiny_checkpoints: dict[str, Path], fused_checkpoint: Path, tmp_path: Path
) -> None:
    """A stack with another number of experts than the config declares is refused."""
    source = fused_checkpoint if family == "fused" else tiny_checkpoints[family]
    name = f"{PREFIX}down_proj"

    def edit(tensors: Tensors) -> None:
        tensors[name] = torch.cat([tensors[name]] * 2)[:count].clone()

    refused(edited(source, tmp_path / "edited", edit), QMoEConfig(), re.escape(name), rf"\({count}, ", "4")


# -- shapes and values ----------------------------------------------------------------------------------------------


WRONG_SHAPES: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "fewer_rows": ("down", lambda w: w[:-1]),
    "fewer_columns": ("down", lambda w: w[:, :-2]),
    "transposed": ("down", lambda w: w.t()),
    "flat": ("down", lambda w: w.flatten()),
    "gate_rows": ("gate", lambda w: w[:-2]),
    "gate_columns": ("gate", lambda w: w[:, :-2]),
    "gate_flat": ("gate", lambda w: w.flatten()),
    "up_transposed": ("up", lambda w: w.t()),
}


@pytest.mark.parametrize(("projection", "change"), WRONG_SHAPES.values(), ids=WRONG_SHAPES)
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_wrong_shape(
    family: str,
    projection: str,
    change: Callable[[Tensor], Tensor],
    tiny_checkpoints: dict[str, Path],
    tmp_path: Path,
) -> None:
    """A single expert of another shape is refused, naming layer, projection and expert."""
    key = expert_key(family, 1, 2, projection)

    def edit(tensors: Tensors) -> None:
        tensors[key] = change(tensors[key]).contiguous().clone()

    name = "down_proj" if projection == "down" else "gate_up_proj"
    refused(edited(tiny_checkpoints[family], tmp_path / "edited", edit), QMoEConfig(), PREFIX + name, "expert 2")


def test_gate_and_up_that_add_up_to_the_right_shape(tiny_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """A gate two rows too long with an up projection two rows too short is refused, not cut in the wrong place."""
    gate, up = (expert_key("qwen3_moe", 1, 2, projection) for projection in ("gate", "up"))

    def edit(tensors: Tensors) -> None:
        tensors[gate], tensors[up] = torch.cat([tensors[gate], tensors[up][:2]]), tensors[up][2:].clone()

    checkpoint = edited(tiny_checkpoints["qwen3_moe"], tmp_path / "edited", edit)
    refused(checkpoint, QMoEConfig(), f"{PREFIX}gate_up_proj")


@pytest.mark.parametrize(
    "change",
    [lambda w: w.transpose(1, 2), lambda w: w[:, :-2], lambda w: w[:, :, :-2], lambda w: w[0]],
    ids=["transposed", "fewer_inputs", "fewer_outputs", "one_expert"],
)
def test_wrong_shape_of_a_fused_stack(
    change: Callable[[Tensor], Tensor], tiny_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """A fused stack of another shape is refused by name."""
    name = f"{PREFIX}down_proj"

    def edit(tensors: Tensors) -> None:
        tensors[name] = change(tensors[name]).contiguous().clone()

    refused(edited(tiny_checkpoints["gpt_oss"], tmp_path / "edited", edit), QMoEConfig(), re.escape(name), "shape")


@pytest.mark.parametrize("quant_type", ["nf4", "fp4", "int8", "fp8", "bf16", "fp16"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")], ids=["nan", "inf", "minus_inf"])
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_value_that_is_not_finite(
    family: str, value: float, quant_type: str, tiny_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """One NaN or infinite weight is refused, naming the parameter: it would spoil its block."""
    key = f"{PREFIX}down_proj" if family == "gpt_oss" else expert_key(family, 1, 2, "down")

    def edit(tensors: Tensors) -> None:
        tensors[key].view(-1)[-1] = value

    checkpoint = edited(tiny_checkpoints[family], tmp_path / "edited", edit)
    config = QMoEConfig(experts_quant_type=quant_type)
    refused(checkpoint, config, f"{PREFIX}down_proj", "finite|NaN or infinite")


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn], ids=["int8", "uint8", "float8"])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_weight_that_is_quantized_already(
    family: str, dtype: torch.dtype, tiny_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """Expert weights in 8 bit, whose scales nobody would apply, are refused by name rather than cast."""
    key = f"{PREFIX}down_proj" if family == "gpt_oss" else expert_key(family, 1, 2, "down")

    def edit(tensors: Tensors) -> None:
        tensors[key] = tensors[key].float().to(dtype)

    checkpoint = edited(tiny_checkpoints[family], tmp_path / "edited", edit)
    refused(checkpoint, QMoEConfig(), re.escape(key), "quantized already|float")


def test_value_that_overflows_fp16(tiny_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """A weight that is finite in bf16 but not in the fp16 asked for is refused."""
    key = expert_key("qwen3_moe", 1, 2, "up")

    def edit(tensors: Tensors) -> None:
        tensors[key].view(-1)[0] = 1e5

    checkpoint = edited(tiny_checkpoints["qwen3_moe"], tmp_path / "edited", edit)
    refused(checkpoint, QMoEConfig(experts_quant_type="fp16"), f"{PREFIX}gate_up_proj", "finite.*fp16")
    assert packed_modules(load(checkpoint, QMoEConfig()))


def test_quantize_experts_names_a_bad_weight_and_changes_nothing(tiny_checkpoints: dict[str, Path]) -> None:
    """In memory too, a NaN is named, and the model is the float model that it was."""
    model = load(tiny_checkpoints["qwen3_moe"])
    model.model.layers[1].mlp.experts.down_proj.data[2, 0, 0] = torch.nan
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ValueError, match=rf"{PREFIX}down_proj.*expert 2.*finite"):
        quantize_experts(model)
    assert not packed_modules(model)
    assert_same_tensors(model.state_dict(), before)
    assert getattr(model, "hf_quantizer", None) is None
    assert not hasattr(model.config, "quantization_config")
    model.model.layers[1].mlp.experts.down_proj.data[2, 0, 0] = 0.0
    assert len(packed_modules(quantize_experts(model))) == 2


@pytest.mark.parametrize("how", ["from_pretrained", "quantize_experts"])
def test_odd_input_features(how: str, odd_checkpoint: Path) -> None:
    """An odd row cannot be packed two weights to the byte: the error names it and what works; that does work."""
    says = r"(?s)layers\.0\.mlp\.experts.*in_features=33 is odd.*int8.*modules_to_not_convert"

    def quantize(config: QMoEConfig) -> torch.nn.Module:
        if how == "from_pretrained":
            return load(odd_checkpoint, config)
        return quantize_experts(load(odd_checkpoint), config)

    with pytest.raises(ValueError, match=says):
        quantize(QMoEConfig())
    assert len(packed_modules(quantize(QMoEConfig(experts_quant_type="int8")))) == 2
    assert not packed_modules(quantize(QMoEConfig(modules_to_not_convert=["experts"])))
    mixed = QMoEConfig(experts_overrides={"layers.0": "bf16"}, modules_to_not_convert=["layers.1.mlp.experts"])
    assert list(packed_modules(quantize(mixed))) == ["model.layers.0.mlp.experts"]


@pytest.mark.parametrize("how", ["from_pretrained", "quantize_experts"])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_no_block_size_divides(
    family: str,
    how: str,
    indivisible_checkpoints: dict[str, Path],
    tmp_path: Path,
    warnings_logged: list[str],
) -> None:
    """Experts that no block size divides stay float with a warning that names each; the model saves and reloads."""
    checkpoint = indivisible_checkpoints[family]
    model = load(checkpoint, QMoEConfig()) if how == "from_pretrained" else quantize_experts(load(checkpoint))
    assert not packed_modules(model)
    of_experts = [message for message in warnings_logged if "experts" in message]  # uneven linears are named too
    assert len(of_experts) == 2
    for layer, message in enumerate(of_experts):
        assert f"model.layers.{layer}.mlp.experts stays unquantized" in message
        assert "nf4" in message
    expected = logits(model)
    plain = load(checkpoint)
    assert torch.equal(model.model.layers[0].mlp.experts.down_proj, plain.model.layers[0].mlp.experts.down_proj)
    model.save_pretrained(tmp_path)
    experts = {name for name in tensors_on_disk(checkpoint) if ".experts." in name}
    assert experts == {name for name in tensors_on_disk(tmp_path) if ".experts." in name}
    assert torch.equal(logits(load(tmp_path)), expected)


# -- files ----------------------------------------------------------------------------------------------------------


def with_bytes(source: Path, target: Path, change: Callable[[bytes], bytes]) -> Path:
    """A copy of a one-file checkpoint with other bytes in it."""
    shutil.copytree(source, target)
    file = target / "model.safetensors"
    file.write_bytes(change(file.read_bytes()))
    return target


def header(text: str) -> bytes:
    """A safetensors file with this header and a few bytes of data."""
    return struct.pack("<Q", len(text)) + text.encode() + b"\0" * 8


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "one_byte_short": lambda b: b[:-1],
    "half": lambda b: b[: len(b) // 2],
    "within_the_header": lambda b: b[:200],
    "four_bytes": lambda b: b[:4],
    "empty": lambda b: b"",
    "header_length_absurd": lambda b: b"\xff" * 8 + b[8:],
    "header_not_json": lambda b: b[:8] + b"[" + b[9:],
    "header_not_text": lambda b: b[:8] + b"\xff" * 50 + b[58:],
    "header_is_a_list": lambda b: header("[1, 2]"),
    "header_is_a_number": lambda b: header("7"),
    "entry_without_offsets": lambda b: header('{"a": {"dtype": "F32", "shape": [2]}}'),
    "entry_is_text": lambda b: header('{"a": "b"}'),
    "offsets_are_text": lambda b: header('{"a": {"dtype": "F32", "shape": [2], "data_offsets": ["0", "8"]}}'),
    "a_web_page": lambda b: b"<!doctype html><html><body>Not found</body></html>" + b" " * 100,
    "a_git_lfs_pointer": lambda b: b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 383440\n",
    "trailing_bytes": lambda b: b + b"\0" * 64,
}


@pytest.mark.parametrize("change", DAMAGE.values(), ids=DAMAGE)
def test_damaged_file(change: Callable[[bytes], bytes], tiny_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """A damaged or truncated file is named, and the error says to get it again."""
    checkpoint = with_bytes(tiny_checkpoints["qwen3_moe"], tmp_path / "damaged", change)
    refused(checkpoint, QMoEConfig(), r"model\.safetensors", "truncated|damaged", "again")


@pytest.mark.parametrize("damage", ["one_byte_short", "header_not_json", "empty"])
def test_damaged_packed_file(damage: str, packed_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """The same holds for a packed checkpoint."""
    checkpoint = with_bytes(packed_checkpoints["qwen3_moe"], tmp_path / "damaged", DAMAGE[damage])
    refused(checkpoint, None, r"model\.safetensors", "truncated|damaged", "again")


@pytest.mark.parametrize("shard", [0, 4, -1], ids=["first", "middle", "last"])
def test_truncated_shard(shard: int, sharded_checkpoint: Path, tmp_path: Path) -> None:
    """Of many shards, the truncated one is named."""
    shutil.copytree(sharded_checkpoint, tmp_path / "truncated")
    file = sorted((tmp_path / "truncated").glob("*.safetensors"))[shard]
    file.write_bytes(file.read_bytes()[:-10])
    refused(tmp_path / "truncated", QMoEConfig(), re.escape(file.name), "truncated")


def test_missing_shard(sharded_checkpoint: Path, tmp_path: Path) -> None:
    """A shard that the index names and that is not there is named."""
    shutil.copytree(sharded_checkpoint, tmp_path / "short")
    file = sorted((tmp_path / "short").glob("*.safetensors"))[3]
    file.unlink()
    refused(tmp_path / "short", QMoEConfig(), re.escape(file.name), error=OSError)


# -- packed checkpoints that do not fit their config ----------------------------------------------------------------


@pytest.fixture(scope="module")
def saved_as(tiny_checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """qwen3_moe packed with a config and saved, once for each config."""
    made: dict[str, Path] = {}

    def save(**fields: object) -> Path:
        key = json.dumps(fields, sort_keys=True)
        if key not in made:
            made[key] = tmp_path_factory.mktemp("saved_as")
            load(tiny_checkpoints["qwen3_moe"], QMoEConfig(**fields)).save_pretrained(made[key])
        return made[key]

    return save


@pytest.mark.parametrize(
    ("stored", "claimed"),
    [
        ("nf4", "fp4"),
        ("fp4", "nf4"),
        ("int8", "fp8"),
        ("fp8", "int8"),
        ("bf16", "fp16"),
        ("nf4", "int8"),
        ("nf4", "bf16"),
    ],
)
def test_another_quant_type(stored: str, claimed: str, saved_as: Callable[..., Path], tmp_path: Path) -> None:
    """Bytes of one format are not read as another: the error names both and the module."""
    checkpoint = with_config(saved_as(experts_quant_type=stored), tmp_path / "edited", experts_quant_type=claimed)
    refused(checkpoint, None, r"layers\.0\.mlp\.experts", f"'{stored}'", f"'{claimed}'")


@pytest.mark.parametrize(
    "changes",
    [
        {"experts_blocksize": 32},
        {"experts_blocksize": 128},
        {"experts_double_quant": True},
        {"experts_overrides": {"layers.0.mlp.experts": "fp4"}},
        {"experts_overrides": {"layers.0.mlp.experts": "int8"}},
    ],
    ids=["smaller_blocks", "larger_blocks", "double_quant", "override_fp4", "override_int8"],
)
def test_another_layout(changes: dict[str, object], saved_as: Callable[..., Path], tmp_path: Path) -> None:
    """Other settings that change what the bytes mean are refused with this package's error, naming the module."""
    checkpoint = with_config(saved_as(), tmp_path / "edited", **changes)
    refused(checkpoint, None, r"layers\.0\.mlp\.experts", "stored")


@pytest.mark.parametrize("stored", ["int8", "fp8"])
def test_eight_bit_codes_are_not_loaded_as_weights(stored: str, saved_as: Callable[..., Path], tmp_path: Path) -> None:
    """A skip list added by hand does not put codes, which have the shape of weights, into a float module."""
    changes = {"modules_to_not_convert": ["layers.0.mlp.experts"]}
    checkpoint = with_config(saved_as(experts_quant_type=stored), tmp_path / "edited", **changes)
    refused(checkpoint, None, r"layers\.0\.mlp\.experts")


def test_skipped_stack_is_not_read_as_packed(saved_as: Callable[..., Path], tmp_path: Path) -> None:
    """A skip list removed by hand does not make packed bytes of a float stack."""
    for number, fields in enumerate(({}, {"experts_quant_type": "bf16"}, {"experts_quant_type": "int8"})):
        source = saved_as(**fields, modules_to_not_convert=["layers.0.mlp.experts"])
        checkpoint = with_config(source, tmp_path / str(number), modules_to_not_convert=None)
        refused(checkpoint, None, r"layers\.0\.mlp\.experts")


@pytest.mark.parametrize(
    "name",
    [
        "gate_up_proj_absmax",
        "down_proj_absmax",
        "down_proj_nested_absmax",
        "gate_up_proj_nested_offset",
        "down_proj",
        "quant_metadata",
    ],
)
def test_missing_tensor_of_a_packed_checkpoint(name: str, saved_as: Callable[..., Path], tmp_path: Path) -> None:
    """A packed checkpoint that lacks bytes, a scale or its metadata is refused by name."""
    source = saved_as(experts_double_quant=True)
    checkpoint = edited(source, tmp_path / "edited", lambda tensors: tensors.pop(PREFIX + name))
    refused(checkpoint, None, re.escape(PREFIX + name), "incomplete")


@pytest.mark.parametrize("quant_type", ["nf4", "bf16"])
@pytest.mark.parametrize(
    "change",
    [lambda t: t[:3], lambda t: torch.cat([t, t[:1]])],
    ids=["fewer_experts", "more_experts"],
)
def test_packed_stack_with_another_number_of_experts(
    change: Callable[[Tensor], Tensor], quant_type: str, saved_as: Callable[..., Path], tmp_path: Path
) -> None:
    """A packed stack with another number of experts is refused when it is loaded, not in the first forward."""
    name = f"{PREFIX}down_proj"

    def edit(tensors: Tensors) -> None:
        tensors[name] = change(tensors[name]).clone()

    checkpoint = edited(saved_as(experts_quant_type=quant_type), tmp_path / "edited", edit)
    refused(checkpoint, None, r"layers\.1\.mlp\.experts", error=(ValueError, RuntimeError))


@pytest.mark.parametrize(
    "change",
    [lambda t: t[:, :-1], lambda t: t[:, :, :-1], lambda t: t.flatten(1), lambda t: t.view(torch.int8), Tensor.float],
    ids=["fewer_rows", "fewer_columns", "flat", "int8", "float32"],
)
def test_packed_stack_of_another_kind(
    change: Callable[[Tensor], Tensor], saved_as: Callable[..., Path], tmp_path: Path
) -> None:
    """A packed stack of another shape or dtype is refused when it is loaded."""
    name = f"{PREFIX}down_proj"

    def edit(tensors: Tensors) -> None:
        tensors[name] = change(tensors[name]).clone()

    checkpoint = edited(saved_as(), tmp_path / "edited", edit)
    refused(checkpoint, None, r"layers\.1\.mlp\.experts|size mismatch", error=(ValueError, RuntimeError))


def test_scales_that_are_not_finite(saved_as: Callable[..., Path], tmp_path: Path) -> None:
    """A damaged scale in a packed checkpoint is refused like a NaN in a float one."""
    name = f"{PREFIX}down_proj_absmax"

    def edit(tensors: Tensors) -> None:
        tensors[name].view(torch.float32)[0, 5] = torch.nan

    refused(edited(saved_as(), tmp_path / "edited", edit), None, r"layers\.1\.mlp\.experts", "finite|NaN")


@pytest.mark.parametrize(
    "text",
    [b"\0" * 40, b"{}", b"not json", b'{"quant_type": "nf4"}', b"[]"],
    ids=["zeros", "empty", "text", "partial", "list"],
)
def test_unreadable_metadata(text: bytes, saved_as: Callable[..., Path], tmp_path: Path) -> None:
    """Metadata that says nothing is refused, naming the module."""
    name = f"{PREFIX}quant_metadata"

    def edit(tensors: Tensors) -> None:
        padded = text.ljust(tensors[name].numel(), b" ")
        tensors[name] = torch.tensor(list(padded), dtype=torch.uint8)

    refused(edited(saved_as(), tmp_path / "edited", edit), None, r"layers\.1\.mlp\.experts")


def test_newer_format_version(saved_as: Callable[..., Path], tmp_path: Path) -> None:
    """Bytes of a newer layout are refused with the advice to upgrade."""
    name = f"{PREFIX}quant_metadata"

    def edit(tensors: Tensors) -> None:
        text = bytes(tensors[name].tolist()).replace(b'"format_version":1', b'"format_version":2')
        tensors[name] = torch.tensor(list(text), dtype=torch.uint8)

    refused(edited(saved_as(), tmp_path / "edited", edit), None, "version 2", "upgrade hf_qmoe")


def test_newer_config_field(saved_as: Callable[..., Path], tmp_path: Path) -> None:
    """A field of a newer config is refused with the advice to upgrade."""
    checkpoint = with_config(saved_as(), tmp_path / "edited", experts_codebook="learned")
    refused(checkpoint, None, "experts_codebook", "upgrade hf_qmoe")


def test_ignoring_mismatched_sizes_does_not_help(saved_as: Callable[..., Path], tmp_path: Path) -> None:
    """`ignore_mismatched_sizes=True`, which transformers suggests, does not get past these checks."""
    checkpoint = with_config(saved_as(), tmp_path / "edited", experts_blocksize=32)
    refused(checkpoint, None, r"layers\.0\.mlp\.experts", ignore_mismatched_sizes=True)


# -- configs and models that do not go together ---------------------------------------------------------------------


@pytest.mark.parametrize("which", ["packed", "packed_in_memory", "bitsandbytes"])
def test_model_that_is_quantized_already(which: str, tiny_checkpoints: dict[str, Path]) -> None:
    """A quantized model is not quantized again, and stays as it was."""
    checkpoint = tiny_checkpoints["qwen3_moe"]
    if which == "packed":
        model = load(checkpoint, QMoEConfig())
    elif which == "packed_in_memory":
        model = quantize_experts(load(checkpoint))
    else:
        model = load(checkpoint, BitsAndBytesConfig(load_in_4bit=True))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ValueError, match=r"quantized already.*dequantize"):
        quantize_experts(model)
    assert_same_tensors(model.state_dict(), before)


@pytest.mark.parametrize("given", ["peft_model", "base_model"])
def test_model_with_an_adapter(given: str, tiny_checkpoints: dict[str, Path]) -> None:
    """A float model that carries an adapter is refused: its factors are linears, and would be quantized too."""
    adapted = get_peft_model(load(tiny_checkpoints["qwen3_moe"]), LoraConfig(r=4, target_modules=["q_proj"]))
    with pytest.raises(ValueError, match="adapter"):
        quantize_experts(adapted if given == "peft_model" else adapted.get_base_model())
    assert all(p.requires_grad for name, p in adapted.named_parameters() if "lora_" in name)


def test_model_without_weights() -> None:
    """A model on the meta device has nothing to quantize: `quantize_experts` says so."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_config("qwen3_moe"))
    with pytest.raises(ValueError, match="meta"):
        quantize_experts(model)
    assert not packed_modules(model)


@pytest.mark.filterwarnings("ignore:.*float32")
def test_own_config_over_a_bitsandbytes_checkpoint(tiny_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """As stock bitsandbytes saves it today: linears in 4 bit, which are kept, experts in bf16, which are packed."""
    stock = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)
    load(tiny_checkpoints["qwen3_moe"], stock).save_pretrained(tmp_path)
    model, expected = load(tmp_path, QMoEConfig()), load(tiny_checkpoints["qwen3_moe"], QMoEConfig())
    assert_same_tensors(packed_state(model), packed_state(expected))
    assert torch.equal(logits(model), logits(expected))


def test_bitsandbytes_config_over_an_own_checkpoint(packed_checkpoints: dict[str, Path]) -> None:
    """The other way round too."""
    refused(packed_checkpoints["qwen3_moe"], BitsAndBytesConfig(load_in_4bit=True), "BitsAndBytesConfig", "QMoEConfig")


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")
def test_own_config_over_an_own_checkpoint(packed_checkpoints: dict[str, Path]) -> None:
    """A packed checkpoint is read as it was saved, whatever config is passed again."""
    model = load(packed_checkpoints["qwen3_moe"], QMoEConfig(experts_quant_type="int8"))
    assert {module.quant_type for module in packed_modules(model).values()} == {"nf4"}
    assert_same_tensors(packed_state(model), packed_state(load(packed_checkpoints["qwen3_moe"])))


def test_failed_load_leaves_nothing_behind(tiny_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """After a load that raised, the same config loads a good checkpoint to the same bytes."""
    config = QMoEConfig()
    bad = edited(tiny_checkpoints["qwen3_moe"], tmp_path / "edited", drop("qwen3_moe", 1, "down"))
    refused(bad, config, "missing")
    again = load(tiny_checkpoints["qwen3_moe"], config)
    assert_same_tensors(again.state_dict(), load(tiny_checkpoints["qwen3_moe"], QMoEConfig()).state_dict())


# -- the environment ------------------------------------------------------------------------------------------------


def run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs `code` in a new interpreter."""
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False, timeout=120
    )


_PRETEND = """
import importlib.metadata, sys
real = importlib.metadata.version
def version(name):
    if name == sys.argv[1]:
        if sys.argv[2] == "none":
            raise importlib.metadata.PackageNotFoundError(name)
        return sys.argv[2]
    return real(name)
importlib.metadata.version = version
try:
    import hf_qmoe
except ImportError as error:
    print(error)
    print("transformers" in sys.modules)
"""


@pytest.mark.parametrize(
    ("package", "found", "needed"),
    [("transformers", "5.22.0", "5.23.0"), ("bitsandbytes", "0.47.0", "0.48.0"), ("bitsandbytes", "none", "0.48.0")],
    ids=["old_transformers", "old_bitsandbytes", "no_bitsandbytes"],
)
def test_package_that_is_too_old(package: str, found: str, needed: str) -> None:
    """Importing over a package that is too old or missing raises before anything else, with the command to run."""
    message, imported = run(_PRETEND, package, found).stdout.splitlines()
    assert f"{package}>={needed}, found {found}" in message
    assert f"pip install -U '{package}>={needed}'" in message
    assert imported == "False"


class _Foreign(Bnb4BitHfQuantizer):
    pass


@pytest.mark.parametrize("registry", ["AUTO_QUANTIZER_MAPPING", "AUTO_QUANTIZATION_CONFIG_MAPPING"])
def test_method_name_that_is_taken(registry: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where another package owns the name, registering raises with that package's class and leaves it in place."""
    monkeypatch.setitem(getattr(auto, registry), "qmoe", _Foreign)
    with pytest.raises(ImportError, match=r"'qmoe' is taken by tests\.loading\.test_bad_input\._Foreign"):
        register()
    assert getattr(auto, registry)["qmoe"] is _Foreign


def test_registering_twice_changes_nothing() -> None:
    """`register` is harmless a second time, and so is importing again."""
    mappings = (auto.AUTO_QUANTIZER_MAPPING, auto.AUTO_QUANTIZATION_CONFIG_MAPPING)
    before = [copy.copy(mapping) for mapping in mappings]
    register()
    importlib.import_module("hf_qmoe")
    assert [dict(mapping) for mapping in mappings] == before
    assert hf_qmoe.QMoEConfig is auto.AUTO_QUANTIZATION_CONFIG_MAPPING["qmoe"]


def test_foreign_bitsandbytes_quantizer_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plugin that replaced bitsandbytes' own quantizer is not replaced in turn."""
    monkeypatch.setitem(auto.AUTO_QUANTIZER_MAPPING, "bitsandbytes_4bit", _Foreign)
    register()
    assert auto.AUTO_QUANTIZER_MAPPING["bitsandbytes_4bit"] is _Foreign


_RELOAD = """
import importlib, sys
from transformers import AutoModelForCausalLM
import hf_qmoe
if sys.argv[1] == "reload":
    importlib.reload(hf_qmoe)
else:
    for name in [n for n in sys.modules if n.partition(".")[0] == "hf_qmoe"]:
        del sys.modules[name]
    import hf_qmoe
model = AutoModelForCausalLM.from_pretrained(sys.argv[2], quantization_config=hf_qmoe.QMoEConfig())
model.save_pretrained(sys.argv[3])
again = AutoModelForCausalLM.from_pretrained(sys.argv[3])
assert isinstance(again.model.layers[0].mlp.experts, hf_qmoe.ExpertsNbit), type(again.model.layers[0].mlp.experts)
assert type(again.hf_quantizer).__module__ == "hf_qmoe.quantizer"
again.dequantize()
"""


@pytest.mark.parametrize("how", ["reload", "reimport"])
def test_importing_again_in_one_process(
    how: str, tiny_checkpoints: dict[str, Path], packed_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """After `importlib.reload`, or a fresh import as notebooks do it, loading and saving work as before."""
    result = run(_RELOAD, how, str(tiny_checkpoints["qwen3_moe"]), str(tmp_path))
    assert result.returncode == 0, result.stderr[-2000:]
    ours, expected = tensors_on_disk(tmp_path), tensors_on_disk(packed_checkpoints["qwen3_moe"])
    assert_same_tensors(ours, expected)


def test_wrong_module_type() -> None:
    """Only experts modules can be turned into packed ones."""
    with pytest.raises(TypeError, match="Linear"):
        ExpertsNbit.from_experts(torch.nn.Linear(64, 64))
    module = tiny_model("qwen3_moe").model.layers[0].mlp.experts
    packed = ExpertsNbit.from_experts(module)
    with pytest.raises(TypeError, match="packed already"):
        ExpertsNbit.from_experts(packed)


def test_file_helpers_do_what_they_say(tiny_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """An edit that changes nothing gives a checkpoint that loads: the errors above come from the edits."""
    checkpoint = edited(tiny_checkpoints["qwen3_moe"], tmp_path / "edited", lambda tensors: None)
    assert_same_tensors(
        load(checkpoint, QMoEConfig()).state_dict(), load(tiny_checkpoints["qwen3_moe"], QMoEConfig()).state_dict()
    )
    tensors = load_file(checkpoint / "model.safetensors")
    save_file(tensors, tmp_path / "again.safetensors", metadata={"format": "pt"})
    assert (tmp_path / "again.safetensors").read_bytes() == (checkpoint / "model.safetensors").read_bytes()
