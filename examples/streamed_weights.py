# ruff: noqa: E402
"""Packed weights that are copied into a few recycled buffers while a model trains: the gradients, and the memory.

    python examples/streamed_weights.py

L layers share W buffers ("slots"): each layer copies its packed weight, scales and all, from a mapped file into a slot
inside its checkpointed region, so that W layers are in memory, not L. That is right only if backward multiplies by
what the recomputation saved. bitsandbytes keeps the packed weight as an attribute of the autograd node, where neither
checkpointing nor autograd's version counters look: here most gradients are wrong and nothing says so.

The exit status is 1 if a gradient of ours is not exactly that of buffers of its own.
"""

import logging
import os


# Read when torch is imported: the profiler, which counts the memory, would announce itself, and threads that wait for
# each other sleep instead of spinning, which is several times faster where other programs use the same cores.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")
if __name__ == "__main__":  # not for those who import this
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# bitsandbytes warns, when imported, of an optional kernel that is not installed.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)

import argparse
import gc
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple, Protocol

import bitsandbytes
import torch
from bitsandbytes.functional import QuantState, quantize_4bit
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import hf_qmoe
from hf_qmoe import ExpertsNbit
from hf_qmoe.ops.torch_ops import release_scratch


# Started as a script, the examples' directory is on the path and the repository's is not.
sys.path.append(str(Path(__file__).resolve().parents[1]))

from benchmarks.memory import peak_of_tensors


BLOCKSIZE, NESTED_BLOCKSIZE = 64, 256
EXPERTS, TOP_K = 8, 2

Tensors = dict[str, Tensor]


class Operator(Protocol):
    """The frozen part of a layer: what it stores, and its product with it."""

    def pack(self, generator: torch.Generator) -> Tensors:
        """Random weights, as every tensor that has to be streamed."""

    def __call__(self, x: Tensor, tensors: Tensors) -> Tensor:
        """``[T, H]`` to ``[T, H]``."""


def random_weight(*shape: int, generator: torch.Generator) -> Tensor:
    """bf16, of a size that keeps the size of activations."""
    return (torch.randn(*shape, generator=generator) * shape[-1] ** -0.5).bfloat16()


@dataclass(frozen=True)
class PackedLinear:
    """``x @ W.T`` with nf4 ``W [H, H]``, by `matmul`: bitsandbytes' `matmul_4bit` or ours, on the same tensors."""

    matmul: Callable[..., Tensor]
    hidden: int
    double_quant: bool = False

    def pack(self, generator: torch.Generator) -> Tensors:
        """Bytes, scales and codebooks; with `double_quant` the scales of the scales and their offset too."""
        weight = random_weight(self.hidden, self.hidden, generator=generator)
        packed, state = quantize_4bit(
            weight, blocksize=BLOCKSIZE, compress_statistics=self.double_quant, quant_type="nf4"
        )
        tensors = {"packed": packed, "absmax": state.absmax, "code": state.code}
        if state.nested:
            tensors |= {"offset": state.offset, "nested_absmax": state.state2.absmax, "nested_code": state.state2.code}
        return tensors

    def __call__(self, x: Tensor, tensors: Tensors) -> Tensor:
        """The `QuantState` is made anew: it holds references only."""
        nested = None
        if self.double_quant:
            nested = QuantState(
                tensors["nested_absmax"], code=tensors["nested_code"], blocksize=NESTED_BLOCKSIZE, dtype=torch.float32
            )
        state = QuantState(
            tensors["absmax"],
            shape=torch.Size((self.hidden, self.hidden)),
            code=tensors["code"],
            blocksize=BLOCKSIZE,
            quant_type="nf4",
            dtype=x.dtype,
            offset=tensors.get("offset"),
            state2=nested,
        )
        return self.matmul(x, tensors["packed"], state)


@dataclass(frozen=True)
class PlainLinear:
    """The control: a bf16 weight that autograd itself saves."""

    hidden: int

    def pack(self, generator: torch.Generator) -> Tensors:
        """One tensor."""
        return {"weight": random_weight(self.hidden, self.hidden, generator=generator)}

    def __call__(self, x: Tensor, tensors: Tensors) -> Tensor:
        """``x @ W.T``."""
        return nn.functional.linear(x, tensors["weight"])


