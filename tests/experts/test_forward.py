"""Forward of packed experts against the model's own eager code, in every layout, format and dtype."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, relu, silu

from hf_qmoe.experts import ExpertsNbit
from hf_qmoe.ops.reference import experts_forward
from tests.support.experts import (
    EXPERTS,
    HIDDEN,
    INTERMEDIATE,
    LAYOUTS,
    Layout,
    decoded_stack,
    decorated_classes,
    float_experts,
    float_twin,
    gate_function,
    inputs,
    layout_class,
    packed_and_twin,
    relative_error,
)
from tests.support.oracle import assert_same_bits, dtype_name, storage_params


#: fp32 rounding of two products and a sum, with room; float64 sees the same float32 weights.
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}
#: Classes whose own code rounds to float32 inside (a gate or a norm), so float64 cannot be near exact.
ROUNDS_TO_FLOAT32 = ("BeamExperts", "Inkling2Experts", "MuseSparkExperts", "OpenAIPrivacyFilterExperts")

#: 2I == H, I == H, I < H, I > H, and widths that no block size divides along a row.
SIZES = {
    "2I=H": (64, 32),
    "I=H": (64, 64),
    "I<H": (96, 64),
    "I>H": (64, 128),
    "I=48": (64, 48),
    "I=96": (64, 96),
    "H=40": (40, 32),
}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=dtype_name)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_layout_equals_eager(layout: Layout, dtype: torch.dtype, device: str) -> None:
    """`from_experts` gives the model's own eager result on the dequantized weights, whatever the flags."""
    packed, twin = packed_and_twin(float_experts(layout_class(layout), device))
    arguments = inputs(device=device)
    actual = packed(*arguments.to(dtype))
    assert actual.dtype == dtype
    assert relative_error(actual, twin(*arguments.to(torch.float64))) <= TOLERANCE[dtype]


@pytest.mark.parametrize("name", decorated_classes())
def test_every_class_of_transformers_equals_eager(name: str) -> None:
    """Each class under `use_experts_implementation` keeps its gate, clamps, biases, norm and activation."""
    packed, twin = packed_and_twin(float_experts(decorated_classes()[name]))
    arguments = inputs()
    expected = twin(*arguments.to(torch.float64))
    assert relative_error(packed(*arguments), expected) <= TOLERANCE[torch.float32]
    if name not in ROUNDS_TO_FLOAT32:
        assert relative_error(packed(*arguments.to(torch.float64)), expected) <= TOLERANCE[torch.float64]


def test_the_decorated_classes_were_found() -> None:
    """The list that the test above runs over holds the classes that differ from the common layout."""
    assert len(decorated_classes()) >= 60
    assert decorated_classes().keys() >= {
        *ROUNDS_TO_FLOAT32,
        *("Qwen3MoeExperts", "OlmoeExperts", "MixtralExperts", "GptOssExperts", "NemotronHExperts", "AriaExperts"),
        *("DeepseekV4Experts", "Glm5NextTextExperts", "HYV4Experts", "MiniMaxM3VLExperts", "Lfm2MoeExperts"),
    }


@pytest.mark.parametrize("layout", [Layout(), Layout("interleaved", True, True)], ids=str)
@pytest.mark.parametrize(("quant_type", "double_quant"), storage_params())
def test_every_format_equals_eager(quant_type: str, double_quant: bool, layout: Layout, device: str) -> None:
    """In all formats, with scales quantized or not, in float32 and float64."""
    packed, twin = packed_and_twin(float_experts(layout_class(layout), device), quant_type, double_quant=double_quant)
    arguments = inputs(device=device)
    expected = twin(*arguments.to(torch.float64))
    for dtype, tolerance in TOLERANCE.items():
        assert relative_error(packed(*arguments.to(dtype)), expected) <= tolerance


