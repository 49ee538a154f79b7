"""All benchmark cases by name."""

from benchmarks import (
    convergence,
    cpu_kernels,
    decode,
    expert_lora,
    experts_time,
    growth,
    linear_4bit,
    load_memory,
    prequantized_load,
    quantize_disk,
    streamed_memory,
    training_memory,
)
from benchmarks.case import Case


CASES: dict[str, Case] = {
    case.name: case
    for case in (
        training_memory.CASE,
        load_memory.CASE,
        quantize_disk.CASE,
        experts_time.CASE,
        expert_lora.CASE,
        growth.CASE,
        decode.CASE,
        convergence.CASE,
        streamed_memory.CASE,
        linear_4bit.CASE,
        cpu_kernels.CASE,
        prequantized_load.CASE,
    )
}
