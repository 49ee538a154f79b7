"""The kinds of weights that a model is made of, for a reader: routed experts, router, linears, embeddings, others."""

import re
from collections import Counter
from collections.abc import Iterator

from bitsandbytes.nn import Linear4bit
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.pytorch_utils import Conv1D

from hf_qmoe.config import QMoEConfig
from hf_qmoe.memory import quant_state_tensors
from hf_qmoe.selection import experts_modules, linears_to_skip


ROUTED_EXPERTS = "routed experts"
ROUTER = "router"
LINEARS = "linears, shared experts"
EMBEDDINGS = "embeddings, head"
OTHERS = "norms, others"
#: Stored tensors that have no place in the model.
UNUSED = "not in the model"
PARTS = (ROUTED_EXPERTS, ROUTER, LINEARS, EMBEDDINGS, OTHERS)


class ModelParts:
    """Which kind of weights each module of a float model holds.

    The answers hold for the same model with packed experts and linears too: its modules have the same names.

    Args:
        model: on any device.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._experts = set(experts_modules(model, "auto"))
        self._blocks = {path.rpartition(".")[0] for path in self._experts}
        self._skipped = set(linears_to_skip(model, QMoEConfig()))
        ends = (_embeddings(model, "get_input_embeddings"), _embeddings(model, "get_output_embeddings"))
        self._embeddings = {id(module) for module in ends if module is not None}
        self._part_of: dict[str, str] = {}
        # What lies below one of these, in a packed model or on disk, is part of it.
        self._closed = set(self._experts)
        for path, module in model.named_modules():
            if next(_tensors(module), None) is not None:
                self._part_of[path] = self._kind(path, module)
            if not any(module.children()):
                self._closed.add(path)

    def _kind(self, path: str, module: nn.Module) -> str:
        names = path.split(".")
        above = {".".join(names[:end]) for end in range(1, len(names) + 1)}
        if above & self._experts or "experts" in names:
            return ROUTED_EXPERTS
        if any(self._routes(path.removeprefix(block), path, module) for block in above & self._blocks):
            return ROUTER
        if isinstance(module, nn.Embedding) or id(module) in self._embeddings:
            return EMBEDDINGS
        if "router" in type(module).__name__.lower():
            return ROUTER
        return LINEARS if isinstance(module, nn.Linear | Conv1D) else OTHERS

    def _routes(self, name: str, path: str, module: nn.Module) -> bool:
        """Whether a module called `name` beside experts is their router, or part of it."""
        called_so = re.search(r"[._](gate|router)(\.|$)", name) is not None
        return called_so and (not isinstance(module, nn.Linear) or path in self._skipped)

    def of_module(self, path: str) -> str | None:
        """Kind of the weights of the module `path`, which may lie inside a module of the float model."""
        is_own = True
        while path not in self._part_of or not (is_own or path in self._closed):
            path, _, _ = path.rpartition(".")
            is_own = False
            if not path:
                return None
        return self._part_of[path]

    def parameters(self) -> Counter[str]:
        """Weights by kind, each counted once."""
        modules = self._model.named_modules()
        return self._count((path, p, p.numel()) for path, m in modules for p in m.parameters(recurse=False))

    def nbytes(self, model: nn.Module) -> Counter[str]:
        """Bytes by kind of what `model` holds, packed or not: parameters, scales and buffers, each counted once."""
        return self._count((path, t, t.nbytes) for path, m in model.named_modules() for t in _tensors(m))

    def _count(self, tensors: Iterator[tuple[str, Tensor, int]]) -> Counter[str]:
        counts: Counter[str] = Counter()
        seen: set[int] = set()
        for path, tensor, size in tensors:
            if id(tensor) not in seen:
                counts[self.of_module(path) or OTHERS] += size
                seen.add(id(tensor))
        return counts

    def stored(self, nbytes: dict[str, int]) -> Counter[str]:
        """Bytes by kind of a checkpoint's tensors.

        Args:
            nbytes: of each tensor, by its name on disk.
        """
        conversions = get_model_conversion_mapping(self._model)
        renamings = [c for c in conversions if isinstance(c, WeightRenaming)]
        converters = [c for c in conversions if isinstance(c, WeightConverter)]
        state, prefix = self._model.state_dict(), self._model.base_model_prefix
        counts: Counter[str] = Counter()
        for name, size in nbytes.items():
            renamed, _ = rename_source_key(name, renamings, converters, prefix, state)
            candidates = (self.of_module(n.rpartition(".")[0]) for n in (renamed, name, f"{prefix}.{name}"))
            counts[next((part for part in candidates if part is not None), UNUSED)] += size
        return counts


def _embeddings(model: PreTrainedModel, getter: str) -> nn.Module | None:
    try:
        module: nn.Module | None = getattr(model, getter)()
    except (NotImplementedError, AttributeError):  # a backbone has none
        return None
    return module


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters(recurse=False)
    yield from module.buffers(recurse=False)
    if isinstance(module, Linear4bit):
        yield from quant_state_tensors(module)
