"""accelerate's offloading around packed weights: the same results, and every weight given back after each forward.

Non-reentrant checkpointing ends a recomputed forward early, by an exception from inside it, which skips the function
that accelerate puts behind each forward to unload the weights again.
"""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload, disk_offload
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from hf_qmoe import QMoEConfig, offload, quantize_experts
from hf_qmoe.linears import QMoELinear4bit, replace_linears
from hf_qmoe.ops.torch_ops import release_scratch
from hf_qmoe.pending import PendingParametrization
from tests.support.experts import HIDDEN, float_experts, inputs, packed_experts
from tests.support.heap import live_tensors
from tests.support.layers import CHECKPOINTING, MoELayer, Stack, run, trainable_gradients
from tests.support.models import tiny_model, token_ids
from tests.support.oracle import assert_same_bits


CPU = torch.device("cpu")
STEPS = 3


def _on_cpu(module: nn.Module, path: Path) -> None:
    cpu_offload(module, execution_device=CPU)


def _on_disk(module: nn.Module, path: Path) -> None:
    disk_offload(module, path, execution_device=CPU)


EVERY_MODE = pytest.mark.parametrize("mode", CHECKPOINTING)
BOTH_PLACES = pytest.mark.parametrize("place", [_on_cpu, _on_disk], ids=["cpu", "disk"])
FORMS = ("nbit", "parametrize")
BOTH_FORMS = pytest.mark.parametrize("form", FORMS)
BOTH_CLASSES = pytest.mark.parametrize("cls", [Qwen3MoeExperts, GptOssExperts], ids=["plain", "bias"])


def experts_of(form: str, cls: type[nn.Module]) -> nn.Module:
    """Frozen packed experts of a model's class."""
    if form == "nbit":
        module = packed_experts(cls, double_quant=True)
    else:
        module = PendingParametrization.pack(float_experts(cls), double_quant=True).parametrize()
    return module.requires_grad_(False)


def state(module: nn.Module) -> dict[str, Tensor]:
    """Copies of all its tensors."""
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def assert_offloaded(module: nn.Module) -> None:
    """No parameter takes memory."""
    assert [name for name, p in module.named_parameters() if not p.is_meta] == []


def assert_restored(module: nn.Module, expected: dict[str, Tensor]) -> None:
    """Without the hooks, every tensor is there again, bit for bit."""
    remove_hook_from_module(module, recurse=True)
    actual = module.state_dict()
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert_same_bits(actual[name], tensor)


def count_live() -> int:
    """Number of live tensors."""
    release_scratch()
    return len(live_tensors())


class Step:
    """One optimizer step of a stack: output, gradient of the input and of norms and routers."""

    def __init__(self, stack: Stack, seed: int) -> None:
        hidden_states = torch.randn(10, HIDDEN, generator=torch.Generator().manual_seed(seed)).requires_grad_()
        stack.zero_grad()
        out = stack(hidden_states)
        out.square().mean().backward()
        self.tensors = {"out": out.detach(), "input": hidden_states.grad, **trainable_gradients(stack)}
        with torch.no_grad():
            for parameter in stack.parameters():
                if parameter.requires_grad:
                    parameter -= 1e-3 * parameter.grad


@EVERY_MODE
@BOTH_PLACES
@BOTH_CLASSES
@BOTH_FORMS
def test_experts(
    form: str, cls: type[nn.Module], place: Callable[[nn.Module, Path], None], mode: str, tmp_path: Path
) -> None:
    """Steps of a stack with offloaded experts equal those in memory; the experts are on meta after each one."""
    offloaded = Stack([MoELayer(experts_of(form, cls), HIDDEN) for _ in range(2)], mode)
    in_memory = copy.deepcopy(offloaded)
    in_memory.mode = "off"
    before = [state(layer.experts) for layer in offloaded.layers]
    for index, layer in enumerate(offloaded.layers):
        place(layer.experts, tmp_path / str(index))
        assert_offloaded(layer.experts)
    alive = []
    for seed in range(STEPS):
        actual, expected = Step(offloaded, seed).tensors, Step(in_memory, seed).tensors
        assert actual.keys() == expected.keys()
        assert len(expected) == 6
        for name, tensor in expected.items():
            assert tensor.abs().sum() > 0
            assert_same_bits(actual[name], tensor)
        del actual, expected, tensor
        for layer in offloaded.layers:
            assert_offloaded(layer.experts)
        alive.append(count_live())
    assert alive[2] == alive[0]
    for layer, tensors in zip(offloaded.layers, before, strict=True):
        assert_restored(layer.experts, tensors)


def region_step(module: nn.Module, mode: str) -> Tensor:
    """Gradient of the hidden states through `module`, alone in its region: recomputation ends inside its forward."""
    arguments = inputs()
    hidden_states = arguments.hidden_states.requires_grad_()
    out = run(module, mode, hidden_states, arguments.top_k_index, arguments.top_k_weights)
    out.sum().backward()
    return hidden_states.grad


