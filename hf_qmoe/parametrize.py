"""The parametrized form: packed storage for any parameter of any module, with a forward that knows nothing of it.

`parametrize_experts` packs a float parameter and puts a torch parametrization over the bytes: reading the attribute
gives a `LazyWeight`, which is unpacked by the operation that uses it. For experts that follow transformers' experts
interface `ExpertsNbit` is faster; this form is for all the others.

Nothing global is involved. bitsandbytes' own parametrization dequantizes at each access and switches torch's
parametrize cache on around each forward; where its hooks are skipped or run once too often, the cache stays on or its
counter goes negative. Here the cache is not used at all, not even one that somebody else has left on.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from bitsandbytes.functional import QuantState
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils._pytree import tree_map_only

from hf_qmoe import metadata
from hf_qmoe.autocast import autocast_dtype
from hf_qmoe.lazy_weight import lazy_weight
from hf_qmoe.lora_weight import Term, lora_weight
from hf_qmoe.offload import stop_unloading, unload_when_interrupted
from hf_qmoe.ops.formats import codebook, decompress_absmax
from hf_qmoe.packed import PackedStack
from hf_qmoe.packed_module import SUFFIXES, as_stored, as_used


#: Tensors of a `PackedStack` beside its bytes.
_SCALES = tuple(field for field in SUFFIXES if field != "packed")


class PackedParametrization(nn.Module):
    """From packed bytes to the weight. Holds the scales of one parameter, as integers that no cast touches.

    Args:
        stack: the packed weight; its bytes are the parametrization's ``original``, its scales are kept here.
        shape: of the float parameter, ``[E, N, K]``, ``[E, K, N]`` if `transposed`, or ``[N, K]``.
        dtype: of the weight as the module's forward sees it.
        transposed: the float parameter is ``[E, K, N]``.
        fixed_dtype: `dtype` stays when the module is cast; the module's input is cast to it and its output back.
    """

    def __init__(
        self, stack: PackedStack, shape: tuple[int, ...], dtype: torch.dtype, transposed: bool, fixed_dtype: bool
    ) -> None:
        super().__init__()
        for field in _SCALES:
            tensor = getattr(stack, field)
            stored = None if tensor is None else nn.Parameter(as_stored(tensor), requires_grad=False)
            self.register_parameter(field, stored)
        self.quant_type, self.shape, self.dtype = stack.quant_type, tuple(shape), dtype
        self.transposed, self.fixed_dtype = transposed, fixed_dtype

    def stack(self, packed: Tensor) -> PackedStack:
        """The weight as one value."""
        stored = {field: getattr(self, field) for field in _SCALES}
        scales: dict[str, Any] = {field: None if t is None else as_used(t) for field, t in stored.items()}
        return PackedStack(packed=packed, quant_type=self.quant_type, **scales)

    def forward(self, packed: Tensor) -> Tensor:
        """The weight, as a `LazyWeight` (while torch.compile traces, as an ordinary tensor)."""
        if torch.compiler.is_compiling():
            values = self.stack(packed).dequantize(self.dtype)
            return values.transpose(1, 2) if self.transposed else values.view(self.shape)
        return lazy_weight(self.stack(packed), self.dtype, self.shape, self.transposed)

    def right_inverse(self, value: Tensor) -> Tensor:
        """Raises `NotImplementedError`: a packed parameter cannot be assigned to."""
        raise NotImplementedError(
            "a packed parameter cannot be assigned to: remove its parametrization with "
            "`hf_qmoe.parametrize.restore_parameter`, assign, and pack it again"
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "PackedParametrization":
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if not self.fixed_dtype:  # `.half()` and the like cast float parameters; the weight stands for one
            self.dtype = fn(torch.empty(0, dtype=self.dtype)).dtype
        return self

    def extra_repr(self) -> str:
        """Shape, dtype and format, as they print in the model."""
        return f"{list(self.shape)}, {self.dtype}, quant_type={self.quant_type}"


def parametrize_experts(
    module: nn.Module,
    name: str,
    quant_type: str = "nf4",
    blocksize: int = 64,
    double_quant: bool = False,
    *,
    compute_dtype: torch.dtype | None = None,
) -> None:
    """Packs a float parameter of `module`, in place.

    Reading ``module.<name>`` gives the dequantized weight from then on, unpacked by the operation that uses it, with
    exact gradients to everything else. The packed weight is frozen; modules that share it keep the float one. The
    state dict has torch's names for parametrized tensors; ``save_pretrained`` knows only those of a `QMoEConfig`.

    Args:
        module: any module.
        name: of its parameter ``[E, N, K]``, packed one ``[N, K]`` at a time, or ``[N, K]``.
        quant_type: nf4, fp4, int8, fp8, bf16, fp16.
        blocksize: weights per scale; blocks run along the last dimension. Where it does not divide ``N * K``, the
            largest supported smaller one that does is taken.
        double_quant: quantize the scales too.
        compute_dtype: dtype of the weight. `None` is the parameter's, and follows casts of the module. If given, it is
            fixed, and forward casts its first float tensor argument to it and its results back (not under autocast).

    Raises:
        AttributeError: `module` has no such attribute.
        TypeError: it is not a float `nn.Parameter`, or is parametrized already.
        ValueError: a shape or block size that the format cannot hold, or weights that are not finite; `module` is
            unchanged.
    """
    weight = _parameter(module, name)
    if not weight.is_floating_point():
        raise TypeError(f"{name} is {weight.dtype}, not a float parameter; is it packed already?")
    if weight.ndim not in (2, 3) or not weight.numel():
        raise ValueError(
            f"{name} has shape {tuple(weight.shape)}; only a matrix [N, K] or a stack [E, N, K] that is not empty can "
            "be packed"
        )
    matrices = weight.detach() if weight.ndim == 3 else weight.detach()[None]
    if weight.is_meta:
        experts, rows, columns = matrices.shape
        stack = PackedStack.empty(experts, rows, columns, quant_type, blocksize, double_quant, "meta")
    else:
        stack = PackedStack.from_float(matrices, quant_type, blocksize, double_quant)
    attach_stack(module, name, stack, tuple(weight.shape), compute_dtype or weight.dtype, compute_dtype is not None)


def parametrize_experts_prequantized(
    module: nn.Module,
    name: str,
    quant_state: QuantState | Mapping[str, Any],
    device: torch.device | str | None = None,
    *,
    compute_dtype: torch.dtype | None = None,
) -> None:
    """As `parametrize_experts`, for a parameter that holds bytes packed by bitsandbytes, in place.

    Args:
        module: any module.
        name: of its parameter with the bytes that ``quantize_4bit`` or ``quantize_blockwise`` gave; they are kept.
        quant_state: bitsandbytes' state for them, or its dict (``as_dict``), for a matrix ``[N, K]`` or a stack
            ``[E, N, K]`` quantized as one tensor. Nested scales are decompressed to fp32, the values stay the same.
        device: where a dict's tensors are put; by default, where the parameter is.
        compute_dtype: as in `parametrize_experts`; `None` is the dtype of the state.

    Raises:
        AttributeError: `module` has no such attribute.
        TypeError: it is not an `nn.Parameter`, or is parametrized already.
        ValueError: bytes and state do not belong together, or the state is of no format that is known here.
    """
    packed = _parameter(module, name)
    if isinstance(quant_state, Mapping):
        quant_state = QuantState.from_dict(dict(quant_state), device=torch.device(device or packed.device))
    shape, quant_type = tuple(quant_state.shape or packed.shape), _quant_type(quant_state)
    if len(shape) not in (2, 3):
        raise ValueError(f"the quant_state of {name} is for shape {shape}, not a matrix [N, K] or a stack [E, N, K]")
    absmax = quant_state.absmax
    if quant_state.nested:
        nested = quant_state.state2
        absmax = decompress_absmax(absmax, nested.absmax, quant_state.offset, nested.code)
    experts, rows, columns = (1, *shape)[-3:]
    bits = 4 if quant_type in ("nf4", "fp4") else 8
    if experts * rows * columns % quant_state.blocksize:
        raise ValueError(
            f"the last block of {name} is not full: {shape} is no multiple of blocks of {quant_state.blocksize}; "
            "dequantize it and pack it with `parametrize_experts`"
        )
    if packed.nbytes * 8 != experts * rows * columns * bits or absmax.numel() * quant_state.blocksize * bits != (
        packed.nbytes * 8
    ):
        raise ValueError(
            f"{name} has {packed.nbytes} bytes and {absmax.numel()} scales for blocks of {quant_state.blocksize}, "
            f"which is not what {quant_type} takes for {shape}"
        )
    if rows * columns % quant_state.blocksize or columns * bits % 8:  # blocks run on from expert to expert
        experts, rows = 1, experts * rows
        if columns * bits % 8:
            rows, columns = 1, rows * columns
    per_row = columns % quant_state.blocksize == 0
    scales = (rows, columns // quant_state.blocksize) if per_row else (rows * columns // quant_state.blocksize,)
    stack = PackedStack(
        packed.detach().contiguous().view(-1).view(torch.uint8).view(experts, rows, columns * bits // 8),
        absmax.to(torch.float32).reshape(experts, *scales),
        None,
        None,
        quant_type,
    )
    dtype = compute_dtype or quant_state.dtype or torch.float32
    attach_stack(module, name, stack, shape, dtype, compute_dtype is not None)


def _parameter(module: nn.Module, name: str) -> nn.Parameter:
    if parametrize.is_parametrized(module, name):
        raise TypeError(f"{name} of {type(module).__name__} is parametrized already")
    if not hasattr(module, name):
        own = ", ".join(name for name, _ in module.named_parameters(recurse=False))
        raise AttributeError(f"{type(module).__name__} has no parameter {name!r}; it has {own or 'none'}")
    parameter = getattr(module, name)
    if hasattr(module, "quant_metadata") and not any(True for _ in packed_parametrizations(module)):
        raise ValueError(
            f"{type(module).__name__} has a quant_metadata of its own; that name is needed for packed weights"
        )
    if not isinstance(parameter, nn.Parameter):
        raise TypeError(f"{name} of {type(module).__name__} is {type(parameter).__name__}, not an nn.Parameter")
    return parameter


def _quant_type(state: QuantState) -> str:
    if state.quant_type in ("nf4", "fp4"):
        return str(state.quant_type)
    if isinstance(state.code, Tensor):
        for name in ("int8", "fp8"):
            table = codebook(name, state.code.device)
            if state.code.shape == table.shape and torch.equal(state.code.to(table.dtype), table):
                return name
    raise ValueError(
        f"a quant_state of type {state.quant_type!r} with this codebook is none of nf4, fp4, int8 (the dynamic map) "
        "and fp8 (e4m3)"
    )


def attach_stack(
    module: nn.Module,
    name: str,
    stack: PackedStack,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    fixed_dtype: bool,
    transposed: bool = False,
) -> None:
    """Puts a packed weight in the place of the parameter `name`; arguments as for `PackedParametrization`."""
    parametrization = PackedParametrization(stack, shape, dtype, transposed, fixed_dtype)
    module.__dict__.setdefault(_ORDER, list(module._parameters))
    delattr(module, name)
    module.register_parameter(name, nn.Parameter(stack.packed, requires_grad=False))
    parametrize.register_parametrization(module, name, parametrization, unsafe=True)
    _adapt_class(module, name)
    _describe(module)
    unload_when_interrupted(module)  # its other parameters; packed ones are loaded by their parametrization
    module._is_hf_initialized = True  # type: ignore[assignment]  # or transformers draws numbers into the weight


def packed_parametrizations(module: nn.Module) -> Iterator[tuple[str, PackedParametrization, nn.Parameter]]:
    """Name, parametrization and packed bytes of each parameter of `module` itself that is packed in this form."""
    if parametrize.is_parametrized(module):
        chains: Any = module.parametrizations
        for name, chain in chains.items():
            if isinstance(chain, parametrize.ParametrizationList) and isinstance(chain[0], PackedParametrization):
                yield name, chain[0], chain.original  # type: ignore[misc]


@dataclass
class _Adapted:
    """Terms for one parameter in one forward, and the weight with them once it was read.

    One weight for all reads: it splits its factors into experts once, while each split has gradients of full size.
    """

    terms: Sequence[Term]
    weight: Tensor | None = None


#: What is to be added to packed weights, by module and name, within `lora_terms`.
_ADAPTED: ContextVar[Mapping[tuple[int, str], _Adapted]] = ContextVar("hf_qmoe_adapted", default={})  # noqa: B039

#: Attribute of modules that have been adapted: reading the others' weights never asks for a context variable, which
#: torch.compile cannot trace.
_MARK = "_qmoe_adapted"

#: Attribute of parametrized modules: the order that their parameters had.
_ORDER = "_qmoe_parameter_order"


@contextmanager
def lora_terms(module: nn.Module, name: str, terms: Sequence[Term]) -> Iterator[None]:
    """Within it, reading the packed parameter `name` of `module` gives its weight with `terms` added.

    In this thread, and undone however the forward ends: by an error, or early by checkpointing.
    """
    module.__dict__[_MARK] = True
    token = _ADAPTED.set({**_ADAPTED.get(), (id(module), name): _Adapted(terms)})
    try:
        yield
    finally:
        _ADAPTED.reset(token)


def restore_parameter(module: nn.Module, name: str, dtype: torch.dtype | None = None) -> None:
    """Undoes `parametrize_experts`: a float parameter with the dequantized values, `dtype` or that of the weight.

    Raises:
        ValueError: the parameter is not packed in this form, or has further parametrizations on it (adapters).
    """
    found = {n: (p, packed) for n, p, packed in packed_parametrizations(module)}
    if name not in found:
        raise ValueError(f"{name} of {type(module).__name__} is not a packed, parametrized parameter")
    if len(module.parametrizations[name]) > 1:  # type: ignore[index]
        raise ValueError(f"{name} has further parametrizations on its packed weight; remove or merge them first")
    parametrization, packed = found[name]
    values = parametrization.stack(packed).dequantize(dtype or parametrization.dtype)
    values = values.transpose(1, 2).contiguous() if parametrization.transposed else values.view(parametrization.shape)
    parametrize.remove_parametrizations(module, name, leave_parametrized=False)
    setattr(module, name, nn.Parameter(values))
    for own_name in declared_order(module):
        if own_name in module._parameters:
            module._parameters[own_name] = module._parameters.pop(own_name)
    _describe(module)


def declared_order(module: nn.Module) -> list[str]:
    """Names of a module's own parameters, in the order of the float module: PEFT nests and draws numbers by it."""
    order: list[str] = module.__dict__.get(_ORDER, [])
    return [*order, *(name for name in module._parameters if name not in order)]


