"""Case 9 on whole models, read from disk, in both forms: experts of every proportion.

Single modules and other widths: tests/experts/test_forward.py; bytes of qwen3_moe, olmoe, mixtral and gpt_oss:
tests/loading/test_packing.py.
"""

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.aria.modeling_aria import AriaTextForCausalLM
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssForCausalLM
from transformers.models.mixtral.modeling_mixtral import MixtralForCausalLM
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHForCausalLM
from transformers.models.openai_privacy_filter.modeling_openai_privacy_filter import (
    OpenAIPrivacyFilterForTokenClassification,
)
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeForCausalLM

from hf_qmoe import ExpertsNbit, QMoEConfig
from tests.sweep.check import load
from tests.sweep.oracle import reference
from tests.sweep.tiny import build, inputs, shrunk


TOLERANCE = 1e-5  # fp32, relative to the largest logit
HIDDEN = 64
#: Widths of one expert.
INTERMEDIATE = {"2I=H": 32, "I=H": 64, "I<H": 48, "I>H": 128}
#: Classes, and the field that is the width of one expert. Transposed: the first three.
FAMILIES: dict[str, tuple[type[PreTrainedModel], str]] = {
    "gpt_oss": (GptOssForCausalLM, "intermediate_size"),
    "aria": (AriaTextForCausalLM, "intermediate_size"),
    "openai_privacy_filter": (OpenAIPrivacyFilterForTokenClassification, "intermediate_size"),
    "qwen3_moe": (Qwen3MoeForCausalLM, "moe_intermediate_size"),
    "mixtral": (MixtralForCausalLM, "intermediate_size"),
    "nemotron_h": (NemotronHForCausalLM, "moe_intermediate_size"),
}


def config_of(family: str, intermediate: int) -> PreTrainedConfig:
    """A tiny config with experts of that width."""
    cls, field = FAMILIES[family]
    return shrunk(cls.config_class, **{field: intermediate})


def logits(model: PreTrainedModel) -> torch.Tensor:
    """On fixed tokens."""
    with torch.no_grad():
        return model(**inputs(model)).logits


@pytest.mark.parametrize("proportion", INTERMEDIATE)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_eager_on_dequantized_weights(family: str, proportion: str, tmp_path: Path) -> None:
    """Against bitsandbytes' values in the model's own eager code, in fp32; linears are float."""
    exact = build(FAMILIES[family][0], config_of(family, INTERMEDIATE[proportion]))
    shapes = {
        n: p.shape[1:] for n, p in exact.named_parameters() if n.endswith(("experts.up_proj", "experts.gate_up_proj"))
    }
    rows = INTERMEDIATE[proportion] * (1 if family == "nemotron_h" else 2)
    assert shapes
    is_transposed = family in ("gpt_oss", "aria", "openai_privacy_filter")
    assert {tuple(s) for s in shapes.values()} == {(HIDDEN, rows) if is_transposed else (rows, HIDDEN)}
    exact.save_pretrained(tmp_path)
    unquantized = logits(exact)
    for form in ("nbit", "parametrize"):
        packed = load(type(exact), tmp_path, QMoEConfig(quantize_linears=False, experts_module=form))
        assert any(isinstance(module, ExpertsNbit) for module in packed.modules()) == (form == "nbit")
        twin = reference(exact, packed)
        assert any(not torch.equal(a, b) for a, b in zip(exact.parameters(), twin.parameters(), strict=True))
        expected = logits(twin)
        scale = expected.abs().max()
        assert (logits(packed) - expected).abs().max() <= TOLERANCE * scale, form
        assert (unquantized - expected).abs().max() > 100 * TOLERANCE * scale  # the experts matter
