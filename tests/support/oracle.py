"""Oracles for the packed layers: bitsandbytes' own functions on one matrix, and stacks with their float control."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import bitsandbytes.functional as bnb
import pytest
import torch
from torch import Tensor

from hf_qmoe.packed import PackedStack


SCALED = ("nf4", "fp4", "int8", "fp8")
PASSTHROUGH = {"bf16": torch.bfloat16, "fp16": torch.float16}
NATIVE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
DTYPES = (*NATIVE_DTYPES, torch.float64)

#: ``(quant_type, double_quant)`` of every way a stack can be stored.
STORAGES = tuple((q, d) for q in SCALED for d in (False, True)) + tuple((q, False) for q in PASSTHROUGH)


def dtype_name(value: object) -> str | None:
    """Ids of parametrized tests: ``bfloat16`` rather than ``dtype2``."""
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else None


def storage_params(storages: Sequence[tuple[str, bool]] = STORAGES) -> list[object]:
    """`storages` for ``pytest.mark.parametrize``, with ids such as ``nf4-double``."""
    return [pytest.param(q, d, id=f"{q}-double" if d else q) for q, d in storages]


def offsets_of(*counts: int, device: str = "cpu") -> Tensor:
    """``expert_offsets`` for `counts` rows per expert."""
    return torch.tensor([0, *counts], device=device).cumsum(0)


def bnb_quantize(
    weight: Tensor, quant_type: str, blocksize: int, double_quant: bool = False
) -> tuple[Tensor, bnb.QuantState]:
    """bitsandbytes' bytes and statistics for one matrix ``[N, K]``.

    The tables are made anew behind its back: 0.48 writes -1 into the first value of the one it packs with.
    """
    if quant_type in ("nf4", "fp4"):
        # As one row: bitsandbytes' AVX512 unpacking takes the wrong scales where a block crosses a row of `shape`.
        codes, state = bnb.quantize_4bit(
            weight.reshape(1, -1), blocksize=blocksize, quant_type=quant_type, compress_statistics=double_quant
        )
        if double_quant:
            state.state2.code = bnb.create_dynamic_map().to(weight.device)
        return codes, state
    code = bnb.create_dynamic_map() if quant_type == "int8" else bnb.create_fp8_map(True, 4, 3, 8)
    codes, state = bnb.quantize_blockwise(weight, code=code.to(weight.device, copy=True), blocksize=blocksize)
    state.code = code.to(weight.device)
    if not double_quant:
        return codes, state
    # `nested=True` would reuse `blocksize`; `compress_statistics` always takes 256, and so does this package.
    offset = state.absmax.mean()
    nested, nested_state = bnb.quantize_blockwise(state.absmax - offset, blocksize=256)
    nested_state.code = bnb.create_dynamic_map().to(weight.device)
    return codes, bnb.QuantState(
        nested, code=state.code, blocksize=blocksize, dtype=state.dtype, offset=offset, state2=nested_state
    )


def bnb_scales(state: bnb.QuantState) -> Tensor:
    """The fp32 scales that bitsandbytes multiplies with, decompressed if they are nested."""
    if not state.nested:
        return state.absmax
    return bnb.dequantize_blockwise(state.absmax, state.state2) + state.offset


def bnb_dequantize(codes: Tensor, state: bnb.QuantState, dtype: torch.dtype, shape: tuple[int, int]) -> Tensor:
    """bitsandbytes' own unpacking in `dtype`, as a matrix ``[N, K]``; float64 is its float32, cast."""
    state.dtype = dtype if dtype in NATIVE_DTYPES else torch.float32
    unpack = bnb.dequantize_4bit if state.quant_type in ("nf4", "fp4") else bnb.dequantize_blockwise
    return unpack(codes, state).reshape(shape).to(dtype)


def control_weights(
    weights: Tensor, quant_type: str, blocksize: int, double_quant: bool, dtype: torch.dtype
) -> Tensor:
    """What a stack packed from float `weights` ``[E, N, K]`` stands for, by bitsandbytes alone."""
    if quant_type in PASSTHROUGH:
        return weights.to(PASSTHROUGH[quant_type]).to(dtype)
    experts = []
    for weight in weights:
        codes, state = bnb_quantize(weight, quant_type, blocksize, double_quant)
        experts.append(bnb_dequantize(codes, state, dtype, tuple(weight.shape)))
    return torch.stack(experts)


def stack_and_control(
    quant_type: str,
    double_quant: bool = False,
    shape: tuple[int, int, int] = (4, 24, 64),
    blocksize: int = 64,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> tuple[PackedStack, Tensor]:
    """A random packed stack ``[E, N, K]`` and its float control in `dtype`."""
    weights = torch.randn(shape, device=device)
    stack = PackedStack.from_float(weights, quant_type, blocksize, double_quant)
    return stack, control_weights(weights, quant_type, blocksize, double_quant, dtype)


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fills every "uninitialised" tensor with NaN, so that an element that nobody wrote shows."""
    previous = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(previous[0], warn_only=previous[1])
        torch.utils.deterministic.fill_uninitialized_memory = fill


@contextmanager
def recorded_saves() -> Iterator[list[Tensor]]:
    """Every tensor that autograd saves for backward inside the block."""
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield saved


def assert_same_bits(actual: Tensor, expected: Tensor) -> None:
    """Equal dtype, shape and values, without tolerance."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