@pytest.mark.parametrize(
    ("form", "cls"), [("nbit", Qwen3MoeExperts), ("nbit", GptOssExperts), ("parametrize", GptOssExperts)]
)
def test_control(form: str, cls: type[nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the package's part, weights stay loaded after non-reentrant checkpointing: the tests above can fail."""
    module = experts_of(form, cls)
    _on_cpu(module, Path())
    region_step(module, "non_reentrant")
    assert_offloaded(module)
    monkeypatch.setattr("hf_qmoe.experts.unload", lambda module: None)
    offload.stop_unloading(module)
    region_step(module, "off")
    assert_offloaded(module)
    region_step(module, "non_reentrant")
    with pytest.raises(AssertionError):
        assert_offloaded(module)


class Failing(nn.Module):
    """An activation that raises at its n-th call, from 1."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.left = at

    def forward(self, rows: Tensor) -> Tensor:
        """`rows`, until it raises."""
        self.left -= 1
        if self.left == 0:
            raise RuntimeError("the activation failed")
        return rows


@EVERY_MODE
@BOTH_PLACES
@BOTH_FORMS
def test_an_error_in_forward(form: str, place: Callable[[nn.Module, Path], None], mode: str, tmp_path: Path) -> None:
    """Weights are given back by a forward that raised, and the next one computes what it should."""
    module = experts_of(form, Qwen3MoeExperts)
    torch.manual_seed(3)
    expected = region_step(module, "off")
    before, activation = state(module), module.act_fn
    place(module, tmp_path)
    module.act_fn = Failing(1)
    with pytest.raises(RuntimeError, match="the activation failed"):
        region_step(module, mode)
    assert_offloaded(module)
    module.act_fn = activation
    torch.manual_seed(3)
    assert_same_bits(region_step(module, mode), expected)
    assert_offloaded(module)
    assert_restored(module, before)


# -- whole models ---------------------------------------------------------------------------------------------------


def model_step(model: PreTrainedModel, mode: str) -> tuple[Tensor, Tensor]:
    """Logits of a frozen model in training mode and the gradient of its input embeddings."""
    if mode != "off":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=CHECKPOINTING[mode])
    embeddings = torch.randn(2, 9, 64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    logits = model.train()(inputs_embeds=embeddings, use_cache=False).logits
    logits.square().sum().backward()
    return logits.detach(), embeddings.grad


@EVERY_MODE
@BOTH_PLACES
@BOTH_FORMS
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_model(family: str, form: str, place: Callable[[nn.Module, Path], None], mode: str, tmp_path: Path) -> None:
    """A model offloaded as a whole gives the logits and the gradient that it gives in memory, step after step."""
    config = QMoEConfig(quantize_linears=False, experts_module=form, experts_double_quant=True)
    model = quantize_experts(tiny_model(family), config).requires_grad_(False)
    expected, before = model_step(model, "off"), state(model)
    ids = token_ids()
    with torch.no_grad():
        evaluated = model.eval()(ids).logits
    place(model, tmp_path)
    alive = []
    for _ in range(STEPS):
        for actual, tensor in zip(model_step(model, mode), expected, strict=True):
            assert tensor.abs().sum() > 0
            assert_same_bits(actual, tensor)
        del actual
        for layer in model.model.layers:
            assert_offloaded(layer.mlp.experts)
        alive.append(count_live())
    assert alive[2] == alive[0]
    with torch.no_grad():
        assert_same_bits(model.eval()(ids).logits, evaluated)
    assert_restored(model, before)


# -- linears --------------------------------------------------------------------------------------------------------


class Swap(ModelHook):
    """Offloads a quantized linear by hand; accelerate's own hook loses the state of bitsandbytes' weights."""

    offload = True

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.tensors = dict(module.named_parameters())
        self.post_forward(module, None)

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Loads."""
        for name, tensor in self.tensors.items():
            setattr(module, name, tensor)
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Unloads."""
        for name, tensor in self.tensors.items():
            setattr(module, name, nn.Parameter(torch.empty_like(tensor.data, device="meta"), requires_grad=False))
        return output


@pytest.mark.parametrize("hooked", [True, False], ids=["", "without_our_hook"])
@EVERY_MODE
def test_linear(mode: str, hooked: bool) -> None:
    """An offloaded linear gives the gradient that it gives in memory, and is unloaded after each step by our hook."""
    parent = nn.ModuleDict({"linear": nn.Linear(HIDDEN, HIDDEN)})
    replace_linears(parent, [], QMoEConfig(), torch.float32)
    module = parent["linear"].requires_grad_(False)
    assert type(module) is QMoELinear4bit
    x = torch.randn(5, HIDDEN)

    def step(mode: str) -> tuple[Tensor, Tensor]:
        leaf = x.clone().requires_grad_()
        out = run(module, mode, leaf)
        out.sum().backward()
        return out.detach(), leaf.grad

    expected = step("off")
    add_hook_to_module(module, Swap(module))
    assert_offloaded(module)
    if not hooked:
        offload.stop_unloading(module)
    for _ in range(STEPS):
        for actual, tensor in zip(step(mode), expected, strict=True):
            assert_same_bits(actual, tensor)
        stays = mode == "non_reentrant" and not hooked
        assert all(p.is_meta != stays for p in module.parameters())
