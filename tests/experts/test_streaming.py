"""Packed weights that are copied into a few recycled slots inside a checkpointed region: exact, or an error."""

import copy

import pytest
import torch
from torch import Tensor, nn

from hf_qmoe.experts import ExpertsNbit
from tests.support.experts import HIDDEN, Layout, float_experts, inputs, layout_class, packed_experts
from tests.support.layers import MoELayer, run, trainable_gradients
from tests.support.oracle import assert_same_bits, storage_params


LAYERS, SLOTS, TOKENS = 8, 2, 10
by_storage = pytest.mark.parametrize(("quant_type", "double_quant"), storage_params())


class Pool:
    """A few packed modules whose memory is lent out again and again.

    ``fixed`` lends layer i the slot i mod `SLOTS`; ``in-turn`` lends whichever comes next, so that a recomputation
    meets another slot than its forward did.
    """

    def __init__(self, template: ExpertsNbit, policy: str) -> None:
        self.slots = [copy.deepcopy(template) for _ in range(SLOTS)]
        self.policy, self.lent = policy, 0

    def take(self, layer: int) -> ExpertsNbit:
        """The slot for `layer`; what it held is lost when the caller writes to it."""
        self.lent += 1
        return self.slots[(layer if self.policy == "fixed" else self.lent) % SLOTS]


class StreamedLayer(nn.Module):
    """A layer whose packed weights, scales and all, are copied into a slot at each call."""

    def __init__(self, layer: MoELayer, index: int, pool: Pool) -> None:
        super().__init__()
        self.norm, self.router, self.top_k = layer.norm, layer.router, layer.top_k
        self.stored = {n: p.detach() for n, p in layer.experts.named_parameters() if not p.requires_grad}
        self.index, self.pool = index, pool

    def forward(self, hidden_states: Tensor) -> Tensor:
        experts = self.pool.take(self.index)
        with torch.no_grad():
            for name, tensor in self.stored.items():
                experts.get_parameter(name).copy_(tensor)
        normed = self.norm(hidden_states)
        weights, index = MoELayer.route(self, normed)
        return hidden_states + experts(normed, index, weights)


def layers(quant_type: str, double_quant: bool) -> list[MoELayer]:
    """Layers with experts of their own, no two alike."""
    torch.manual_seed(1)
    experts = (packed_experts(quant_type=quant_type, double_quant=double_quant) for _ in range(LAYERS))
    return [MoELayer(e, HIDDEN) for e in experts]


def step(modules: list[nn.Module], mode: str) -> tuple[Tensor, dict[str, Tensor]]:
    """Output and gradients of the input, all norms and all routers."""
    batch = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(2)).requires_grad_()
    hidden_states = batch
    for module in modules:
        hidden_states = run(module, mode, hidden_states)
    hidden_states.square().mean().backward()
    gradients = {f"{i}.{n}": g for i, m in enumerate(modules) for n, g in trainable_gradients(m).items()}
    return hidden_states.detach(), gradients | {"input": batch.grad}


@pytest.mark.parametrize("mode", ["non_reentrant", "reentrant"])
@pytest.mark.parametrize("policy", ["fixed", "in-turn"])
@by_storage
def test_recycled_slots_give_the_gradients_of_private_ones(
    quant_type: str, double_quant: bool, policy: str, mode: str
) -> None:
    """Eight layers over two slots, bytes and every scale streamed: each gradient is that of eight private modules."""
    private = layers(quant_type, double_quant)
    expected_out, expected = step(private, "off")
    assert len(expected) == 2 * LAYERS + 1
    pool = Pool(private[0].experts, policy)
    streamed = [StreamedLayer(copy.deepcopy(layer), i, pool) for i, layer in enumerate(private)]
    for module in streamed:
        module.zero_grad()
    out, gradients = step(streamed, mode)
    assert pool.lent == 2 * LAYERS
    assert_same_bits(out, expected_out)
    assert gradients.keys() == expected.keys()
    for name, gradient in expected.items():
        assert gradient.abs().sum() > 0
        assert_same_bits(gradients[name], gradient)


