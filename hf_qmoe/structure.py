"""What looks like routed experts, told from a model's structure and config, whatever its type.

Experts that follow transformers' experts interface say so themselves (`hf_qmoe.layout`). Others are recognised by name
and shape, and large stacks that only have the shape are reported, so that nothing stays in full precision unnoticed.
"""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from hf_qmoe.layout import float_stack_shapes, follows_experts_interface, stack_names


#: Config fields by which a model says how many experts it has, at any depth of its config.
_COUNT = re.compile(r"(^|_)experts$")

#: Of these, fields that count something else than the experts of a layer.
_OTHER_COUNT = re.compile(r"(^|_)(selected|top|topk|top_k|per|active|activated|used|shared|zero|null)_")

#: A module that chooses among experts, by a component of its name.
ROUTER = re.compile(r"(^|\.)(gate|gating|\w*router\w*)(\.|$)")

#: Classes of torch whose parameters may be experts; no convolutions, recurrent layers and the like.
_MAY_HOLD_EXPERTS = (nn.Linear, nn.Bilinear, nn.Module, nn.ParameterDict, nn.ParameterList)

#: Share of a model's bytes from which weights that merely may be experts are not left in full precision.
LARGE = 0.05


def expert_counts(model: nn.Module, shared: bool = True) -> dict[str, int]:
    """Numbers of experts that the model's config declares, those above 1, by field.

    Args:
        shared: count experts that see every token too.
    """
    found: dict[str, int] = {}

    def walk(values: dict[str, Any]) -> None:
        for key, value in values.items():
            if isinstance(value, dict):
                walk(value)
            elif isinstance(value, int) and value > 1 and _is_count(str(key), shared):
                found[key] = value

    if isinstance(model, PreTrainedModel):
        walk(model.config.to_dict())
    return found


def _is_count(field: str, shared: bool) -> bool:
    is_other = _OTHER_COUNT.search(field) and not (shared and "shared" in field)
    return bool(_COUNT.search(field)) and not is_other


def looks_like_experts(name: str, module: nn.Module, counts: set[int]) -> bool:
    """Whether a module that does not follow the experts interface holds stacks of experts all the same.

    Its own last name or its class says expert, and its stacks have as many entries as it or the config says.

    Args:
        name: full name.
        counts: values of `expert_counts`.
    """
    if not _is_called_experts(name, module) or follows_experts_interface(module) or _is_torch(module):
        return False
    sizes = {shape[0] for shape in float_stack_shapes(module).values()}
    declared = {value for field, value in vars(module).items() if "expert" in field and isinstance(value, int)}
    return bool(sizes) and sizes <= counts | declared


def expert_lists(model: nn.Module) -> Iterator[tuple[str, dict[str, nn.Module]]]:
    """Lists and dicts called experts, and the experts in them by name: at least two modules of one class."""
    for path, container in model.named_modules():
        if not isinstance(container, nn.ModuleList | nn.ModuleDict):
            continue
        kinds = Counter(map(type, container.children()))
        kind, count = kinds.most_common(1)[0] if kinds else (nn.Module, 0)
        if _is_called_experts(path, container) and count >= 2:
            yield path, {name: child for name, child in container.named_children() if type(child) is kind}


@dataclass(frozen=True)
class Leftover:
    """A float weight, or those of a module, of routed experts.

    Attributes:
        name: full name of the module.
        kind: its class.
        nbytes: of its float weights.
        certain: whether it is an experts module in a known form; if not, it may also be something that comes with one.
    """

    name: str
    kind: str
    nbytes: int
    certain: bool


def leftovers(model: PreTrainedModel) -> Iterator[Leftover]:
    """Float weights of `model` that are, or look like, routed experts.

    Experts modules that say so; whatever else lies in a module called experts, in any form (linears only where there
    is a list of them); stacks with as many entries as there are experts, whatever they are called.
    """
    counts = set(expert_counts(model).values())
    called_experts = {
        path
        for path, module in model.named_modules()
        if _is_called_experts(path, module) and "shared" not in path.lower() and not follows_experts_interface(module)
    }
    listed = {f"{path}.{name}" for path, experts in expert_lists(model) for name in experts}
    routed = set(expert_counts(model, shared=False).values())
    for path, module in model.named_modules():
        kind = type(module).__name__
        floats = {n: p for n, p in module.named_parameters(recurse=False) if p.is_floating_point()}
        matrices = {n: p for n, p in floats.items() if p.ndim >= 2 and "bias" not in n}
        around = {*accumulate(path.split("."), "{}.{}".format)}  # the module's path and those of all it lies in
        inside = not around.isdisjoint(listed if isinstance(module, nn.Linear | nn.Bilinear) else called_experts)
        names: tuple[str, ...] = ()
        if follows_experts_interface(module):
            names = stack_names(bool(module.has_gate))
        elif looks_like_experts(path, module, counts):
            names = tuple(float_stack_shapes(module))
            for name in matrices.keys() - set(names):  # what is left of a module whose stacks are packed
                yield Leftover(f"{path}.{name}", kind, matrices[name].nbytes, False)
        if names:
            nbytes = sum(floats[name].nbytes for name in names if name in floats)
            if nbytes:
                yield Leftover(path, kind, nbytes, True)
            continue
        if inside and not ROUTER.search(path) and (not _is_torch(module) or type(module) in _MAY_HOLD_EXPERTS):
            nbytes = sum(p.nbytes for p in matrices.values())
        else:
            stacks = {} if _is_torch(module) else float_stack_shapes(module)
            nbytes = sum(floats[name].nbytes for name, (experts, *_) in stacks.items() if experts in routed)
        if nbytes:
            yield Leftover(path, kind, nbytes, False)


def _is_called_experts(name: str, module: nn.Module) -> bool:
    """Whether the last part of its name or its class says expert, and neither that it chooses among them."""
    own_name, kind = name.rpartition(".")[2].lower(), type(module).__name__.lower()
    return ("expert" in own_name or "expert" in kind) and not re.search(
        "router|gate(?!d)|gating", f"{own_name} {kind}"
    )


def _is_torch(module: nn.Module) -> bool:
    """Whether it is one of torch's own layers: a convolution or attention, whatever it is called."""
    return type(module).__module__.startswith("torch.")
