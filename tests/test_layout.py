"""A model's layout is read from its flags, never from its shapes."""

import pytest
import torch
from torch import nn

from hf_qmoe.layout import can_pack, float_stack_shapes, follows_experts_interface, stack_names


class FloatExperts(nn.Module):
    """A float experts module in transformers' interface, of any layout."""

    def __init__(self, E=3, H=64, I=32, has_gate=True, is_transposed=False, dtype=torch.float32):
        super().__init__()
        self.has_gate, self.is_transposed = has_gate, is_transposed
        up, down = (E, (2 if has_gate else 1) * I, H), (E, H, I)
        for name, (experts, rows, columns) in zip(stack_names(has_gate), (up, down), strict=True):
            shape = (experts, columns, rows) if is_transposed else (experts, rows, columns)
            setattr(self, name, nn.Parameter(torch.zeros(shape, dtype=dtype)))


def test_stack_names_are_those_of_transformers():
    """Gated modules have `gate_up_proj`, others `up_proj`; the up projection comes first."""
    assert stack_names(True) == ("gate_up_proj", "down_proj")
    assert stack_names(False) == ("up_proj", "down_proj")


@pytest.mark.parametrize("is_transposed", [False, True], ids=["plain", "transposed"])
@pytest.mark.parametrize("has_gate", [False, True], ids=["ungated", "gated"])
@pytest.mark.parametrize(("H", "I"), [(64, 32), (64, 64), (32, 64), (64, 96)], ids=["2I==H", "I==H", "I>H", "other"])
def test_shapes_follow_the_flags(H, I, has_gate, is_transposed):
    """`(E, N, K)` is the same whatever the layout, also where the shapes alone could be read both ways."""
    module = FloatExperts(3, H, I, has_gate, is_transposed)
    up_name, down_name = stack_names(has_gate)
    assert float_stack_shapes(module) == {
        up_name: (3, (2 if has_gate else 1) * I, H),
        down_name: (3, H, I),
    }
    assert list(float_stack_shapes(module)) == [up_name, down_name]


@pytest.mark.parametrize(
    ("attributes", "expected"),
    [
        ({"has_gate": True, "is_transposed": False}, True),
        ({"has_gate": False, "is_transposed": True}, True),
        ({"has_gate": True}, False),
        ({"is_transposed": True}, False),
        ({}, False),
        ({"gate_up_proj": nn.Parameter(torch.zeros(2, 4, 4)), "down_proj": nn.Parameter(torch.zeros(2, 4, 2))}, False),
    ],
    ids=["both", "both-other", "has_gate", "is_transposed", "none", "stacks-only"],
)
def test_the_interface_is_both_flags(attributes, expected):
    """Both flags, whatever their value; stacks of the right names without flags are not enough."""
    module = nn.Module()
    for name, value in attributes.items():
        setattr(module, name, value)
    assert follows_experts_interface(module) is expected


@pytest.mark.parametrize(
    ("change", "found"),
    [
        pytest.param(lambda m: delattr(m, "down_proj"), "nothing", id="missing"),
        pytest.param(lambda m: setattr(m, "down_proj", None), "nothing", id="none"),
        pytest.param(
            lambda m: setattr(m, "down_proj", nn.Parameter(torch.zeros(3, 8))), r"torch.float32 \(3, 8\)", id="2-d"
        ),
        pytest.param(
            lambda m: setattr(
                m, "down_proj", nn.Parameter(torch.zeros(3, 8, 8, dtype=torch.uint8), requires_grad=False)
            ),
            r"torch.uint8 \(3, 8, 8\)",
            id="packed",
        ),
    ],
)
def test_a_module_without_float_stacks_is_refused(change, found):
    """The error names class and parameter and says what was found there."""
    module = FloatExperts()
    change(module)
    with pytest.raises(ValueError, match=rf"FloatExperts.down_proj should be a float stack .*, found {found}"):
        float_stack_shapes(module)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=["bf16", "fp64"])
def test_shapes_are_known_on_the_meta_device(dtype):
    """A loader asks before there are values."""
    module = FloatExperts(dtype=dtype).to("meta")
    assert float_stack_shapes(module) == {"gate_up_proj": (3, 64, 64), "down_proj": (3, 64, 32)}


@pytest.mark.parametrize("is_transposed", [False, True], ids=["plain", "transposed"])
@pytest.mark.parametrize(
    ("H", "I", "quant_type", "blocksize", "expected"),
    [
        (64, 32, "nf4", 64, True),
        (64, 32, "int8", 4096, True),
        (6, 2, "nf4", 64, False),  # 24 and 12 weights: no block size divides either
        (32, 3, "int8", 64, False),  # up 2 * 3 * 32 = 3 * 64 fits, down 32 * 3 = 96 does not
        (5, 3, "bf16", 64, True),
        (5, 3, "int8", 64, False),
    ],
)
def test_both_stacks_have_to_fit(H, I, quant_type, blocksize, expected, is_transposed):
    """One stack that no block size divides keeps the module from being packed; 16-bit formats hold any shape."""
    module = FloatExperts(3, H, I, is_transposed=is_transposed)
    assert can_pack(module, quant_type, blocksize) is expected


def test_an_odd_row_is_an_error_and_not_a_no():
    """An odd in_features under a 4-bit format raises, so that the user hears of it."""
    with pytest.raises(ValueError, match="in_features=33 is odd"):
        can_pack(FloatExperts(3, 64, 33), "nf4", 64)


def test_an_unknown_block_size_is_an_error_and_not_a_no():
    """So does a block size that the format does not have."""
    with pytest.raises(ValueError, match="blocksize=48 is not supported"):
        can_pack(FloatExperts(), "nf4", 48)
