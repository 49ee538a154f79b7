"""Products with packed weights by the package's own CPU kernels: weights are unpacked into registers or cache.

They add in float32 and round less often than dequantizing to bfloat16 and multiplying does, so their results are not
those bits: `hf_qmoe.ops.torch_ops` asks for them only where nobody needs the bits.
"""

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

from hf_qmoe.ops.checks import check
from hf_qmoe.ops.formats import NESTED_BLOCKSIZE, codebook, get_format
from hf_qmoe.ops.native_library import DTYPES, address, has_memory, has_products, load
from hf_qmoe.ops.operands import Operands


_BAD_ARGUMENT, _NO_MEMORY, _NO_KERNEL = 2, 3, 4
#: What is said then, where there is no other way left.
NO_KERNEL = "the CPU kernels in use do not multiply; another thread has chosen other ones since it was asked"

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


class LayerInputs(NamedTuple):
    """What a layer of experts is given besides its packed weights, see `hf_qmoe.ops.fused.fused_experts`."""

    x: Tensor
    top_k_index: Tensor
    top_k_weights: Tensor
    up_bias: Tensor | None
    down_bias: Tensor | None


class DescribedExperts(ctypes.Structure):
    """What calls of one layer have in common, as the kernels take it; made by `describe_experts` and `for_inputs`."""

    _fields_ = (
        *(
            (name, ctypes.c_int64)
            for name in ("dtype", "out_dtype", "weights_dtype", "tokens", "top_k", "num_experts")
        ),
        *((name, ctypes.c_void_p) for name in ("up_bias", "down_bias")),
        *((name, ctypes.c_int64) for name in ("gate", "activation")),
        *((name, DescribedStack) for name in ("up", "down")),
        *((name, ctypes.c_void_p) for name in ("out", "x", "top_k_index", "top_k_weights")),
        ("threads", ctypes.c_int64),
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
        RuntimeError: the instruction set in use does not multiply.
    """
    x, stack, offsets = x.contiguous(), stack.contiguous(), expert_offsets.contiguous()
    call = _GroupedLinearCall(
        *(address(out), address(x), DTYPES[x.dtype], x.shape[0], address(offsets)),
        *(stack.packed.shape[0], torch.get_num_threads(), describe(stack)),
    )
    check(_run("hf_qmoe_grouped_linear", ctypes.byref(call)), lambda: NO_KERNEL)


def run_experts(layer: DescribedExperts, out: Tensor, x: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> bool:
    """A whole experts layer. The arguments are those of `hf_qmoe.ops.fused.fused_experts`.

    Args:
        layer: from `for_inputs`, for these sizes and dtypes.
        out: contiguous ``[T, H]`` in the dtype of `x` or float32, overwritten.
        x, top_k_index, top_k_weights: as `kernels_read`.

    Returns:
        whether the instruction set in use multiplies; nothing is done if it does not.

    Raises:
        ValueError: an index is negative.
        MemoryError: not enough memory for the activations.
    """
    index, weights = address(top_k_index), address(top_k_weights)
    call = ctypes.byref(layer), out.data_ptr(), address(x), index, weights, torch.get_num_threads()
    return _run("hf_qmoe_experts", *call)


def kernels_read(x: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> bool:
    """Whether `run_experts` takes these as they are; `ready` makes what it takes of others."""
    dtypes = top_k_index.dtype == torch.int64 and top_k_weights.dtype in DTYPES
    return dtypes and x.is_contiguous() and top_k_index.is_contiguous() and top_k_weights.is_contiguous()


def ready(tensor: Tensor, *dtypes: torch.dtype) -> Tensor:
    """`tensor`, contiguous and of one of `dtypes`, as kernels read it."""
    return (tensor if tensor.dtype in dtypes else tensor.to(dtypes[0])).contiguous()


def _run(name: str, *arguments: object) -> bool:
    """Calls a kernel; whether there was one."""
    library = load().library
    assert library is not None
    status: int = getattr(library, name)(*arguments)
    if status == _BAD_ARGUMENT:
        raise ValueError("top_k_index holds a negative expert index")
    if status == _NO_MEMORY:
        raise MemoryError("not enough memory for the activations of an experts layer")
    assert status in (0, _NO_KERNEL), status
    return status == 0


def describe_experts(up: Operands, down: Operands, gate: str) -> DescribedExperts:
    """The weights of a layer; see `describe`."""
    num_experts = up.packed.shape[0]
    return DescribedExperts(num_experts=num_experts, gate=GATES.index(gate), up=describe(up), down=describe(down))


def for_inputs(
    layer: DescribedExperts, given: LayerInputs, activation: str, out_dtype: torch.dtype
) -> DescribedExperts:
    """A copy of `layer` for inputs of these sizes and dtypes, and for these biases, which are contiguous float32."""
    call = DescribedExperts.from_buffer_copy(layer)
    call.dtype, call.weights_dtype = DTYPES[given.x.dtype], DTYPES[given.top_k_weights.dtype]
    call.out_dtype = DTYPES[out_dtype]
    call.tokens, call.top_k = given.top_k_index.shape
    call.up_bias, call.down_bias = (None if bias is None else address(bias) for bias in given[3:])
    call.activation = ACTIVATIONS.index(activation)
    return call


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
