"""State dicts that a packed module would misread are refused, and the module keeps what it had."""

import json
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.muse_spark.modeling_muse_spark import MuseSparkExperts
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from tests.support.experts import float_experts, packed_experts
from tests.support.state import assert_same_state, filled, plain, snapshot


CLASSES = (Qwen3MoeExperts, GptOssExperts, NemotronHExperts, MuseSparkExperts)
by_class = pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)


def edited_metadata(**changes: object) -> Callable[[dict[str, Tensor]], None]:
    """Writes `changes` into the metadata of a state dict."""

    def edit(state: dict[str, Tensor]) -> None:
        text = json.loads(bytes(state["quant_metadata"].tolist())) | changes
        state["quant_metadata"] = torch.tensor(list(json.dumps(text).encode()), dtype=torch.uint8)

    return edit


def damaged_metadata(text: bytes) -> Callable[[dict[str, Tensor]], None]:
    """Puts `text` in the place of the metadata."""

    def edit(state: dict[str, Tensor]) -> None:
        state["quant_metadata"] = torch.tensor(list(text), dtype=torch.uint8)

    return edit


@pytest.mark.parametrize(
    ("stored", "built", "message"),
    [
        (("nf4",), ("fp4",), "quant_type='nf4'.*quant_type='fp4'"),
        (("fp4",), ("nf4",), "quant_type='fp4'.*quant_type='nf4'"),
        (("int8",), ("fp8",), "quant_type='int8'.*quant_type='fp8'"),
        (("bf16",), ("fp16",), "quant_type='bf16'.*quant_type='fp16'"),
        (("nf4",), ("int8",), "quant_type='nf4'.*quant_type='int8'"),
        (("nf4", 64), ("nf4", 32), "'blocksize': 64.*'blocksize': 32"),
        (("nf4", 32), ("nf4", 64), "'blocksize': 32.*'blocksize': 64"),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, tuple) else "",
)
@pytest.mark.parametrize("strict", [True, False], ids=["strict", "loose"])
@pytest.mark.parametrize("assign", [True, False], ids=["assigned", "copied"])
def test_bytes_of_another_format_are_refused(
    stored: tuple[object, ...], built: tuple[object, ...], message: str, strict: bool, assign: bool
) -> None:
    """The error names both formats, and the module keeps what it had."""
    module = plain(*built)
    before = snapshot(module)
    with pytest.raises(RuntimeError, match=message):
        module.load_state_dict(filled(*stored).state_dict(), strict=strict, assign=assign)
    assert_same_state(module, before)


@pytest.mark.parametrize("stored", [False, True], ids=["plain-into-double", "double-into-plain"])
def test_scales_of_another_kind_are_refused(stored: bool) -> None:
    """Double-quantized scales do not load into a module without, nor the other way round."""
    with pytest.raises(RuntimeError, match=f"double_quant={stored}.*double_quant={not stored}"):
        plain(double_quant=not stored).load_state_dict(filled(double_quant=stored).state_dict(), strict=False)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        pytest.param(edited_metadata(format_version=2), "format version 2.*upgrade hf_qmoe", id="newer"),
        pytest.param(damaged_metadata(b""), "quant_metadata", id="empty"),
        pytest.param(damaged_metadata(b"{"), "quant_metadata", id="cut"),
        pytest.param(damaged_metadata(b"\xff\x00"), "quant_metadata", id="not-ascii"),
        pytest.param(damaged_metadata(b"[]"), "quant_metadata", id="not-an-object"),
        pytest.param(damaged_metadata(b"{}"), "quant_metadata", id="says-nothing"),
        pytest.param(edited_metadata(quant_type="nf5"), "nf5", id="unknown-format"),
        pytest.param(edited_metadata(stacks=None), "stored for", id="no-stacks"),
    ],
)
def test_unreadable_metadata_is_refused(edit: Callable[[dict[str, Tensor]], None], message: str) -> None:
    """A newer version, damage, and formats of which nothing is known."""
    state = filled().state_dict()
    edit(state)
    module = plain()
    before = snapshot(module)
    with pytest.raises(RuntimeError, match=message):
        module.load_state_dict(state, strict=False)
    assert_same_state(module, before)


@by_class
def test_float_weights_are_refused(cls: type[nn.Module]) -> None:
    """A float state dict does not load into packed parameters, strict or not, and the error says what to do."""
    original = float_experts(cls)
    model = nn.ModuleDict({"experts": packed_experts(cls)})
    before = snapshot(model)
    state = {f"experts.{name}": tensor for name, tensor in original.state_dict().items()}
    for strict in (True, False):
        with pytest.raises(RuntimeError, match=r"experts: .*_proj is torch.float32.*quantization_config"):
            model.load_state_dict(state, strict=strict)
    assert_same_state(model, before)


def test_missing_metadata_is_a_missing_key() -> None:
    """A state dict that does not say what its bytes mean is incomplete."""
    state = filled().state_dict()
    del state["quant_metadata"]
    with pytest.raises(RuntimeError, match=r"Missing key.*quant_metadata"):
        plain().load_state_dict(state)
    assert plain().load_state_dict(state, strict=False).missing_keys == ["quant_metadata"]


@pytest.mark.parametrize("name", ["down_proj", "gate_up_proj_absmax"])
def test_missing_tensors_are_missing_keys(name: str) -> None:
    """Packed bytes and scales are required."""
    state = filled().state_dict()
    del state[name]
    with pytest.raises(RuntimeError, match=rf"Missing key.*{name}\W"):
        plain().load_state_dict(state)


def test_another_number_of_experts_is_refused() -> None:
    """The number of experts is not in the metadata, but in the shapes."""
    state = {n: t if n == "quant_metadata" else t[:2] for n, t in filled().state_dict().items()}
    with pytest.raises(RuntimeError, match="gate_up_proj"):
        plain().load_state_dict(state)