@pytest.mark.parametrize("quant_type", ["nf4", "int8", "bf16"])
@pytest.mark.parametrize("is_transposed", [False, True], ids=["plain", "transposed"])
@pytest.mark.parametrize(("hidden", "intermediate"), SIZES.values(), ids=SIZES)
def test_every_proportion_equals_eager(hidden: int, intermediate: int, is_transposed: bool, quant_type: str) -> None:
    """Where a shape could be read either way round, the layout comes from the flag."""
    cls = layout_class(Layout(has_bias=True, is_transposed=is_transposed))
    packed, twin = packed_and_twin(float_experts(cls, hidden=hidden, intermediate=intermediate), quant_type)
    assert tuple(packed.float_shape("gate_up_proj")) == tuple(twin.gate_up_proj.shape)
    assert tuple(packed.float_shape("down_proj")) == tuple(twin.down_proj.shape)
    arguments = inputs(hidden=hidden)
    assert relative_error(packed(*arguments), twin(*arguments.to(torch.float64))) <= TOLERANCE[torch.float32]


@pytest.mark.parametrize("blocksize", [32, 128, 256])
def test_block_sizes_equal_eager(blocksize: int) -> None:
    """Block sizes beside the default, along rows and across them."""
    packed, twin = packed_and_twin(float_experts(), "nf4", blocksize)
    assert [packed.stack(name).blocksize for name in packed.stack_names] == [blocksize, blocksize]
    arguments = inputs()
    assert relative_error(packed(*arguments), twin(*arguments.to(torch.float64))) <= TOLERANCE[torch.float32]


def float_stacks(layout: Layout) -> dict[str, Tensor]:
    """Arguments of `from_float`: stacks in the layout's own orientation, and biases."""
    rows = INTERMEDIATE * (2 if layout.has_gate else 1)
    stacks = {
        "gate_up_proj": 0.3 * torch.randn(EXPERTS, rows, HIDDEN),
        "down_proj": 0.3 * torch.randn(EXPERTS, HIDDEN, INTERMEDIATE),
    }
    if layout.is_transposed:
        stacks = {name: weights.transpose(1, 2) for name, weights in stacks.items()}
    if layout.has_bias:
        stacks |= {"gate_up_proj_bias": torch.randn(EXPERTS, rows), "down_proj_bias": torch.randn(EXPERTS, HIDDEN)}
    return stacks


@pytest.mark.parametrize("dtype", TOLERANCE, ids=dtype_name)
@pytest.mark.parametrize("layout", [i for i in LAYOUTS if i.gate != "clamped" and not i.has_norm], ids=str)
def test_from_float_equals_the_reference(layout: Layout, dtype: torch.dtype) -> None:
    """`from_float` computes what the executable specification does on the decoded weights, token by token."""
    stacks = float_stacks(layout)
    packed = ExpertsNbit.from_float(
        **stacks,
        has_gate=layout.has_gate,
        is_transposed=layout.is_transposed,
        is_concatenated=layout.is_concatenated,
    )
    arguments = inputs()
    expected = experts_forward(
        *arguments.to(torch.float64),
        *(decoded_stack(packed, name).double() for name in packed.stack_names),
        gate_function(layout.gate),
        *(stacks[f"{name}_bias"].double() for name in ("gate_up_proj", "down_proj") if layout.has_bias),
    )
    assert relative_error(packed(*arguments.to(dtype)), expected) <= TOLERANCE[dtype]


@pytest.mark.parametrize("layout", [i for i in LAYOUTS if i.gate != "clamped" and not i.has_norm], ids=str)
def test_from_float_and_from_experts_agree(layout: Layout) -> None:
    """Both ways of packing the same weights give the same tensors under the same names, and the same output bits."""
    module = float_experts(layout_class(layout))
    up_name = "gate_up_proj" if layout.has_gate else "up_proj"
    biases = {
        f"{n}_bias": getattr(module, f"{m}_bias")
        for n, m in (("gate_up_proj", up_name), ("down_proj", "down_proj"))
        if layout.has_bias
    }
    by_float = ExpertsNbit.from_float(
        getattr(module, up_name),
        module.down_proj,
        layout.has_gate,
        is_transposed=layout.is_transposed,
        is_concatenated=layout.is_concatenated,
        **biases,
    )
    by_class = ExpertsNbit.from_experts(module)
    assert by_float.state_dict().keys() == by_class.state_dict().keys()
    for name, tensor in by_float.state_dict().items():
        assert_same_bits(tensor, by_class.state_dict()[name])
    arguments = inputs()
    assert_same_bits(by_float(*arguments), by_class(*arguments))


