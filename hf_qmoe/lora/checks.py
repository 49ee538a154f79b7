"""What an adapter's config asks of packed experts, checked before PEFT changes the model."""

import copy
from collections.abc import Iterable, Iterator

from packaging.version import InvalidVersion, Version
from peft import LoraConfig
from peft.tuners.tuners_utils import check_target_module_exists
from torch import nn

from hf_qmoe.layout import follows_experts_interface
from hf_qmoe.logging import get_logger
from hf_qmoe.lora.packed import packed_modules, packed_parameter, without_base_layer
from hf_qmoe.source_code import parameter_is_read


logger = get_logger(__name__)

#: Options of `LoraConfig` that change what LoRA computes and have no factored form on routed rows.
_UNSUPPORTED = (
    "use_dora",
    "use_qalora",
    "lora_bias",
    "fan_in_fan_out",
    "alora_invocation_tokens",
    "arrow_config",
    "velora_config",
    "kasa_config",
    "monteclora_config",
    "use_bdlora",
)

#: From this version on, PEFT's ``lora_A`` maps from in_features where experts are stored ``[E, out, in]``.
_AXES_FIXED = Version("0.19.dev0")

#: Names that experts' projections had while they were linears.
_LINEAR_NAMES = ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")


def targeted_parameters(model: nn.Module, targets: Iterable[str]) -> Iterator[tuple[str, nn.Module, str]]:
    """Packed parameters that ``target_parameters`` match: path of the module in the float model, module, name."""
    targets = list(targets)
    for path, module, names in packed_modules(model):
        float_path = without_base_layer(path)
        for name in names:
            if matches(f"{float_path}.{name}", targets):
                yield float_path, module, name


def matches(full_name: str, targets: Iterable[str]) -> bool:
    """Whether PEFT takes the parameter for one of ``target_parameters``: its whole name, or the end of it."""
    return any(full_name == target or full_name.endswith(f".{target}") for target in targets)


def check_config(config: LoraConfig, model: nn.Module) -> None:
    """Raises before anything is changed, where LoRA on packed experts would fail later or do something else.

    Raises:
        ValueError: targets that exist nowhere, packed experts that shall be trained in full, a dropout that is no
            probability, options that a factored form cannot do, an adapter whose axes an old PEFT had the wrong way
            round, or experts that are offloaded or that the model reads past an adapter.
    """
    _check_modules_to_save(config, model)
    targets = list(config.target_parameters or [])
    packed = list(targeted_parameters(model, targets))
    if not packed:
        _check_matched(config, model, targets)
        return
    if not isinstance(config.lora_dropout, float | int) or not 0.0 <= config.lora_dropout <= 1.0:
        raise ValueError(f"lora_dropout must be a probability, 0 <= p <= 1, got {config.lora_dropout!r}")
    named = f"packed experts ({packed[0][0]}.{packed[0][2]}{', ...' if len(packed) > 1 else ''})"
    used = [name for name in _UNSUPPORTED if getattr(config, name, None)]
    if used:
        raise ValueError(
            f"LoRA on {named} does not work with {', '.join(used)}; leave it out, or target linears alone with "
            "`target_modules` and no `target_parameters`"
        )
    if config.init_lora_weights not in (True, False, "gaussian"):
        raise ValueError(
            f"init_lora_weights={config.init_lora_weights!r} needs weights in full precision, which {named} do not "
            "have; use True, False or 'gaussian'"
        )
    check_axes(targets, getattr(config, "peft_version", None), model)
    for path, module, name in packed:
        _check_loaded(path, module, name)
        _check_read_by_itself(path, model, module, name)


def _check_read_by_itself(path: str, model: nn.Module, module: nn.Module, name: str) -> None:
    for parent in model.modules():
        for child, found in parent.named_children():
            if found is module and parameter_is_read(parent, child, name):
                raise ValueError(
                    f"{path}.{name} cannot be adapted: {type(parent).__name__} reads it past anything that PEFT puts "
                    "around its module (an adapter on the float model fails too). Leave it out of `target_parameters`"
                )


def _check_modules_to_save(config: LoraConfig, model: nn.Module) -> None:
    wanted = tuple(config.modules_to_save or ())
    packed = [path for path, _, _ in packed_modules(model)]
    for path, _ in model.named_modules():
        inside = [p for p in packed if wanted and path.endswith(wanted) and f"{p}.".startswith(f"{path}.")]
        if inside:
            raise ValueError(
                f"modules_to_save={sorted(wanted)} asks to train all of {path} in full, but its experts are packed "
                f"({inside[0]}{', ...' if len(inside) > 1 else ''}); adapt them with `target_parameters`, or leave "
                "them unpacked with `llm_int8_skip_modules`"
            )


def _check_matched(config: LoraConfig, model: nn.Module, targets: list[str]) -> None:
    parameters = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    if targets and not any(matches(without_base_layer(name), targets) for name in parameters):
        experts = sorted(
            {f"{without_base_layer(path)}.{n}" for path, _, names in packed_modules(model) for n in names}
        )
        raise ValueError(
            f"target_parameters={targets} match no parameter of the model, so its experts would not be adapted; "
            f"it has {', '.join(experts[:4])}{', ...' if len(experts) > 4 else ''}"
        )
    if _means_experts(config, model):
        logger.warning(
            "No packed experts are adapted: PEFT takes target_modules for linears, which the fused experts of this "
            "model are not. To adapt them, use target_parameters=hf_qmoe.lora_targets(model).experts."
        )


def _means_experts(config: LoraConfig, model: nn.Module) -> bool:
    """Whether ``target_modules`` match experts or projections of theirs by names that they had, or seem to have."""
    if not config.target_modules:
        return False
    if isinstance(config.target_modules, str) and config.target_modules.lower() == "all-linear":
        config = copy.copy(config)
        config.target_modules = ".*"
    return any(
        check_target_module_exists(config, name)
        for path, _, names in packed_modules(model)
        for experts in [without_base_layer(path)]
        for name in (experts, *(f"{experts}{i}.{n}" for i in ("", ".0") for n in (*_LINEAR_NAMES, *names)))
    )


def _check_loaded(path: str, module: nn.Module, name: str) -> None:
    parameter = packed_parameter(module, name)
    offloaded = any(hasattr(part, "_hf_hook") for part in module.modules())
    if offloaded and parameter is not None and parameter.stack.packed.is_meta:
        raise ValueError(
            f"{path}.{name} is offloaded, and PEFT would put its factors on the meta device too, without values. Add "
            "the adapter before the model is offloaded, and offload the experts modules alone"
        )


def check_axes(targets: Iterable[str], peft_version: str | None, model: nn.Module) -> None:
    """Raises `ValueError` if an adapter of `targets` is of a PEFT that had the axes of experts the wrong way round."""
    for path, module, name in targeted_parameters(model, targets):
        is_transposed = follows_experts_interface(module) and bool(module.is_transposed)
        problem = swapped_axes(peft_version, f"{path}.{name}", is_transposed)
        if problem:
            raise ValueError(problem)


def swapped_axes(peft_version: str | None, name: str, is_transposed: bool) -> str | None:
    """What is wrong with factors of the stack `name` in an adapter saved by `peft_version`; `None` if nothing is."""
    try:
        version = Version(str(peft_version).partition("@")[0])
    except InvalidVersion:
        return None
    if version >= _AXES_FIXED or is_transposed:
        return None
    return (
        f"the adapter was saved by PEFT {version}, which had in_features and out_features of {name} the wrong way "
        "round: its factors do not fit, or fit by chance and mean something else. Train it again with PEFT 0.19 or "
        "newer"
    )
