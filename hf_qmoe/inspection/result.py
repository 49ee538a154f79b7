"""`Inspection`: what is said of a checkpoint, and how it is printed."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from hf_qmoe.checkpoint import StoredTensors
from hf_qmoe.config import QUANT_METHOD
from hf_qmoe.folders import CheckpointError
from hf_qmoe.inspection.parts import ROUTED_EXPERTS
from hf_qmoe.report import Report, Serializable, size_text, text_table


#: A folder that cannot be inspected; the message is one line for a user.
InspectionError = CheckpointError


@dataclass(frozen=True)
class PartSize:
    """One kind of weights of a model.

    Attributes:
        name: the kind.
        parameters: logical weights.
        nbytes: bytes unquantized, in the dtype of the model.
        stored: bytes in the files that are there; `None` if there are none.
        bitsandbytes: bytes as loaded with ``BitsAndBytesConfig(load_in_4bit=True)``.
        packed: bytes as loaded with the config; `None` if it does not suit the model.
    """

    name: str
    parameters: int
    nbytes: int
    stored: int | None
    bitsandbytes: int
    packed: int | None


@dataclass(frozen=True)
class Size:
    """What the whole model takes in one way of loading it.

    Attributes:
        name: that way.
        quant_type: format of the experts; `None` if this package packs none.
        blocksize: the one asked for; `None` where there are no scales.
        double_quant: whether the experts' scales are quantized too.
        nbytes: bytes of all weights, scales and buffers; `None` if the model cannot be loaded so.
        experts: bytes of the routed experts among them.
        experts_float: bytes of those that are not packed (biases never are).
        problem: why it cannot be loaded so, or empty.
    """

    name: str
    quant_type: str | None = None
    blocksize: int | None = None
    double_quant: bool = False
    nbytes: int | None = None
    experts: int | None = None
    experts_float: int | None = None
    problem: str = ""

    def left(self, memory: int) -> int | None:
        """Bytes of `memory` that the weights leave, negative if they do not fit; `None` if it cannot be loaded so."""
        return None if self.nbytes is None else memory - self.nbytes


@dataclass(frozen=True)
class Inspection(Serializable):
    """What `inspect_checkpoint` found; prints as tables.

    Attributes:
        path: the folder.
        model_class: class of the model.
        model_type: as in ``config.json``.
        dtype: dtype of its float weights.
        quantized_by: method that the checkpoint is quantized with already, or `None`.
        stored: headers of the safetensors files; `None` if there are none.
        parts: the model by kind of weights.
        unquantized: size of the float model.
        bitsandbytes: size by ``BitsAndBytesConfig(load_in_4bit=True)``.
        packed: size with the config.
        formats: sizes in all formats of experts, the config otherwise the same; empty where there are no routed
            experts, or they are packed already.
        report: what `hf_qmoe.report` will say of the model loaded with the config; `None` if it does not suit it.
        memory: bytes available, or `None`.
    """

    path: str
    model_class: str
    model_type: str
    dtype: str
    quantized_by: str | None
    stored: StoredTensors | None
    parts: list[PartSize]
    unquantized: Size
    bitsandbytes: Size
    packed: Size
    formats: list[Size]
    report: Report | None
    memory: int | None = None

    @property
    def parameters(self) -> int:
        """Logical weights of the model."""
        return sum(part.parameters for part in self.parts)

    @property
    def has_experts(self) -> bool:
        """Whether the model has routed experts."""
        return any(part.name == ROUTED_EXPERTS and part.parameters for part in self.parts)

    @property
    def sizes(self) -> list[Size]:
        """All ways of loading that were counted, each once."""
        return [self.unquantized, self.bitsandbytes, *(self.formats or [self.packed])]

    def to_dict(self) -> dict[str, Any]:
        """JSON types; sizes in bytes. Entries of ``sizes`` have ``fits`` and ``left`` if memory was given."""
        sizes = [asdict(size) for size in self.sizes]
        if self.memory is not None:
            for entry, size in zip(sizes, self.sizes, strict=True):
                left = size.left(self.memory)
                entry |= {"fits": None if left is None else left >= 0, "left": left}
        facts = ("path", "model_class", "model_type", "dtype", "parameters", "quantized_by", "memory")
        return {
            **{name: getattr(self, name) for name in facts},
            "stored": None if self.stored is None else self.stored.to_dict(),
            "parts": [asdict(part) for part in self.parts],
            "packed": asdict(self.packed),
            "sizes": sizes,
        }

    def __str__(self) -> str:
        sections = (self._stored_lines(), self._part_lines(), self._size_lines(), self._closing_lines())
        return "\n\n".join("\n".join(lines) for lines in sections)

    def _stored_lines(self) -> Iterator[str]:
        yield f"{self.model_class} ({self.model_type}), {self.parameters:,} weights, {self.dtype}"
        if self.stored is None:
            yield "no safetensors files: only config.json was read"
        else:
            dtypes = ", ".join(f"{dtype} {size_text(nbytes)}" for dtype, nbytes in self.stored.dtypes.items())
            yield f"safetensors files: {len(self.stored.files)}, tensors: {len(self.stored.tensors):,} ({dtypes})"
            if missing := self.stored.missing:
                listed = f"{', '.join(missing[:4])}{', ...' if missing[4:] else ''}"
                yield f"MISSING files: {len(missing)} ({listed}); what is stored is only what is there"
        if self.quantized_by == QUANT_METHOD:
            yield "packed by hf_qmoe already; for other formats start from the float checkpoint"
        elif self.quantized_by is not None:
            yield f"quantized already: {self.quantized_by}; sizes in memory are of the {self.dtype} model"

    def _part_lines(self) -> list[str]:
        columns = {"weights": "parameters", "stored": "stored", self.dtype: "nbytes", "bitsandbytes": "bitsandbytes"}
        columns[self.packed.name] = "packed"
        if self.stored is None:
            del columns["stored"]
        if self.packed.nbytes is None:
            del columns[self.packed.name]
        rows = [["", *columns]]
        entries = [(part.name, vars(part)) for part in self.parts]
        total = {column: sum(values[column] for _, values in entries) for column in columns.values()}
        for name, values in [*entries, ("total", total)]:
            weights, *sizes = (values[column] for column in columns.values())
            rows.append([name, f"{weights:,}", *map(size_text, sizes)])
        return text_table(rows, "<" + ">" * len(columns))

    def _size_lines(self) -> list[str]:
        memory = self.memory
        rows = [["loaded as", "bytes", "", "routed experts", "not packed"]]
        if memory is not None:
            rows[0].append(f"in {size_text(memory)}")
        for size in self.sizes:
            row = [size.name, "impossible", "", "", ""]
            if size.nbytes is not None:
                row = [size.name, f"{size.nbytes:,}", size_text(size.nbytes)]
                row += [size_text(count) if count else "-" for count in (size.experts, size.experts_float)]
            if memory is not None:
                row.append(_verdict(size.left(memory)))
            rows.append(row)
        return text_table(rows, "<>>>><"[: len(rows[0])])

    def _closing_lines(self) -> Iterator[str]:
        left_alone, loaded = self.bitsandbytes.experts_float, self.bitsandbytes.nbytes
        if not self.has_experts:
            yield "The model has no routed experts."
        elif left_alone and loaded:
            left = f"{size_text(left_alone)} of routed experts in {self.dtype}"
            yield f"bitsandbytes leaves {left}, {left_alone / loaded:.1%} of what it loads."
        problems = dict.fromkeys(size.problem for size in self.sizes if size.problem)
        for problem in problems:
            names = ", ".join(size.name for size in self.sizes if size.problem == problem)
            yield f"Impossible as {names}: {problem}"
        yield "Weights only: activations, KV cache, LoRA adapters, gradients and optimizer states come on top."


def _verdict(left: int | None) -> str:
    if left is None:
        return ""
    return f"fits, {size_text(left)} left" if left >= 0 else f"does not fit, {size_text(-left)} too much"
