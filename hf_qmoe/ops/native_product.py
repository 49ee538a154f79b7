"""Products with packed weights by the package's own CPU kernels: weights are unpacked into registers or cache.

They add in float32 and round less often than dequantizing to bfloat16 and multiplying does, so their results are not
those bits: `hf_qmoe.ops.torch_ops` asks for them only where nobody needs the bits.
"""

import ctypes

import torch
from torch import Tensor

from hf_qmoe.ops.formats import NESTED_BLOCKSIZE, codebook, get_format
from hf_qmoe.ops.native_library import DTYPES, address, has_memory, has_products, load
from hf_qmoe.ops.operands import Operands


_BAD_ARGUMENT, _NO_MEMORY = 2, 3

#: What the gate of an experts layer is: none, rows ``[gate; up]``, or rows gate0, up0, gate1, ...
GATES = ("none", "concatenated", "interleaved")
#: The activations that the kernels know: SiLU, GELU (approximated by tanh), ReLU and its square.
ACTIVATIONS = ("silu", "gelu_tanh", "relu", "relu2")


class DescribedStack(ctypes.Structure):
    """Addresses and sizes of a stack, as the kernels take it; made by `describe`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("packed", "absmax", "nested_absmax", "nested_offset")),
        *((name, ctypes.c_void_p) for name in ("nested_codebook", "codebook")),
        *((name, ctypes.c_int64) for name in ("rows", "columns", "blocksize", "bits")),
    )


class _GroupedLinearCall(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("out", "x")),
        *((name, ctypes.c_int64) for name in ("dtype", "count")),
        ("offsets", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("num_experts", "threads")),
        ("weights", DescribedStack),
    )


class _ExpertsCall(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("out", "x")),
        *((name, ctypes.c_int64) for name in ("dtype", "out_dtype", "tokens", "top_k")),
        *((name, ctypes.c_void_p) for name in ("top_k_index", "top_k_weights")),
        ("num_experts", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("up_bias", "down_bias")),
        *((name, ctypes.c_int64) for name in ("gate", "activation", "threads")),
        *((name, DescribedStack) for name in ("up", "down")),
    )


def multiplies(x: Tensor, *stacks: Operands) -> bool:
    """Whether there are kernels for inputs like `x` and these stacks: memory on the CPU, 4 or 8 bits."""
    if not takes(x) or any(stack.absmax is None for stack in stacks):
        return False
    return all(has_memory(tensor) for stack in stacks for tensor in stack.tensors)


def takes(x: Tensor) -> bool:
    """Whether there are kernels for inputs like `x`."""
    return x.dtype in DTYPES and has_memory(x) and has_products()


def grouped_linear_into(out: Tensor, x: Tensor, stack: Operands, expert_offsets: Tensor) -> None:
    """``out[s] = x[s] @ W_e.T`` for rows sorted by expert; call `multiplies` first.

    Args:
        out: contiguous ``[S, N]``; rows of no expert are left as they are.
        x: ``[S, K]`` in the dtype of `out`.
        expert_offsets: int64 ``[E + 1]``, rising from 0 to at most S; the caller has checked it.

    Raises:
        MemoryError: not enough memory for a thread's tile.
    """
    x, stack, offsets = x.contiguous(), stack.contiguous(), expert_offsets.contiguous()
    call = _GroupedLinearCall(
        *(address(out), address(x), DTYPES[x.dtype], x.shape[0], address(offsets)),
        *(stack.packed.shape[0], torch.get_num_threads(), describe(stack)),
    )
    _run("hf_qmoe_grouped_linear", call)


def experts_into(
    out: Tensor,
    x: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    layer: bytes,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    activation: str,
) -> None:
    """A whole experts layer; call `multiplies` first. The arguments are those of `hf_qmoe.ops.fused.fused_experts`.

    Args:
        out: contiguous ``[T, H]`` in the dtype of `x` or float32, overwritten.
        layer: the weights, from `describe_experts`.

    Raises:
        ValueError: an index is negative.
        MemoryError: not enough memory for the activations.
    """
    x, index, weights = _ready(x, x.dtype), _ready(top_k_index, torch.int64), _ready(top_k_weights, torch.float32)
    biases = [None if bias is None else _ready(bias, torch.float32) for bias in (up_bias, down_bias)]
    call = _ExpertsCall.from_buffer_copy(layer)
    call.out, call.x, call.dtype, call.out_dtype = address(out), address(x), DTYPES[x.dtype], DTYPES[out.dtype]
    call.tokens, call.top_k = index.shape
    call.top_k_index, call.top_k_weights = address(index), address(weights)
    call.up_bias, call.down_bias = (None if bias is None else address(bias) for bias in biases)
    call.activation, call.threads = ACTIVATIONS.index(activation), torch.get_num_threads()
    _run("hf_qmoe_experts", call)


def _ready(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """As kernels read it; where other work has had the caches, each call that changes nothing is some microseconds."""
    return tensor if tensor.dtype == dtype and tensor.is_contiguous() else tensor.to(dtype).contiguous()


def _run(name: str, call: ctypes.Structure) -> None:
    library = load().library
    assert library is not None
    status = getattr(library, name)(ctypes.byref(call))
    if status == _BAD_ARGUMENT:
        raise ValueError("top_k_index holds a negative expert index")
    if status == _NO_MEMORY:
        raise MemoryError("not enough memory for the activations of an experts layer")
    assert status == 0, status


def describe_experts(up: Operands, down: Operands, gate: str) -> bytes:
    """What calls of one layer have in common, for `experts_into`; see `describe`."""
    num_experts = up.packed.shape[0]
    return bytes(_ExpertsCall(num_experts=num_experts, gate=GATES.index(gate), up=describe(up), down=describe(down)))


def describe(stack: Operands) -> DescribedStack:
    """Addresses and sizes of a contiguous stack, which must outlive them."""
    assert stack.absmax is not None
    bits = get_format(stack.quant_type).bits
    _, rows, columns = stack.shape
    nested: tuple[int | None, ...] = (None, None, None)
    if stack.nested_absmax is not None and stack.nested_offset is not None:
        assert NESTED_BLOCKSIZE == 256, "a constant of the kernels"
        codes = address(codebook("int8", "cpu"))
        nested = (address(stack.nested_absmax), address(stack.nested_offset), codes)
    return DescribedStack(
        *(address(stack.packed), address(stack.absmax), *nested, address(codebook(stack.quant_type, "cpu"))),
        *(rows, columns, stack.blocksize, bits),
    )
