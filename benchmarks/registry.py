"""All benchmark cases by name."""

from benchmarks import (
    convergence,
    cpu_kernels,
    expert_lora,
    experts_time,
    linear_4bit,
    load_memory,
    streamed_memory,
    training_memory,
)
from benchmarks.case import Case


CASES: dict[str, Case] = {
    case.name: case
    for case in (
        training_memory.CASE,
        load_memory.CASE,
        experts_time.CASE,
        expert_lora.CASE,
        convergence.CASE,
        streamed_memory.CASE,
        linear_4bit.CASE,
        cpu_kernels.CASE,
    )
}
