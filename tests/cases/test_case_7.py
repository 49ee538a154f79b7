"""Case 7: a linear whose weight a kernel reads by itself stays float; any other computes as its dequantized weight.

NemotronH and FalconH1 by the name of the linear: tests/loading/test_other_families.py; subclasses:
tests/loading/test_refusals.py. In the transformers of today Jamba reads `dt_proj` so, Qwen3-Next `conv1d` alone.
"""

import ast
import inspect
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from bitsandbytes.nn import Linear4bit
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.bamba.modeling_bamba import BambaForCausalLM
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1ForCausalLM
from transformers.models.granitemoehybrid.modeling_granitemoehybrid import GraniteMoeHybridForCausalLM
from transformers.models.jamba.modeling_jamba import JambaForCausalLM
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHForCausalLM
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextForCausalLM

from hf_qmoe import QMoEConfig
from tests.sweep.check import load
from tests.sweep.oracle import reference
from tests.sweep.tiny import build, inputs, shrunk


#: Class, fields that make every linear wide enough to be quantized, and the linears that must not be.
FAMILIES: dict[str, tuple[type[PreTrainedModel], dict[str, Any], set[str]]] = {
    "nemotron_h": (NemotronHForCausalLM, {}, {"out_proj"}),
    "falcon_h1": (FalconH1ForCausalLM, {"mamba_d_ssm": 128}, {"out_proj"}),
    "jamba": (JambaForCausalLM, {"mamba_dt_rank": 64}, {"dt_proj"}),
    "qwen3_next": (Qwen3NextForCausalLM, {}, set()),
    "bamba": (BambaForCausalLM, {}, {"out_proj"}),
    "granitemoehybrid": (GraniteMoeHybridForCausalLM, {}, {"out_proj"}),
}
EVERY_FAMILY = pytest.mark.parametrize("family", FAMILIES)
KERNELS = ("causal_conv1d_fn", "mamba2_split_conv1d_scan_combined", "mamba2_chunk_scan", "mamba_selective_scan")
KERNELS += ("torch_chunk_gated_delta_rule",)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[PreTrainedModel, Path]]:
    """Float model and its checkpoint, per family."""
    root, made = tmp_path_factory.mktemp("kernels"), {}
    for family, (cls, changes, _) in FAMILIES.items():
        model = build(cls, shrunk(cls.config_class, **changes))
        model.save_pretrained(root / family)
        made[family] = (model, root / family)
    return made


def weights_read(module: nn.Module) -> set[str]:
    """Children of `module` whose ``.weight`` its forward uses as a value, by the syntax tree of its class."""
    found = set()
    for cls in type(module).__mro__[: type(module).__mro__.index(nn.Module)]:
        nodes = list(ast.walk(ast.parse(textwrap.dedent(inspect.getsource(cls)))))
        attributes = [node for node in nodes if isinstance(node, ast.Attribute)]
        asked = {node.value for node in attributes if node.attr in ("dtype", "device")}
        for node in attributes:
            if node.attr == "weight" and node not in asked and isinstance(node.value, ast.Attribute):
                owner = node.value.value
                if isinstance(owner, ast.Name) and owner.id == "self":
                    found.add(node.value.attr)
    return found


def mixers(model: nn.Module) -> dict[str, nn.Module]:
    """Modules with a convolution over time, by name."""
    return {n: m for n, m in model.named_modules() if isinstance(getattr(m, "conv1d", None), nn.Conv1d)}


@EVERY_FAMILY
def test_linears_that_are_read_stay_float(family: str, models: dict[str, tuple[PreTrainedModel, Path]]) -> None:
    """Those and no other of a mixer; the convolution too."""
    exact, path = models[family]
    model = load(type(exact), path, QMoEConfig())
    assert mixers(model).keys() == mixers(exact).keys() != set()
    for name, mixer in mixers(model).items():
        read, plain = weights_read(mixer), exact.get_submodule(name)
        linears = {n: m for n, m in mixer.named_children() if isinstance(m, nn.Linear)}
        assert all(linear.in_features % 64 == 0 for linear in linears.values())
        kept = {n for n, m in linears.items() if not isinstance(m, Linear4bit)}
        assert kept == read & linears.keys() == FAMILIES[family][2]
        assert "conv1d" in read
        for child in (*kept, "conv1d"):
            assert torch.equal(getattr(mixer, child).weight, getattr(plain, child).weight)


Call = tuple[str, dict[str, Tensor]]


def recorder(name: str, kernel: Callable[..., Any], calls: list[Call]) -> Callable[..., Any]:
    """`kernel`, with what it is given noted."""
    signature = inspect.signature(kernel)

    def record(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        calls.append((name, {n: value.detach() for n, value in given.items() if isinstance(value, Tensor)}))
        return kernel(*args, **kwargs)

    return record


@EVERY_FAMILY
def test_what_kernels_are_given(
    family: str, models: dict[str, tuple[PreTrainedModel, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In training, when all of them run: float weights, with the shapes and values that a float model gives."""
    exact, path = models[family]
    module = sys.modules[type(exact).__module__]
    calls: list[Call] = []
    for name in KERNELS:
        if hasattr(module, name):
            monkeypatch.setattr(module, name, recorder(name, getattr(module, name), calls))
    recorded = []
    packed = load(type(exact), path, QMoEConfig())
    for model in (packed, reference(exact, packed)):
        calls.clear()
        model.train()(**inputs(model), use_cache=False)
        recorded.append(list(calls))
    ours, stock = recorded
    assert [name for name, _ in ours] == [name for name, _ in stock]
    assert {name for name, _ in ours} >= {"causal_conv1d_fn"}
    reads_out_proj = "out_proj" in FAMILIES[family][2]
    assert any("outproj_weight" in given for _, given in ours) == reads_out_proj
    for (name, mine), (_, theirs) in zip(ours, stock, strict=True):
        assert mine.keys() == theirs.keys()
        for argument, tensor in mine.items():
            assert tensor.is_floating_point(), (name, argument)
            torch.testing.assert_close(tensor, theirs[argument], rtol=1e-4, atol=1e-4)


@EVERY_FAMILY
def test_logits(family: str, models: dict[str, tuple[PreTrainedModel, Path]]) -> None:
    """The float model with bitsandbytes' values of all that is quantized."""
    exact, path = models[family]
    packed = load(type(exact), path, QMoEConfig())
    with torch.no_grad():
        actual, expected, unquantized = (
            model.eval()(**inputs(model)).logits for model in (packed, reference(exact, packed), exact)
        )
    scale = expected.abs().max()
    assert (actual - expected).abs().max() <= 1e-5 * scale
    assert (unquantized - expected).abs().max() > 1e-3 * scale
