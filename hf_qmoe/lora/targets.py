"""Names to give PEFT's `LoraConfig`, found by looking at the model, for those who do not know its modules by heart.

Nothing here is a list of architectures. Experts are modules that follow transformers' experts interface, or are called
experts and hold 3-D weights; the rest is told by the names of modules and classes around them.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any, NamedTuple

from peft import LoraConfig
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import nn

from hf_qmoe.layout import follows_experts_interface, stack_names
from hf_qmoe.parametrize import packed_parametrizations
from hf_qmoe.source_code import weight_is_read


_ATTENTION = re.compile(r"attn|attention", re.IGNORECASE)
_MIXER = re.compile(r"mixer|mamba", re.IGNORECASE)
_FEED_FORWARD = re.compile(r"mlp|feed_?forward|ffn", re.IGNORECASE)
#: Their outputs choose, by a top-k that passes no gradient: experts, or the tokens that sparse attention looks at.
_CHOOSES = re.compile(r"router|indexer", re.IGNORECASE)


class LoraTargets(NamedTuple):
    """Names of what LoRA can adapt in a model. Every list may be empty: a model without experts has no `experts`.

    The names are as short as they can be without hitting anything else, else fully qualified. They are names of the
    model itself, without the ``base_layer`` that PEFT adds, so they also fit a model that is adapted already.
    `config_arguments` puts them into the arguments of a `LoraConfig`.

    Attributes:
        attention: for ``target_modules``: the linears of attention, linear attention and state-space mixers, in the
            layer stacks that hold experts (in all, if none does); not vision or audio towers. Without the linears
            whose weight the model's own code reads: it would compute without the adapter.
        experts: for ``target_parameters``: the stacks of the routed experts, in the order of the model.
        shared_experts: for ``target_modules``, fully qualified: linears that every token goes through beside routed
            experts.
        dense: for ``target_modules``, fully qualified: linears of MLPs without experts, in the same layer stacks.
        shared_stacks: for ``target_parameters``: shared experts that are stacks ``[E, ., .]``, not linears.
        renamed: those of the names for ``target_modules`` that the installed PEFT takes for projections of the routed
            experts in this architecture (huggingface/peft#3711): used there, they would adapt the routed experts with
            another rank.
    """

    attention: list[str]
    experts: list[str]
    shared_experts: list[str]
    dense: list[str]
    shared_stacks: list[str]
    renamed: list[str]

    def config_arguments(self, shared_experts: bool = False, dense: bool = False) -> dict[str, list[str]]:
        """``target_modules`` and ``target_parameters`` for `LoraConfig`: attention and routed experts, more if wanted.

        Linears whose name PEFT would take for the routed experts' are listed as parameters, ``<name>.weight``, which
        hits them alone; their keys in the saved adapter are the same. (Float ones then take no ``lora_dropout``.)
        """
        modules = [*self.attention, *self.shared_experts * shared_experts, *self.dense * dense]
        as_parameters = [f"{name}.weight" for name in modules if name in self.renamed]
        stacks = [*self.experts, *self.shared_stacks * shared_experts]
        return {
            "target_modules": [name for name in modules if name not in self.renamed],
            "target_parameters": stacks + as_parameters,
        }


def lora_targets(model: nn.Module) -> LoraTargets:
    """Finds the names for `LoraConfig`; the same for a float model, a packed one, and one wrapped by PEFT.

    Routers, and whatever else chooses by a top-k, are never among them, nor linears of experts that are no stacks.

    Args:
        model: a transformers model or any module; its experts may be float, `ExpertsNbit` or parametrized.
    """
    modules = dict(_base_modules(model))
    stacks = {name: found for name, module in modules.items() if (found := _stacks(name, module))}
    parts: dict[str, list[str]] = {"attention": [], "shared": [], "dense": []}
    scopes = _layer_stacks(modules, stacks)
    for name, module in modules.items():
        part = _part_of(name, modules, stacks, scopes) if isinstance(module, nn.Linear) else None
        if part is not None:
            parts[part].append(name)
    weights = [f"{name}.{stack}" if name else stack for name, found in stacks.items() for stack in found]
    shared = [name for name in weights if "share" in name.lower()]
    routed = [name for name in weights if name not in shared]
    parameters = {*weights, *(f"{name}.{p}" for name, module in modules.items() for p in _own_parameters(module))}
    attention = _short_names(parts["attention"], modules)
    named = [*attention, *parts["shared"], *parts["dense"]]
    return LoraTargets(
        attention,
        _short_names(routed, parameters, _layer_tail),
        parts["shared"],
        parts["dense"],
        _short_names(shared, parameters, _layer_tail),
        renamed_by_peft(modules[""], named),
    )


def _base_modules(module: Any, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Modules of the model as it was before PEFT wrapped it, by the names they had."""
    if not name and hasattr(module, "get_base_model"):
        module = module.get_base_model()
    while isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper):
        module = module.base_layer if isinstance(module, BaseTunerLayer) else module.original_module
    yield name, module
    for child_name, child in module.named_children():
        yield from _base_modules(child, f"{name}.{child_name}" if name else child_name)