class StreamedExperts:
    """`ExpertsNbit` of 8 experts with I = H / 2; each token goes to two."""

    def __init__(self, hidden: int, double_quant: bool = False, quant_type: str = "nf4") -> None:
        self.hidden, self.options = hidden, {"double_quant": double_quant, "quant_type": quant_type}
        # On the meta device it holds no memory: at each call it is lent that of a slot.
        self.module = ExpertsNbit(EXPERTS, hidden, hidden // 2, device="meta", **self.options)

    def pack(self, generator: torch.Generator) -> Tensors:
        """All parameters of the module by name: bytes and scales of both projections."""
        gate_up = random_weight(EXPERTS, self.hidden, self.hidden, generator=generator)
        down = random_weight(EXPERTS, self.hidden, self.hidden // 2, generator=generator)
        module = ExpertsNbit.from_float(gate_up, down, **self.options)
        return {name: parameter.detach() for name, parameter in module.named_parameters()}

    def __call__(self, x: Tensor, tensors: Tensors) -> Tensor:
        """Token t goes to experts t and t + 1."""
        tokens, places = torch.arange(len(x), device=x.device), torch.arange(TOP_K, device=x.device)
        index = (tokens[:, None] + places) % EXPERTS
        weights = x.new_full(index.shape, 1 / TOP_K)
        return functional_call(self.module, tensors, (x, index, weights))


class Pool:
    """Memory for the weights of `count` layers; layer i gets slot i mod `count`, and what the slot held is lost."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.slots: dict[int, Tensors] = {}

    def load(self, layer: int, stored: Tensors) -> Tensors:
        """`stored` as copies in the slot of `layer`."""
        slot = self.slots.setdefault(layer % self.count, {})
        with torch.no_grad():
            for name, tensor in stored.items():
                if name not in slot:
                    slot[name] = torch.empty_like(tensor)
                slot[name].copy_(tensor)
        return slot


class StreamedLayer(nn.Module):
    """A trainable norm and a frozen product behind it, with a residual connection.

    The product comes last. Backward reaches it before anything that autograd saved, so nothing has been recomputed
    yet: an operator that keeps its weight elsewhere finds the slot as another layer left it. (With an activation
    behind it, what that saved would be recomputed first, and the slot filled again in time, by luck.)
    """

    def __init__(self, index: int, stored: Tensors, operator: Operator, pool: Pool, hidden: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(hidden, dtype=torch.bfloat16)
        self.index, self.stored, self.operator, self.pool = index, stored, operator, pool

    def forward(self, hidden_states: Tensor) -> Tensor:
        """``[T, H]`` to ``[T, H]``; the copy is part of what a checkpoint runs again."""
        weights = self.pool.load(self.index, self.stored)
        return hidden_states + self.operator(self.norm(hidden_states), weights)


def make_weights(operator: Operator, layers: int, seed: int) -> list[Tensors]:
    """Weights of `layers` layers, no two alike."""
    generator = torch.Generator().manual_seed(seed)
    return [operator.pack(generator) for _ in range(layers)]


def step(
    operator: Operator, stored: Sequence[Tensors], slots: int, batch: Tensor, checkpointed: bool = True
) -> list[Tensor]:
    """One forward and backward through ``len(stored)`` layers over `slots` slots.

    Args:
        batch: bf16 ``[T, H]``.

    Returns:
        The gradient of each layer's norm ``[H]``.
    """
    pool = Pool(slots)
    layers = [StreamedLayer(i, weights, operator, pool, batch.shape[1]) for i, weights in enumerate(stored)]
    hidden_states = batch
    for layer in layers:
        if checkpointed:
            # Nothing is drawn in a layer, and saved states of the generator would count as memory.
            hidden_states = checkpoint(layer, hidden_states, use_reentrant=False, preserve_rng_state=False)
        else:
            hidden_states = layer(hidden_states)
    hidden_states.float().square().mean().backward()
    return [layer.norm.weight.grad for layer in layers]


def make_batch(tokens: int, hidden: int, seed: int) -> Tensor:
    """bf16 ``[T, H]``."""
    return torch.randn(tokens, hidden, generator=torch.Generator().manual_seed(seed)).bfloat16()


def differences(
    operator: Operator, stored: Sequence[Tensors], slots: int, batch: Tensor, checkpointed: bool = True
) -> list[float]:
    """Of each layer's gradient, largest over its largest entry, from that of private buffers without checkpointing."""
    found = step(operator, stored, slots, batch, checkpointed)
    expected = step(operator, stored, len(stored), batch, checkpointed=False)
    return [
        ((gradient.double() - reference.double()).abs().max() / reference.double().abs().max()).item()
        for gradient, reference in zip(found, expected, strict=True)
    ]


class Overwritten(NamedTuple):
    """What comes of slots that are overwritten without checkpointing: an error, or gradients."""

    error: str | None
    differences: list[float]


def without_checkpointing(operator: Operator, stored: Sequence[Tensors], slots: int, batch: Tensor) -> Overwritten:
    """Runs a step that cannot be right; the best that can happen is an error."""
    try:
        return Overwritten(None, differences(operator, stored, slots, batch, checkpointed=False))
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        return Overwritten(str(error).partition(":")[0], [])


def map_weights(stored: Sequence[Tensors], path: Path) -> list[Tensors]:
    """Writes the weights to one file and returns them as it is mapped: in no memory that a process has to have."""
    save_file(
        {f"{layer}.{name}": t.clone() for layer, tensors in enumerate(stored) for name, t in tensors.items()}, path
    )
    mapped = load_file(path)
    return [{name: mapped[f"{layer}.{name}"] for name in tensors} for layer, tensors in enumerate(stored)]


def packed_bytes(stored: Tensors) -> int:
    """Of one layer, scales included."""
    return sum(tensor.nbytes for tensor in stored.values())


def peak_of_step(operator: Operator, stored: Sequence[Tensors], slots: int, batch: Tensor) -> int:
    """Highest sum of live tensor bytes in a checkpointed step: slots, activations, unpacked weights, gradients."""
    step(operator, stored[:1], 1, batch)  # what is made once, such as codebooks, does not count
    release_scratch()  # the buffer that weights are unpacked into does
    gc.collect()
    return peak_of_tensors(lambda: step(operator, stored, slots, batch))


def table(*rows: Sequence[str]) -> str:
    """In Markdown, aligned; the first row is its header."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rule = ["-" * width for width in widths]
    lines = [map(str.ljust, row, widths) for row in (rows[0], rule, *rows[1:])]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def compare_gradients(options: argparse.Namespace) -> bool:
    """Prints the differences of each layer, and what happens without checkpointing. Returns whether ours are exact."""
    hidden, double_quant = options.hidden, options.double_quant
    theirs, ours = "bitsandbytes matmul_4bit", "hf_qmoe matmul_4bit"
    operators: dict[tuple[str, str], Operator] = {
        (theirs, "4-bit"): PackedLinear(bitsandbytes.matmul_4bit, hidden, double_quant),
        (ours, "4-bit"): PackedLinear(hf_qmoe.matmul_4bit, hidden, double_quant),
        ("hf_qmoe ExpertsNbit", "4-bit"): StreamedExperts(hidden, double_quant),
        ("torch linear", "bf16"): PlainLinear(hidden),
        ("hf_qmoe ExpertsNbit", "bf16"): StreamedExperts(hidden, quant_type="bf16"),
    }
    batch = make_batch(options.tokens, hidden, options.seed)
    rows, overwritten, exact = [], [["operator", "arm", "outcome"]], True
    for (name, kind), operator in operators.items():
        stored = make_weights(operator, options.layers, options.seed)
        arms = {f"{kind}, recycled" + (" (control)" if kind == "bf16" else ""): options.slots}
        if kind == "4-bit":
            arms["4-bit, private"] = options.layers
        for arm, slots in arms.items():
            found = differences(operator, stored, slots, batch)
            rows.append([name, arm, *("0" if d == 0 else f"{d:.2g}" for d in found)])
            exact &= name == theirs or not any(found)
        error, found = without_checkpointing(operator, stored, options.slots, batch)
        wrong = [str(layer) for layer, difference in enumerate(found) if difference]
        outcome = f"RuntimeError: {error}" if error else f"no error, wrong gradients in layers {', '.join(wrong)}"
        overwritten.append([name, f"{kind}, recycled", outcome])
        exact &= name == theirs or error is not None
    print(
        f"## Gradients: {options.layers} checkpointed layers over {options.slots} slots\n\n"
        "Largest difference of each layer's gradient from that of private buffers without checkpointing, relative to "
        "its largest entry:\n"
    )
    print(table(["operator", "arm", *map(str, range(options.layers))], *rows))
    print("\n## The same without checkpointing: nothing is recomputed, so no gradient can be right\n")
    print(table(*overwritten))
    return exact


def compare_memory(options: argparse.Namespace) -> None:
    """Prints the peak of a step at three depths, with recycled and with private buffers."""
    operators: dict[str, Operator] = {
        "hf_qmoe matmul_4bit": PackedLinear(hf_qmoe.matmul_4bit, options.hidden, options.double_quant),
        "hf_qmoe ExpertsNbit": StreamedExperts(options.hidden, options.double_quant),
    }
    depths = (max(options.layers // 2, options.slots), options.layers, 2 * options.layers)
    batch = make_batch(options.tokens, options.hidden, options.seed)
    rows = [["operator", "buffers", *(f"L = {depth}" for depth in depths), "one more layer", "of its packed bytes"]]
    for name, operator in operators.items():
        with tempfile.TemporaryDirectory() as folder:
            stored = map_weights(make_weights(operator, depths[-1], options.seed), Path(folder) / "packed.safetensors")
            for kind in ("recycled", "private"):
                slots = [options.slots if kind == "recycled" else depth for depth in depths]
                peaks = [peak_of_step(operator, stored[:d], n, batch) for d, n in zip(depths, slots, strict=True)]
                growth = (peaks[-1] - peaks[0]) / (depths[-1] - depths[0])
                cells = [*(f"{peak / 1e6:.3f} MB" for peak in peaks), f"{growth / 1e6:.4f} MB"]
                rows.append([name, kind, *cells, f"{growth / packed_bytes(stored[0]):.3f}"])
            del stored  # unmaps the file, which some systems do not remove otherwise
    print(
        f"\n## Memory: peak of live tensors in a step, {options.slots} slots against one for each layer\n\n"
        f"The packed weights are in a mapped file. With each layer grows what checkpointing keeps, [T, H] = "
        f"[{options.tokens}, {options.hidden}] of bf16, and the norm with its gradient.\n"
    )
    print(table(*rows))


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Sizes, seed and format."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=8, help="L; the memory is also measured at L / 2 and 2 L")
    parser.add_argument("--slots", type=int, default=2, help="W, buffers that the layers share")
    parser.add_argument("--hidden", type=int, default=512, help="H, a multiple of 128")
    parser.add_argument("--tokens", type=int, default=8, help="T; many tokens hide what weights take")
    parser.add_argument("--seed", type=int, default=0, help="of weights and inputs")
    parser.add_argument("--double-quant", action="store_true", help="quantize the scales too")
    options = parser.parse_args(argv)
    if not 0 < options.slots < options.layers:
        parser.error(f"--slots must be from 1 to layers - 1 = {options.layers - 1}, got {options.slots}")
    if options.hidden < 128 or options.hidden % 128:
        parser.error(f"--hidden must be a multiple of 128, got {options.hidden}")
    if options.tokens < 1:
        parser.error(f"--tokens must be positive, got {options.tokens}")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the tables; returns the exit status."""
    options = parse_arguments(argv)
    print(f"bitsandbytes {version('bitsandbytes')}, torch {version('torch')}, hf_qmoe {hf_qmoe.__version__}\n")
    exact = compare_gradients(options)
    compare_memory(options)
    print(f"\nOurs {'are exact' if exact else 'are NOT exact, or an overwritten slot raised no error'}.")
    return 0 if exact else 1


if __name__ == "__main__":
    sys.exit(main())
