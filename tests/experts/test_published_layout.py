"""State dicts of the published ``Experts4bit`` load: packed ``[E, bytes]``, ``gate_up_absmax``, ``down_absmax``."""

import pytest
import torch
from torch import Tensor, nn

from hf_qmoe.experts import Experts4bit, ExpertsNbit
from tests.support.experts import EXPERTS, HIDDEN, INTERMEDIATE, inputs
from tests.support.oracle import assert_same_bits
from tests.support.state import assert_same_state, filled, plain, snapshot


def published(module: ExpertsNbit) -> dict[str, Tensor]:
    """The state of `module` as the published ``Experts4bit`` writes it: packed ``[E, bytes]``, short scale names."""
    state = {}
    for name in module.stack_names:
        state[name] = getattr(module, name).detach().flatten(1)
        scales = getattr(module, f"{name}_absmax").detach().view(torch.float32)
        state[name.removesuffix("_proj") + "_absmax"] = scales.flatten(1)
    return state


@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
@pytest.mark.parametrize("has_gate", [True, False], ids=["gate", "no-gate"])
@pytest.mark.parametrize("assign", [True, False], ids=["assigned", "copied"])
def test_published_layout_loads(quant_type: str, has_gate: bool, assign: bool) -> None:
    """Into `Experts4bit` and, under a prefix, into a model; output bits are those of the source."""
    rows = INTERMEDIATE * (2 if has_gate else 1)
    up, down = torch.randn(EXPERTS, rows, HIDDEN), torch.randn(EXPERTS, HIDDEN, INTERMEDIATE)
    source = Experts4bit.from_float(up, down, has_gate, quant_type=quant_type)
    target = Experts4bit(EXPERTS, HIDDEN, INTERMEDIATE, has_gate, quant_type=quant_type)
    model = nn.ModuleDict({"experts": target})
    state = {f"experts.{name}": tensor for name, tensor in published(source).items()}
    result = model.load_state_dict(state, assign=assign)
    assert (result.missing_keys, result.unexpected_keys) == ([], [])
    assert_same_state(target, snapshot(source))
    assert not any(p.requires_grad for p in target.parameters())
    arguments = inputs()
    assert_same_bits(target(*arguments), source(*arguments))


@pytest.mark.parametrize("assign", [True, False], ids=["assigned", "emptied"])
def test_published_layout_loads_into_a_meta_module(assign: bool) -> None:
    """A module made without memory takes the layout too: its own metadata stands in for the one that is not stored."""
    source, target = filled(), plain(device="meta")
    if not assign:
        target.to_empty(device="cpu")
    target.load_state_dict(published(source), assign=assign)
    assert_same_state(target, snapshot(source))
    arguments = inputs()
    assert_same_bits(target(*arguments), source(*arguments))


def test_published_layout_of_another_shape_is_refused() -> None:
    """Another block size, or another number of weights, does not load."""
    with pytest.raises(RuntimeError, match=r"absmax|shape"):
        plain(blocksize=32).load_state_dict(published(filled(blocksize=64)))
    with pytest.raises(RuntimeError, match="gate_up_proj"):
        ExpertsNbit(EXPERTS, HIDDEN, 2 * INTERMEDIATE).load_state_dict(published(filled()))


def test_published_layout_is_refused_where_scales_are_nested() -> None:
    """The layout has plain scales only."""
    with pytest.raises(RuntimeError, match="absmax"):
        plain(double_quant=True).load_state_dict(published(filled()))


def test_state_dict_is_not_written_to() -> None:
    """Loading leaves the caller's dictionary and its tensors as they were."""
    state = published(filled())
    before = {name: tensor.clone() for name, tensor in state.items()}
    plain().load_state_dict(state)
    assert state.keys() == before.keys()
    for name, tensor in before.items():
        assert_same_bits(state[name], tensor)