def _own_parameters(module: nn.Module) -> list[str]:
    return [name for name, _ in module.named_parameters(recurse=False)]


def _stacks(name: str, module: nn.Module) -> list[str]:
    """Names of the experts' weights that `module` itself holds, in its order; empty if it is no experts module."""
    packed = [parameter for parameter, _, _ in packed_parametrizations(module)]
    if follows_experts_interface(module):
        expected = stack_names(bool(module.has_gate))
        declared = [parameter for parameter in _own_parameters(module) if parameter in expected]
        return declared if not packed else [p for p in expected if p in packed or p in declared]
    if not re.search("expert", f"{name}.{type(module).__name__}", re.IGNORECASE):
        return []
    own = module.named_parameters(recurse=False)
    # A parameter that DeepSpeed has partitioned is empty and keeps its shape in `ds_shape`.
    return packed + [n for n, p in own if len(getattr(p, "ds_shape", p.shape)) == 3 and p.is_floating_point()]


def _layer_stacks(modules: dict[str, nn.Module], stacks: Iterable[str]) -> list[str]:
    """Outermost `nn.ModuleList`s around experts; all outermost ones, if no module has experts."""
    lists = [name for name, module in modules.items() if isinstance(module, nn.ModuleList)]
    outermost = [name for name in lists if not any(name.startswith(f"{other}.") for other in lists)]
    return [name for name in outermost if _holds(name, stacks)] or outermost


def _holds(name: str, stacks: Iterable[str]) -> bool:
    return any(path == name or path.startswith(f"{name}.") for path in stacks)


def _part_of(name: str, modules: dict[str, nn.Module], stacks: dict[str, list[str]], scopes: list[str]) -> str | None:
    """``attention``, ``shared`` or ``dense``; `None` for a linear that is none of them and not to be adapted."""
    scope = next((scope for scope in scopes if name.startswith(f"{scope}.")), None)
    if scope is None or weight_is_read(modules[name.rpartition(".")[0]], name.rpartition(".")[2]):
        return None
    layer_depth = scope.count(".") + 2
    path = name.split(".")
    around = [".".join(path[:depth]) for depth in range(len(path) - 1, layer_depth, -1)]  # innermost first
    described = {path: f"{path.rpartition('.')[2]} {_own_class_name(modules[path])}" for path in around}
    if any(_CHOOSES.search(text) for text in (path[-1], *described.values())):
        return None
    if any(path in stacks or path.endswith(".experts") for path in around):
        return None
    for path_around in around:
        own_name, _, cls = described[path_around].partition(" ")
        parent = path_around.rpartition(".")[0]
        if re.search("share", own_name, re.IGNORECASE) and _holds(parent, stacks):
            return "shared"
        if _ATTENTION.search(own_name) or _ATTENTION.search(cls):
            return "attention"
        if _holds(path_around, stacks):
            return None
        if _FEED_FORWARD.search(own_name) or _FEED_FORWARD.search(cls):
            return "dense"
        if _MIXER.search(own_name) or _MIXER.search(cls):
            return "attention"
    return None


def _own_class_name(module: nn.Module) -> str:
    return type(module).__name__


def _layer_tail(name: str) -> Iterator[str]:
    """What follows the last number: ``mlp.experts.down_proj`` of ``model.layers.0.mlp.experts.down_proj``."""
    yield re.split(r"\.\d+\.", name)[-1]


def _last_parts(name: str) -> Iterator[str]:
    """``q_proj``, then ``self_attn.q_proj``."""
    parts = name.split(".")
    yield parts[-1]
    yield ".".join(parts[-2:])


def _short_names(
    wanted: list[str], present: Iterable[str], suffixes: Callable[[str], Iterator[str]] = _last_parts
) -> list[str]:
    """Suffixes that hit `wanted` among the names `present` and nothing else, each once; full names where none does."""
    others = set(present) - set(wanted)

    @cache
    def is_precise(suffix: str) -> bool:
        return not any(other == suffix or other.endswith(f".{suffix}") for other in others)

    return list(dict.fromkeys(next(filter(is_precise, suffixes(name)), name) for name in wanted))


def renamed_by_peft(model: nn.Module, names: list[str]) -> list[str]:
    """Those of `names` that the installed PEFT does not leave among ``target_modules`` of a config for `model`."""
    try:
        from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
    except ImportError:  # an older PEFT, which renames nothing
        return []
    renamed = []
    for name in names:
        config = LoraConfig(target_modules=[name])
        try:
            convert_peft_config_for_transformers(config, model=model, conversions=None)
        except ValueError:  # half of a fused pair of names
            renamed.append(name)
        else:
            renamed += [name] * (name not in config.target_modules)
    return renamed