# -- the module's class ---------------------------------------------------------------------------------------------


def _adapt_class(module: nn.Module, name: str) -> None:
    """Changes the class that torch has made for this one module: reading, pickling, casting."""
    cls: Any = type(module)
    stock = cls.__dict__[name]

    def read(self: Any) -> Tensor:
        chain = self.parametrizations[name]
        if any(type(p).__module__.startswith("peft.") for p in (chain, *chain.modules())):
            raise RuntimeError(
                f"PEFT put LoRA on the packed {name} of {type(self).__bases__[0].__name__} as a parametrization. Its "
                "factors would get wrong gradients, or none. `import hf_qmoe` before the adapter is made, and use a "
                "`LoraConfig`."
            )
        # Never through torch's global cache, which would hand out the weight as it was when somebody switched it on.
        # With other parametrizations behind ours (adapters), caching is theirs to ask for.
        weight: Tensor = chain() if len(chain) == 1 else stock.fget(self)
        adapted = _ADAPTED.get().get((id(self), name)) if _MARK in self.__dict__ else None
        if adapted is None:
            return weight
        if adapted.weight is None:
            adapted.weight = lora_weight(weight, adapted.terms)
        return adapted.weight

    setattr(cls, name, property(read, stock.fset))
    cls.__reduce_ex__, cls.__deepcopy__ = _reduce, _deepcopy
    cls.forward = _casting(cls.__bases__[0].forward)