@pytest.mark.parametrize(
    ("activation", "function"),
    [(None, silu), ("gelu", gelu), ("relu2", lambda x: relu(x).square()), (torch.tanh, torch.tanh), (nn.ReLU(), relu)],
    ids=["default", "by-name", "relu2", "function", "module"],
)
@pytest.mark.parametrize("has_gate", [True, False], ids=["gate", "no-gate"])
def test_activations(activation: object, function: object, has_gate: bool) -> None:
    """The activation is SiLU unless it is named or given."""
    stacks = float_stacks(Layout("concatenated" if has_gate else "none"))
    packed = ExpertsNbit.from_float(*stacks.values(), has_gate, activation)

    def gate(rows: Tensor) -> Tensor:
        first, second = rows.chunk(2, dim=-1) if has_gate else (rows, 1.0)
        return function(first) * second

    arguments = inputs()
    weights = [decoded_stack(packed, name).double() for name in packed.stack_names]
    expected = experts_forward(*arguments.to(torch.float64), *weights, gate)
    assert relative_error(packed(*arguments), expected) <= TOLERANCE[torch.float32]


@pytest.mark.parametrize("weights_dtype", [torch.bfloat16, torch.float32], ids=dtype_name)
@pytest.mark.parametrize(
    "layout", [Layout(), Layout("interleaved", True, True), Layout("none"), Layout(has_norm=True)], ids=str
)
def test_bf16_is_no_less_accurate_than_transformers(layout: Layout, weights_dtype: torch.dtype, device: str) -> None:
    """In bfloat16 the error against float64 is at most that of transformers' fast experts on the same weights."""
    original = float_experts(layout_class(layout), device).bfloat16()
    packed = ExpertsNbit.from_experts(copy.deepcopy(original))
    arguments = inputs(tokens=64, device=device).to(torch.bfloat16, weights_dtype)
    twin = float_twin(original, packed, torch.bfloat16, torch.bfloat16)
    expected = float_twin(original, packed, torch.float64, torch.bfloat16)(*arguments.to(torch.float64))

    def error(out: Tensor) -> float:
        assert out.dtype == torch.bfloat16
        return ((out.double() - expected).norm() / expected.norm()).item()

    ours = error(packed(*arguments))
    for implementation in ("grouped_mm", "batched_mm"):
        twin.config._experts_implementation = implementation
        assert ours <= error(twin(*arguments))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inference_mode"])
def test_grad_mode_changes_no_bit(mode: object) -> None:
    """The output is the same in and out of grad mode."""
    packed, _ = packed_and_twin(float_experts(layout_class(Layout(has_bias=True))))
    arguments = inputs()
    expected = packed(*arguments.requires_grad_()).detach()
    with mode():
        assert_same_bits(packed(*arguments), expected)


def test_inputs_are_not_written_to() -> None:
    """Hidden states, indices and weights are what they were; strided inputs give the same bits as contiguous ones."""
    packed, _ = packed_and_twin(float_experts())
    arguments = inputs()
    before = [tensor.clone() for tensor in arguments]
    expected = packed(*arguments)
    for tensor, copied in zip(arguments, before, strict=True):
        assert_same_bits(tensor, copied)
    strided = [tensor.t().contiguous().t() for tensor in arguments]
    assert not any(tensor.is_contiguous() for tensor in strided)
    assert_same_bits(packed(*strided), expected)
