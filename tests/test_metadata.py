"""`quant_metadata`: what is written beside packed bytes, and what is refused on reading."""

import copy
import json

import pytest
import torch

from hf_qmoe import metadata
from hf_qmoe.packed import PackedStack


def stacks(quant_type: str = "nf4", blocksize: int = 64, double_quant: bool = False, hidden: int = 128):
    """The stacks of a small experts module."""
    return {
        "gate_up_proj": PackedStack.empty(2, 64, hidden, quant_type, blocksize, double_quant),
        "down_proj": PackedStack.empty(2, hidden, 32, quant_type, blocksize, double_quant),
    }


def test_the_description_is_the_documented_one():
    """Format, version and logical sizes, exactly as `docs/format.md` shows; in_features 32 is crossed by blocks."""
    assert metadata.describe(stacks()) == {
        "format_version": 1,
        "quant_type": "nf4",
        "double_quant": False,
        "stacks": {
            "gate_up_proj": {"out_features": 64, "in_features": 128, "blocksize": 64},
            "down_proj": {"out_features": 128, "in_features": 32, "blocksize": 64},
        },
    }


@pytest.mark.parametrize("quant_type", ["nf4", "fp4", "int8", "fp8", "bf16", "fp16"])
@pytest.mark.parametrize("double_quant", [False, True], ids=["plain", "double"])
def test_encoding_round_trips(quant_type, double_quant):
    """A description comes back equal from one uint8 vector on the CPU; double quantization needs scales."""
    described = metadata.describe(stacks(quant_type, 64, double_quant))
    buffer = metadata.encode(described)
    assert (buffer.dtype, buffer.ndim, buffer.device.type) == (torch.uint8, 1, "cpu")
    assert metadata.decode(buffer) == described
    assert described["double_quant"] == (double_quant and quant_type not in ("bf16", "fp16"))
    assert described["stacks"]["down_proj"]["blocksize"] == (0 if quant_type in ("bf16", "fp16") else 64)


def test_the_bytes_are_canonical_ascii_json():
    """Readers without this package parse them, and equal modules have equal bytes whatever the order of keys."""
    described = metadata.describe(stacks())
    text = bytes(metadata.encode(described).tolist()).decode("ascii")
    assert json.loads(text) == described
    assert text.startswith('{"double_quant":false,"format_version":1,"quant_type":"nf4","stacks":{"down_proj":')
    assert torch.equal(metadata.encode(dict(reversed(described.items()))), metadata.encode(described))


def test_encoding_makes_values_under_a_meta_default_device():
    """transformers builds models under `torch.device("meta")`; the buffer must hold bytes all the same."""
    described = metadata.describe(stacks())
    with torch.device("meta"):
        buffer = metadata.encode(described)
    assert metadata.decode(buffer) == described


def ascii_bytes(text: str) -> torch.Tensor:
    """`text` as a uint8 tensor."""
    return torch.tensor(list(text.encode("utf-8")), dtype=torch.uint8)


@pytest.mark.parametrize(
    "buffer",
    [
        pytest.param(torch.zeros(0, dtype=torch.uint8), id="empty"),
        pytest.param(torch.zeros(16, dtype=torch.uint8), id="zeros"),
        pytest.param(ascii_bytes('{"quant_type":"nf4"')[:-3], id="truncated"),
        pytest.param(ascii_bytes('{"quant_type":"nf4\u00e9"}'), id="not-ascii"),
        pytest.param(ascii_bytes('{"quant_type":"nf4"}').half(), id="cast"),
        pytest.param(ascii_bytes('{"quant_type":"nf4"}').long() + 300, id="out-of-range"),
        pytest.param(ascii_bytes('{"quant_type":"nf4"}')[None], id="2-d"),
    ],
)
def test_unreadable_bytes_are_refused(buffer):
    """What is no ASCII JSON raises one clear error."""
    with pytest.raises(ValueError, match="quant_metadata is not readable"):
        metadata.decode(buffer)


@pytest.mark.parametrize("text", ["null", "[]", '"nf4"', "4", "{}", '{"format_version":1}'])
def test_json_that_names_no_format_is_refused(text):
    """Valid JSON that is no description is no description."""
    with pytest.raises(ValueError, match="quant_metadata holds no quant_type"):
        metadata.decode(ascii_bytes(text))


def test_a_module_reads_what_it_wrote():
    """Equal descriptions, after a round trip and in any order of keys, are no mismatch."""
    expected = metadata.describe(stacks())
    stored = metadata.decode(metadata.encode(metadata.describe(stacks())))
    assert metadata.mismatch(stored, expected) is None
    assert metadata.mismatch(dict(reversed(stored.items())), expected) is None


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        (stacks("fp4"), "stored with quant_type='fp4', the module was built with quant_type='nf4'"),
        (stacks("int8"), "build it with quant_type='int8'"),
        (stacks(double_quant=True), "stored with double_quant=True, the module was built with double_quant=False"),
        (stacks(blocksize=128), "'blocksize': 128"),
        (stacks(hidden=64), "'in_features': 64"),
    ],
    ids=["codebook", "bits", "double_quant", "blocksize", "shape"],
)
def test_each_difference_is_refused_and_named(stored, message):
    """The message says what the bytes are, what the module is, and for a format how to build the module."""
    problem = metadata.mismatch(metadata.describe(stored), metadata.describe(stacks()))
    assert message in problem


def test_missing_and_additional_stacks_are_refused():
    """An `up_proj` checkpoint does not fit a gated module."""
    expected = metadata.describe(stacks())
    stored = copy.deepcopy(expected)
    stored["stacks"]["up_proj"] = stored["stacks"].pop("gate_up_proj")
    problem = metadata.mismatch(stored, expected)
    assert "up_proj" in problem
    assert "gate_up_proj" in problem


def test_a_newer_format_is_refused_before_anything_else():
    """Whatever else differs, a version from the future says: upgrade."""
    expected = metadata.describe(stacks())
    stored = copy.deepcopy(expected) | {"format_version": metadata.FORMAT_VERSION + 1, "quant_type": "nf3"}
    problem = metadata.mismatch(stored, expected)
    assert f"format version {metadata.FORMAT_VERSION + 1}" in problem
    assert f"reads version {metadata.FORMAT_VERSION}" in problem
    assert "upgrade hf_qmoe" in problem


@pytest.mark.parametrize("version", [None, 0], ids=["none", "older"])
def test_an_unknown_version_is_refused(version):
    """A description without a version, or with one that never was, is not read on trust."""
    expected = metadata.describe(stacks())
    stored = copy.deepcopy(expected) | {"format_version": version}
    assert f"format version {version}" in metadata.mismatch(stored, expected)
