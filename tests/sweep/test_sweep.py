"""Every experts class of the installed transformers, packed, against bitsandbytes and the model's own eager code.

A few very different ones on each run, all of them with ``make sweep``.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from hf_qmoe import ExpertsNbit, QMoEConfig
from tests.sweep import check as checks
from tests.sweep.check import check, check_nested
from tests.sweep.overrides import INPUTS, LEFT_FLOAT, NESTED, NO_LORA, OVERRIDES, REFUSED
from tests.sweep.registry import decorated, every, import_everything, imported, is_decorated, undecorated
from tests.sweep.table import DOCUMENT, documented, row


#: What is special about each.
FAST = {
    "Qwen3MoeExperts": "plain",
    "GptOssExperts": "biases, transposed, interleaved, a gate of its own",
    "OpenAIPrivacyFilterExperts": "an encoder; biases, transposed, concatenated",
    "NemotronHExperts": "no gate, among Mamba layers",
    "AriaExperts": "transposed, multimodal",
    "DeepseekV4Experts": "a gate of its own",
    "MuseSparkExperts": "a norm after the experts",
    "Lfm2MoeExperts": "activation is a function",
    "Ernie4_5_VLMoeMoeExperts": "two modules in a layer, filled by one converter",
    "Dots3NoteExperts": "in the vision tower too",
    "Qwen3VLMoeTextExperts": "multimodal, fused on disk",
    "Qwen3OmniMoeTalkerTextExperts": "omni: several language models in one",
    "DiffusionGemmaTextExperts": "an encoder's tied to a decoder's",
    "Llama4TextExperts": "not decorated",
    "JetMoeParallelExperts": "not decorated, in attention too",
    "DbrxExpertGLU": "not decorated, two axes",
    "SwitchTransformersExperts": "linears",
}
FAST_NESTED = [("internvl", "qwen3_moe")]
#: transformers 5.23 has 65; far fewer would mean that they are no longer found.
AT_LEAST = 60

slow = pytest.mark.sweep
CLASSES = [name if name in FAST else pytest.param(name, marks=slow) for name in every()]


@pytest.mark.parametrize("name", CLASSES)
def test_class(name: str) -> None:
    """On each model that holds it: loading, forward, both gradients, saving and reloading; documented as found."""
    records = check(every()[name])
    assert records
    assert set(map(row, records)) <= set(DOCUMENT.read_text("utf-8").splitlines())


@slow
@pytest.mark.parametrize("name", decorated())
def test_parametrized_form(name: str) -> None:
    """The same with ``experts_module="parametrize"``, which keeps the model's own forward."""
    for record in check(decorated()[name], "parametrize"):
        assert record.form in ("parametrized", "none")


@pytest.mark.parametrize(
    ("outer", "inner"), [pair if pair in FAST_NESTED else pytest.param(*pair, marks=slow) for pair in NESTED]
)
def test_nested(outer: str, inner: str) -> None:
    """The same on a multimodal model around another language model."""
    assert check_nested(outer, inner)


def test_all_are_found() -> None:
    """Neither the classes nor the tables of the sweep speak of what is not there."""
    assert len(decorated()) >= AT_LEAST
    assert every().keys() >= FAST.keys()
    modules = {found.module for found in every().values()}
    modules |= {module.replace("modeling_", "configuration_") for module in modules}
    names = {name for module in modules for name in vars(imported(module))}
    assert names >= OVERRIDES.keys() | INPUTS.keys() | REFUSED.keys() | LEFT_FLOAT.keys() | NO_LORA.keys()


@slow
def test_source_and_imports_agree() -> None:
    """The classes read from source text are those that carry the decorator's flags when everything is imported."""
    classes, failed = import_everything()
    assert not {found.module for found in every().values()} & failed.keys()
    everything = [cls for found in classes.values() for cls in found]
    assert {cls.__name__ for cls in everything if is_decorated(cls)} == decorated().keys()
    called = {cls.__name__ for cls in everything if "Expert" in cls.__name__}
    assert called - decorated().keys() == undecorated().keys()


def test_documented() -> None:
    """The committed table lists exactly the classes that are installed."""
    assert documented(DOCUMENT.read_text("utf-8")) == list(every())


def _load_changed(change: Any) -> Any:
    def load(cls: type[PreTrainedModel], path: Path, config: QMoEConfig | None = None) -> PreTrainedModel:
        model = _LOAD(cls, path, config)
        if config is not None:
            change(next(module for module in model.modules() if isinstance(module, ExpertsNbit)))
        return model

    return load


_LOAD = checks.load


def _one_byte(module: nn.Module) -> None:
    module.down_proj.data[0, 0, 0] ^= 0x77


def _one_scale(module: nn.Module) -> None:
    module.gate_up_proj_absmax.data.view(torch.float32)[1] *= 1.01


def _no_clamp(module: nn.Module) -> None:
    module.limit = 100.0


CHANGES = [("Qwen3MoeExperts", _one_byte), ("Qwen3MoeExperts", _one_scale), ("GptOssExperts", _no_clamp)]


@pytest.mark.parametrize(("name", "change"), CHANGES)
def test_it_can_fail(name: str, change: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One wrong byte, a scale that is one per cent too large, a gate without its clamp do not pass."""
    monkeypatch.setattr(checks, "load", _load_changed(change))
    with pytest.raises(AssertionError, match="output: differs"):
        check(decorated()[name])
