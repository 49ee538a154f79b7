"""The operators as torch sees them: `opcheck`, shapes and errors of the fake implementation, refused operands."""

import re

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from hf_qmoe.ops.schema import dequantize_stack, grouped_linear
from hf_qmoe.packed import PackedStack
from tests.support.oracle import DTYPES, dtype_name, offsets_of, stack_and_control, storage_params


E, N, K = 3, 16, 128


def operands(stack: PackedStack) -> dict[str, torch.Tensor | None]:
    """The tensors of a stack, by argument name of the operators."""
    return {f: getattr(stack, f) for f in ("packed", "absmax", "nested_absmax", "nested_offset")}


@pytest.mark.parametrize("transpose", [False, True], ids=["forward", "transpose"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=dtype_name)
@pytest.mark.parametrize(
    ("quant_type", "double_quant"), storage_params([("nf4", False), ("nf4", True), ("int8", False), ("bf16", False)])
)
def test_grouped_linear_passes_opcheck(quant_type, double_quant, dtype, transpose):
    """Schema, autograd registration, fake tensors and AOT dispatch with dynamic shapes agree with the operator."""
    stack, _ = stack_and_control(quant_type, double_quant, (E, N, K))
    x = torch.randn(9, N if transpose else K, dtype=dtype, requires_grad=True)
    arguments = (x, *operands(stack).values(), offsets_of(4, 0, 3), quant_type, transpose)
    results = torch.library.opcheck(grouped_linear, arguments)
    assert set(results.values()) == {"SUCCESS"}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=dtype_name)
@pytest.mark.parametrize(
    ("quant_type", "double_quant"), storage_params([("fp4", False), ("nf4", True), ("fp8", False), ("fp16", False)])
)
def test_dequantize_stack_passes_opcheck(quant_type, double_quant, dtype):
    """The same checks on the operator that unpacks a whole stack."""
    stack, _ = stack_and_control(quant_type, double_quant, (E, N, K))
    results = torch.library.opcheck(dequantize_stack, (*operands(stack).values(), quant_type, dtype))
    assert set(results.values()) == {"SUCCESS"}


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize(("quant_type", "double_quant"), storage_params())
def test_fake_results_look_like_real_ones(quant_type, double_quant, dtype):
    """Shape, dtype, device and strides of both operators are known without running them."""
    stack, _ = stack_and_control(quant_type, double_quant, (E, N, K))
    offsets = offsets_of(2, 0, 3)

    def call(mode: FakeTensorMode | None) -> list[torch.Tensor]:
        def lift(tensor: torch.Tensor | None) -> torch.Tensor | None:
            return tensor if mode is None or tensor is None else mode.from_tensor(tensor)

        tensors = [lift(t) for t in operands(stack).values()]
        x, gradient = torch.randn(6, K).to(dtype), torch.randn(6, N).to(dtype)
        return [
            grouped_linear(lift(x), *tensors, lift(offsets), quant_type, False),
            grouped_linear(lift(gradient), *tensors, lift(offsets), quant_type, True),
            dequantize_stack(*tensors, quant_type, dtype),
        ]

    for fake, real in zip(call(FakeTensorMode()), call(None), strict=True):
        assert (fake.shape, fake.dtype, fake.device, fake.stride()) == (
            real.shape,
            real.dtype,
            real.device,
            real.stride(),
        )


def test_a_gradient_is_registered_for_x_alone():
    """Only `x` gets a gradient: scales marked trainable by a loader get none, and nothing fails because of them."""
    stack, _ = stack_and_control("nf4", False, (E, N, K))
    absmax = stack.absmax.clone().requires_grad_()
    x = torch.randn(5, K, requires_grad=True)
    grouped_linear(x, stack.packed, absmax, None, None, offsets_of(2, 0, 3), "nf4").sum().backward()
    assert x.grad is not None
    assert absmax.grad is None


# Wrong arguments. Each is refused with the same words whether the tensors are real or fake (meta tensors run the fake
# implementation), and before native code reads bytes that are not there.


def _plain():
    return stack_and_control("nf4", False, (E, N, K))[0]


def _double():
    return stack_and_control("nf4", True, (E, N, K))[0]


def _bytes():
    return stack_and_control("bf16", False, (E, N, K))[0]


