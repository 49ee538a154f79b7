"""Time to pack and unpack one expert on the CPU: the native kernels against bitsandbytes' own, into warm memory.

Both arms unpack into one buffer that was written before, as the package does, so that page faults do not hide the
difference, and take turns in one process, each round in the other order. A turn is one call that does not count, which
wakes the threads and fills the caches with its data, and a few that do: experts follow each other. Values, packed
bytes and scales must be equal bit for bit.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from benchmarks.case import Case, Result, Row
from benchmarks.memory import fresh_process
from benchmarks.timing import Steps, interleave, milliseconds
from benchmarks.verify import require_equal
from hf_qmoe.ops import cpu, native, native_library
from hf_qmoe.ops.formats import codebook, get_format


#: Highest accepted time relative to bitsandbytes, by metric.
TARGETS = {"dequantize": 0.5, "quantize": 0.1}
#: Calls of an arm in a row. Unpacking takes 0.1 ms, and its first calls longer: memory and threads wake up.
_WARM_CALLS = {"dequantize": 30, "quantize": 3}


@dataclass(frozen=True)
class Size:
    """What to run: one matrix of `shape` ``(N, K)``, OLMoE's down projection, for each format and dtype."""

    shape: tuple[int, int] = (2048, 1024)
    quant_types: tuple[str, ...] = ("nf4", "fp4", "int8", "fp8")
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float16)
    blocksize: int = 64
    rounds: dict[str, int] = field(default_factory=lambda: {"dequantize": 101, "quantize": 7})
    threads: int = field(default_factory=torch.get_num_threads)


def _bnb_quantize(weight: Tensor, quant_type: str, blocksize: int) -> tuple[Tensor, Tensor]:
    ops = torch.ops.bitsandbytes
    if get_format(quant_type).bits == 4:
        packed, absmax = ops.quantize_4bit.default(weight, blocksize, quant_type, torch.uint8)
    else:
        packed, absmax = ops.quantize_blockwise.default(weight, codebook(quant_type, "cpu"), blocksize)
    return packed.view(weight.shape[0], -1), absmax


def _native_quantize(weight: Tensor, quant_type: str, blocksize: int) -> tuple[Tensor, Tensor]:
    packed = native.quantize(weight, quant_type, blocksize)
    assert packed is not None
    return packed


QUANTIZE = {"bitsandbytes": _bnb_quantize, "native": _native_quantize}
DEQUANTIZE = {"bitsandbytes": cpu.dequantize_into, "native": native.dequantize_into}


def measure(size: Size) -> Result:
    """Measures both arms for each format and dtype; run it in a fresh process."""
    if not native_library.available():
        raise RuntimeError(f"nothing to measure: {native_library.why_not()}")
    torch.set_num_threads(size.threads)
    rows: list[Row] = []
    outputs: dict[str, dict[str, Any]] = {arm: {} for arm in QUANTIZE}
    for quant_type, dtype in product(size.quant_types, size.dtypes):
        weight = torch.randn(size.shape, generator=torch.Generator().manual_seed(0)).mul_(0.02).to(dtype)
        config = {"N": size.shape[0], "K": size.shape[1], "quant_type": quant_type, "blocksize": size.blocksize}
        config |= {"dtype": str(dtype).removeprefix("torch."), "instruction_set": native_library.instruction_set()}

        packing = {arm: partial(quantize, weight, quant_type, size.blocksize) for arm, quantize in QUANTIZE.items()}
        rows += _times(packing, "quantize", config, size.rounds["quantize"])
        packed, absmax = packing["bitsandbytes"]()
        buffer = torch.zeros(size.shape, dtype=dtype)
        unpacking = {
            arm: partial(dequantize_into, buffer, packed, absmax, quant_type, size.blocksize)
            for arm, dequantize_into in DEQUANTIZE.items()
        }
        timed = _times(unpacking, "dequantize", config, size.rounds["dequantize"])
        rows += timed + _rates(timed, weight.numel() * weight.element_size())
        for arm in QUANTIZE:
            assert unpacking[arm](), f"{arm} cannot unpack {quant_type} to {dtype}"
            values = (*packing[arm](), buffer.clone())
            names = (f"{quant_type}_{config['dtype']}_{what}" for what in ("packed", "absmax", "values"))
            outputs[arm] |= dict(zip(names, values, strict=True))
    return Result(rows, outputs)


def _times(arms: Steps, metric: str, config: dict[str, Any], rounds: int) -> list[Row]:
    clock = partial(_warm, calls=_WARM_CALLS[metric])
    rows = interleave(arms, rounds, alternate=True, clock=clock).rows(config, metric, "bitsandbytes")
    return [replace(row, target=TARGETS[metric] if row.arm == "native" else None) for row in rows]


def _warm(function: Callable[[], Any], calls: int) -> float:
    """Milliseconds of each of `calls` that follow another of the same kind."""
    function()
    return milliseconds(lambda: [function() for _ in range(calls)]) / calls


def _rates(timed: list[Row], size: int) -> list[Row]:
    """GB of values written per second, informative: the ratio is how many times as fast as bitsandbytes."""
    rows = []
    for row in timed:
        assert row.ratio is not None
        rate = size / row.value / 1e6
        rows.append(Row(row.arm, row.config, "rate", "GB/s", rate, row.baseline, 1 / row.ratio, repeats=row.repeats))
    return rows


def run(size: Size) -> Result:
    """`measure` in a process of its own."""
    result: Result = fresh_process(measure, size)
    return result


def verify(outputs: dict[str, dict[str, Any]]) -> None:
    """Bytes, scales and values of both arms are equal, bit for bit."""
    require_equal(outputs["native"], outputs["bitsandbytes"], "native against bitsandbytes")


CASE = Case(
    "cpu_kernels",
    run,
    verify,
    {"full": Size(), "toy": Size((64, 128), ("nf4", "int8"), rounds={"dequantize": 7, "quantize": 5})},
)