def _casting(forward: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(forward)
    def cast_in_and_out(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        dtype = next((p.dtype for _, p, _ in packed_parametrizations(self) if p.fixed_dtype), None)
        inputs = (a for a in (*args, *kwargs.values()) if isinstance(a, Tensor) and a.is_floating_point())
        x = next(inputs, None)
        if x is None or dtype in (None, x.dtype) or autocast_dtype(x.device.type):
            return forward(self, *args, **kwargs)
        cast = [x.to(dtype) if a is x else a for a in args]
        out = forward(self, *cast, **{k: x.to(dtype) if a is x else a for k, a in kwargs.items()})
        return tree_map_only(Tensor, lambda t: t.to(x.dtype) if t.dtype == dtype else t, out)

    return cast_in_and_out


def _parts(module: nn.Module) -> tuple[type[nn.Module], dict[str, Any], dict[str, Any]]:
    """The module's own class, its state without parametrizations, and those."""
    own = module.__dict__.copy()
    own["_modules"] = {name: child for name, child in module._modules.items() if name != "parametrizations"}
    chains: Any = module.parametrizations
    return type(module).__bases__[0], own, dict(chains.items())


def _reduce(module: nn.Module, protocol: Any) -> Any:
    return _assemble, _parts(module)


def _deepcopy(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    # torch's own way would give copies one class, whose property goes from all when one is restored.
    cls, own, chains = _parts(module)
    copied = memo[id(module)] = cls.__new__(cls)
    return _fill(copied, copy.deepcopy(own, memo), copy.deepcopy(chains, memo))


def _assemble(cls: type[nn.Module], own: dict[str, Any], chains: dict[str, Any]) -> nn.Module:
    return _fill(cls.__new__(cls), own, chains)


def _fill(module: nn.Module, own: dict[str, Any], chains: dict[str, Any]) -> nn.Module:
    module.__dict__.update(own)
    for name, chain in chains.items():
        module.register_parameter(name, chain.original)
        for parametrization in chain:
            parametrize.register_parametrization(module, name, parametrization, unsafe=True)
        if isinstance(chain[0], PackedParametrization):
            _adapt_class(module, name)
    return module


# -- the module's state ---------------------------------------------------------------------------------------------


def _describe(module: nn.Module) -> None:
    """Brings the module's ``quant_metadata``, and the check that reads it, up to date."""
    found = list(packed_parametrizations(module))
    if not found:
        module._buffers.pop("quant_metadata", None)
        stop_unloading(module)
        hooks = module._load_state_dict_pre_hooks
        for key in [key for key, hook in hooks.items() if getattr(hook, "hook", None) is _check_state_dict]:
            del hooks[key]
        return
    stacks = {name: parametrization.stack(packed) for name, parametrization, packed in found}
    encoded = metadata.encode(metadata.describe(stacks)).to(found[0][2].device)
    if "quant_metadata" not in module._buffers:
        module.register_load_state_dict_pre_hook(_check_state_dict)
    module.register_buffer("quant_metadata", encoded)


def _check_state_dict(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata_: Any, strict: bool, *messages: list[str]
) -> None:
    """Keeps tensors of another format out: copied into this module's, they would give wrong weights in silence."""
    own = f"{prefix}parametrizations."
    problems = []
    stored = state_dict.get(f"{prefix}quant_metadata")
    found = list(packed_parametrizations(module))
    if isinstance(stored, Tensor) and found:
        # Not what the buffer says: a refused load may have written to it.
        own_description = metadata.describe({name: p.stack(packed) for name, p, packed in found})
        problems.append(metadata.problem(stored, own_description))
    for name, parametrization, packed in found:
        tensors = {"original": packed, **{f"0.{k}": t for k, t in parametrization.named_parameters(recurse=False)}}
        for key, tensor in tensors.items():
            value = state_dict.get(f"{own}{name}.{key}")
            if not isinstance(value, Tensor):
                continue
            value = state_dict[f"{own}{name}.{key}"] = as_stored(value) if key != "original" else value
            if (value.dtype, value.shape) != (tensor.dtype, tensor.shape):
                is_now, expected = (f"{t.dtype} {tuple(t.shape)}" for t in (value, tensor))
                problems.append(f"{name}.{key} is {is_now}, expected {expected}")
    problem = next(filter(None, problems), None)
    if problem:
        messages[-1].append(f"{prefix.rstrip('.') or type(module).__name__}: {problem}")
        for key in [k for k in state_dict if k.startswith(own) or k == f"{prefix}quant_metadata"]:
            del state_dict[key]