X = torch.zeros(5, K)
OFFSETS = torch.tensor([0, 2, 2, 5])
BAD_PRODUCTS = {
    "x-3d": (_plain, {"x": X[None]}, r"x must be \[S, 128\], got \(1, 5, 128\)"),
    "x-columns": (_plain, {"x": X[:, 1:]}, r"x must be \[S, 128\], got \(5, 127\)"),
    "x-not-transposed": (_plain, {"transpose": True}, r"x must be \[S, 16\], got \(5, 128\)"),
    "x-int": (_plain, {"x": X.long()}, r"x must be a float tensor, got torch.int64"),
    "x-complex": (_plain, {"x": X.to(torch.complex64)}, r"x must be a float tensor, got torch.complex64"),
    "offsets-short": (_plain, {"expert_offsets": OFFSETS[:3]}, r"int64 \[4\], got torch.int64 \(3,\)"),
    "offsets-long": (_plain, {"expert_offsets": torch.zeros(5, dtype=torch.long)}, r"int64 \[4\], got .* \(5,\)"),
    "offsets-int32": (_plain, {"expert_offsets": OFFSETS.int()}, r"int64 \[4\], got torch.int32 \(4,\)"),
    "offsets-2d": (_plain, {"expert_offsets": OFFSETS[None]}, r"int64 \[4\], got torch.int64 \(1, 4\)"),
}
BAD_STACKS = {
    "unknown-format": (_plain, {"quant_type": "nf5"}, r"unknown quant_type 'nf5'"),
    "packed-int8": (_plain, {"packed": torch.zeros(E, N, K // 2, dtype=torch.int8)}, "packed must be uint8"),
    "packed-flat": (_plain, {"packed": torch.zeros(E, N * K // 2, dtype=torch.uint8)}, r"uint8 \[E, N, bytes\], got"),
    "packed-float": (_plain, {"packed": torch.zeros(E, N, K // 2)}, r"packed must be uint8 .*torch.float32"),
    "no-absmax": (_plain, {"absmax": None}, "nf4 needs absmax"),
    "needless-absmax": (_bytes, {"absmax": torch.zeros(E, N, 2)}, "bf16 has no absmax"),
    "needless-nested": (
        _bytes,
        {"nested_absmax": torch.zeros(E, 1), "nested_offset": torch.zeros(E)},
        "bf16 has no",
    ),
    "absmax-bf16": (_plain, {"absmax": torch.zeros(E, N, 2, dtype=torch.bfloat16)}, "scales .* must not be cast"),
    "absmax-fp64": (_plain, {"absmax": torch.zeros(E, N, 2, dtype=torch.float64)}, "scales .* must not be cast"),
    "absmax-codes": (_plain, {"absmax": torch.zeros(E, N, 2, dtype=torch.uint8)}, "absmax must be torch.float32"),
    "nested-codes-fp32": (_double, {"absmax": torch.zeros(E, N, 2)}, "absmax must be torch.uint8, got torch.float32"),
    "nested-absmax-bf16": (
        _double,
        {"nested_absmax": torch.zeros(E, 1, dtype=torch.bfloat16)},
        "nested scales must be float32, got torch.bfloat16",
    ),
    "nested-offset-bf16": (
        _double,
        {"nested_offset": torch.zeros(E, dtype=torch.bfloat16)},
        "nested scales must be float32, got torch.bfloat16",
    ),
    "nested-absmax-missing": (_double, {"nested_absmax": None}, "come together"),
    "nested-offset-missing": (_double, {"nested_offset": None}, "come together"),
    "absmax-experts": (_plain, {"absmax": torch.zeros(E - 1, N, 2)}, "absmax is for 2 experts, packed for 3"),
    # A wrong number of scales would be read beyond their end by native code, or scale the wrong weights.
    "absmax-empty": (_plain, {"absmax": torch.zeros(E, 0)}, "absmax"),
    "absmax-too-few": (_plain, {"absmax": torch.zeros(E, N * 2 - 1)}, "absmax"),
    "absmax-too-many": (_plain, {"absmax": torch.zeros(E, N * 2 + 1)}, "absmax"),
    "absmax-odd-block": (_plain, {"absmax": torch.zeros(E, 3)}, "absmax"),
    "nested-absmax-empty": (_double, {"nested_absmax": torch.zeros(E, 0)}, "nested_absmax"),
    "nested-absmax-experts": (_double, {"nested_absmax": torch.zeros(E - 1, 1)}, "nested_absmax"),
    "nested-offset-experts": (_double, {"nested_offset": torch.zeros(E - 1)}, "nested_offset"),
    "nested-offset-2d": (_double, {"nested_offset": torch.zeros(E, N * 2)}, "nested_offset"),
    "bytes-of-half-a-weight": (_bytes, {"packed": torch.zeros(E, N, 2 * K + 1, dtype=torch.uint8)}, "packed"),
}


def refusal(operator, arguments: dict[str, object], device: str) -> str | None:
    """The message with which `operator` refuses `arguments` moved to `device`; `None` if it takes them."""
    moved = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in arguments.items()}
    try:
        operator(**moved)
    except (RuntimeError, ValueError) as error:
        return str(error)
    return None


def assert_refused(operator, arguments: dict[str, object], message: str) -> None:
    """Fake first: if nothing checks the arguments, native code would read out of bounds."""
    fake = refusal(operator, arguments, "meta")
    assert fake is not None, "taken by the fake implementation"
    assert re.search(message, fake), fake
    assert refusal(operator, arguments, "cpu") == fake


@pytest.mark.parametrize("case", [*BAD_STACKS, *BAD_PRODUCTS])
def test_grouped_linear_refuses_operands_that_do_not_belong_together(case):
    """Each wrong argument raises the same message from the real and from the fake implementation."""
    make, changes, message = (BAD_STACKS | BAD_PRODUCTS)[case]
    stack = make()
    good = {"x": X, **operands(stack), "expert_offsets": OFFSETS, "quant_type": stack.quant_type, "transpose": False}
    assert refusal(grouped_linear, good, "cpu") is refusal(grouped_linear, good, "meta") is None
    assert_refused(grouped_linear, good | changes, message)


@pytest.mark.parametrize("case", BAD_STACKS)
def test_dequantize_stack_refuses_operands_that_do_not_belong_together(case):
    """Each wrong argument raises the same message from the real and from the fake implementation."""
    make, changes, message = BAD_STACKS[case]
    stack = make()
    good = {**operands(stack), "quant_type": stack.quant_type, "dtype": torch.float32}
    assert refusal(dequantize_stack, good, "cpu") is refusal(dequantize_stack, good, "meta") is None
    assert_refused(dequantize_stack, good | changes, message)


def test_cast_scales_are_refused_with_what_to_do():
    """FSDP2's mixed precision casts float parameters; the error says that and names the way out."""
    stack = _plain()
    with pytest.raises(RuntimeError, match=r"must not be cast.*FSDP2.*mixed-precision"):
        grouped_linear(X, stack.packed, stack.absmax.bfloat16(), None, None, OFFSETS, "nf4")