@by_storage
def test_recycled_slots_without_checkpointing_raise(quant_type: str, double_quant: bool) -> None:
    """Where nothing is recomputed, the overwritten slot is an error in backward, not a wrong gradient."""
    private = layers(quant_type, double_quant)
    pool = Pool(private[0].experts, "fixed")
    streamed = [StreamedLayer(layer, i, pool) for i, layer in enumerate(private)]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        step(streamed, "off")


def packed_names(quant_type: str, double_quant: bool) -> list[str]:
    """Names of the tensors that a packed module keeps in this format."""
    suffixes = [""]
    if quant_type not in ("bf16", "fp16"):
        suffixes += ["_absmax", "_nested_absmax", "_nested_offset"] if double_quant else ["_absmax"]
    return [name + suffix for name in ("gate_up_proj", "down_proj") for suffix in suffixes]


@pytest.mark.parametrize(
    ("quant_type", "double_quant", "name"),
    [
        pytest.param(q, d, name, id=f"{q}-{'double-' if d else ''}{name}")
        for q, d in (("nf4", False), ("nf4", True), ("int8", True), ("bf16", False))
        for name in packed_names(q, d)
    ],
)
def test_overwriting_any_one_tensor_raises(quant_type: str, double_quant: bool, name: str) -> None:
    """The version counter of each operand is watched, of the scales' int32 storage too."""
    packed = packed_experts(quant_type=quant_type, double_quant=double_quant)
    arguments = inputs().requires_grad_()
    out = packed(*arguments)
    with torch.no_grad():
        packed.get_parameter(name).copy_(packed.get_parameter(name).clone())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("mode", ["non_reentrant", "reentrant"])
def test_replaced_parameters(mode: str) -> None:
    """Slots that are filled by replacing parameters, not by copying into them, give the same gradients."""
    packed = ExpertsNbit.from_experts(float_experts(layout_class(Layout(has_bias=True))), double_quant=True)
    arguments = inputs()
    gradients = {}
    for kind in ("off", mode):
        module = copy.deepcopy(packed)
        x = arguments.hidden_states.clone().requires_grad_()

        def call(x: Tensor, module: ExpertsNbit = module) -> Tensor:
            for name, parameter in packed.named_parameters():
                if not parameter.requires_grad:
                    module.register_parameter(name, nn.Parameter(parameter.detach().clone(), requires_grad=False))
            out = module(x, arguments.top_k_index, arguments.top_k_weights)
            for name, parameter in packed.named_parameters():
                if not parameter.requires_grad:
                    module.register_parameter(name, nn.Parameter(torch.empty(0, dtype=parameter.dtype), False))
            return out

        run(call, kind, x).square().sum().backward()
        gradients[kind] = {"input": x.grad, "bias": module.down_proj_bias.grad}
    for name, gradient in gradients["off"].items():
        assert_same_bits(gradients[mode][name], gradient)


@pytest.mark.parametrize("name", ["gate_up_proj", "down_proj", "gate_up_proj_absmax", "down_proj_nested_offset"])
def test_assigning_data_leaves_the_right_gradient(name: str) -> None:
    """``parameter.data = other`` between forward and backward is not seen by version counters, and does not matter."""
    packed = packed_experts(double_quant=True)
    arguments = inputs()
    gradients = []
    for assign in (False, True):
        x = arguments.hidden_states.clone().requires_grad_()
        out = packed(x, arguments.top_k_index, arguments.top_k_weights)
        if assign:
            parameter = packed.get_parameter(name)
            parameter.data = torch.zeros_like(parameter)
        out.square().sum().backward()
        gradients.append(x.grad)
    assert gradients[0].abs().sum() > 0
    assert_same_bits(gradients[1], gradients[0])
