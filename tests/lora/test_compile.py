"""Adapted experts under `torch.compile`: one graph for `ExpertsNbit`, equal results for a forward that is not ours."""

from contextlib import nullcontext

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from torch._dynamo.utils import counters
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from hf_qmoe.experts import ExpertsNbit
from hf_qmoe.pending import PendingParametrization
from tests.support.experts import Inputs, float_experts, inputs
from tests.support.lora import lora_tensors, randomize, relative_error
from tests.support.oracle import assert_same_bits


SIZES = {"num_experts": 4, "hidden": 32, "intermediate": 64}
CLASSES = {"plain": Qwen3MoeExperts, "gpt-oss": GptOssExperts, "non-gated": NemotronHExperts}
EVERY_CLASS = pytest.mark.parametrize("cls", CLASSES.values(), ids=CLASSES)
DROPOUTS = pytest.mark.parametrize("dropout", [0.0, 0.1], ids=["", "dropout"])


@pytest.fixture(autouse=True)
def _forget_graphs() -> None:
    torch._dynamo.reset()
    counters.clear()


class Model(nn.Module):
    """Nothing but an experts module, for PEFT to wrap."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.experts = experts


def adapted(form: str, cls: type[nn.Module] = Qwen3MoeExperts, dropout: float = 0.0) -> nn.Module:
    """The outer wrapper of packed experts with both projections adapted."""
    module = float_experts(cls, **SIZES)
    names = [f"experts.{name}" for name in ("gate_up_proj", "up_proj", "down_proj") if hasattr(module, name)]
    if form == "nbit":
        ExpertsNbit.from_experts(module, double_quant=True)
    else:
        module = PendingParametrization.pack(module, double_quant=True).parametrize()
    config = LoraConfig(r=3, lora_alpha=3, target_modules=[], target_parameters=names, lora_dropout=dropout)
    model: PeftModel = get_peft_model(Model(module), config)
    randomize(model)
    assert len(lora_tensors(model)) == 4
    return model.get_base_model().experts


def routings() -> list[Inputs]:
    """Different tokens of one shape: of all experts, of one, of two."""
    first = inputs(hidden=32)
    indices = (first.top_k_index, torch.zeros_like(first.top_k_index), first.top_k_index.clamp(max=1))
    return [Inputs(first.hidden_states, index, first.top_k_weights) for index in indices]


def results(function: nn.Module, module: nn.Module, arguments: Inputs, autocast: bool = False) -> dict[str, Tensor]:
    """Output, and gradients of hidden states, routing weights and adapters, with the same dropout at each call."""
    arguments = arguments.to(torch.float32).requires_grad_()
    module.zero_grad()
    torch.manual_seed(5)
    with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
        out = function(*arguments)
    out.square().sum().backward()
    found = {name: p.grad.clone() for name, p in lora_tensors(module).items()}
    found |= {"hidden_states": arguments.hidden_states.grad, "top_k_weights": arguments.top_k_weights.grad}
    return found | {"out": out.detach()}


@DROPOUTS
@EVERY_CLASS
def test_one_graph_for_training(cls: type[nn.Module], dropout: float) -> None:
    """`fullgraph=True` over both wrappers and the experts: eager's output and gradients, one graph for any routing."""
    module = adapted("nbit", cls, dropout).train()
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    for arguments in routings():
        actual, expected = results(compiled, module, arguments), results(module, module, arguments)
        assert len(expected) == 7
        for name, tensor in expected.items():
            assert tensor.any()
            assert_same_bits(actual[name], tensor)
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inference_mode"])
@EVERY_CLASS
def test_one_graph_for_inference(cls: type[nn.Module], mode: type) -> None:
    """The same bits, without gradients."""
    module = adapted("nbit", cls, 0.1).eval()
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    with mode():
        for arguments in routings():
            assert_same_bits(compiled(*arguments), module(*arguments))
    assert counters["stats"]["unique_graphs"] == 1


def test_autocast() -> None:
    """Under autocast to bfloat16 too."""
    module = adapted("nbit").train()
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    arguments = routings()[0]
    actual, expected = (results(function, module, arguments, autocast=True) for function in (compiled, module))
    for name, tensor in expected.items():
        assert_same_bits(actual[name], tensor)


def test_switching_adapters_off_and_on() -> None:
    """A compiled wrapper follows `enable_adapters` and a change of the factors."""
    module = adapted("nbit").eval()
    compiled = torch.compile(module, backend="aot_eager")
    arguments, seen = routings()[0], []
    with torch.no_grad():
        for step in ("on", "off", "on", "changed"):
            for wrapper in (module, module.base_layer):
                wrapper.enable_adapters(step != "off")
            if step == "changed":
                randomize(module, seed=7)
            seen.append(compiled(*arguments))
            assert_same_bits(seen[-1], module(*arguments))
    assert torch.equal(seen[0], seen[2])
    assert not torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[0], seen[3])


@pytest.mark.parametrize(
    ("cls", "grad"),
    [(Qwen3MoeExperts, False), (GptOssExperts, True)],
    ids=["plain-inference", "gpt-oss-training"],
)
def test_a_foreign_forward(cls: type[nn.Module], grad: bool) -> None:
    """The parametrized form breaks the graph, multiplies the update out and gives equal results."""
    module = adapted("parametrize", cls).train(grad)
    compiled = torch.compile(module, backend="aot_eager")
    for arguments in routings()[:2]:
        if not grad:
            with torch.no_grad():
                assert relative_error(compiled(*arguments), module(*arguments)) < 1e-5
            continue
        actual, expected = results(compiled, module, arguments), results(module, module, arguments)
        for name, tensor in expected.items():
            assert relative_error(actual[name], tensor) < 1e-5


def test_dropout_in_a_foreign_forward() -> None:
    """Dropout is applied or refused, never left out."""
    module = adapted("parametrize", dropout=0.5).train()
    compiled = torch.compile(module, backend="aot_eager")
    arguments = routings()[0]
    try:
        first, second = compiled(*arguments), compiled(*arguments)
    except RuntimeError as error:
        assert "lora_dropout" in str(error)  # noqa: PT017
    else:
        assert relative_error(first, second) > 1e-3
