"""`QMoEConfig`: what a user asks for, checked when it is made."""

import copy
from typing import Any

import torch
from transformers import BitsAndBytesConfig

from hf_qmoe.naming import check_pattern
from hf_qmoe.ops.formats import BLOCKSIZES_4BIT, check_blocksize, get_format


QUANT_METHOD = "qmoe"

#: Values of ``experts_module``.
EXPERTS_MODULES = ("auto", "nbit", "parametrize")

#: Fields that `to_dict` writes, in this order, besides ``quant_method``.
_FIELDS = (
    "experts_quant_type",
    "experts_blocksize",
    "experts_double_quant",
    "experts_module",
    "experts_exact",
    "experts_overrides",
    "quantize_linears",
    "modules_to_not_convert",
    "bnb_4bit_quant_type",
    "bnb_4bit_compute_dtype",
    "bnb_4bit_use_double_quant",
    "bnb_4bit_quant_storage",
    "llm_int8_skip_modules",
    "llm_int8_enable_fp32_cpu_offload",
)


class QMoEConfig(BitsAndBytesConfig):
    """Quantization of a Mixture-of-Experts model: experts as packed stacks, linears as bitsandbytes does them.

    Args:
        experts_quant_type: format of the routed experts: nf4, fp4, int8, fp8, bf16 or fp16.
        experts_blocksize: weights per scale (32 for the 4-bit formats only, 64, 128, ... 4096). Where it does not
            divide an expert, the largest smaller one that does is used.
        experts_double_quant: quantize the scales too (0.4 bit less per weight at block size 64).
        experts_module: how packed experts compute. ``nbit`` replaces them by `ExpertsNbit`, ``parametrize`` keeps
            their own forward and parametrizes their weights (slower, any forward), ``auto`` takes the first for
            modules that follow transformers' experts interface, the second for others. What is saved is the same.
        experts_exact: which products of experts must be those of dequantizing and ``F.linear``, bit for bit. `None`:
            all in training; where no gradient is asked for, kernels may be used that are faster and at most 1.1 times
            as far from exact arithmetic. `True`: always. `False`: none, in training neither. On a loaded model, set
            ``exact`` of its `ExpertsNbit` modules.
        experts_overrides: other formats for some experts modules, ``{pattern: quant_type}``, first match counts, for
            example ``{"layers.0.mlp.experts": "int8"}``. A pattern that matches no experts module is an error.
        quantize_linears: replace ``nn.Linear`` by bitsandbytes' ``Linear4bit``; if false, only experts are packed.
        modules_to_not_convert: patterns of modules to leave as they are, experts or linears, in addition to what is
            left out by default (output head, routers, what the model keeps in float32). A pattern is a name, or any
            run of its dot-separated components, or a regular expression for one: ``layers.0.mlp.experts``. PEFT's
            `prepare_model_for_kbit_training` makes them float32; ``experts_overrides`` with bf16 avoids that.
        bnb_4bit_quant_type: format of the linears, nf4 (default) or fp4.
        bnb_4bit_compute_dtype: dtype of all products, experts too; `None` (default) is the dtype of the model.
        bnb_4bit_use_double_quant: quantize the scales of the linears too.
        bnb_4bit_quant_storage: dtype in which bitsandbytes stores the linears' bytes.
        llm_int8_skip_modules: as in `BitsAndBytesConfig`: replaces bitsandbytes' default list of linears to skip.
        llm_int8_enable_fp32_cpu_offload: as in `BitsAndBytesConfig`: leave linears on CPU or disk unquantized.

    Raises:
        TypeError: a field of the wrong type.
        ValueError: an unknown field, or a value outside what is allowed.
    """

    def __init__(
        self,
        experts_quant_type: str = "nf4",
        experts_blocksize: int = 64,
        experts_double_quant: bool = False,
        experts_module: str = "auto",
        experts_exact: bool | None = None,
        experts_overrides: dict[str, str] | None = None,
        quantize_linears: bool = True,
        modules_to_not_convert: list[str] | None = None,
        bnb_4bit_quant_type: str = "nf4",
        bnb_4bit_compute_dtype: torch.dtype | str | None = None,
        bnb_4bit_use_double_quant: bool = False,
        bnb_4bit_quant_storage: torch.dtype | str | None = None,
        llm_int8_skip_modules: list[str] | None = None,
        llm_int8_enable_fp32_cpu_offload: bool = False,
        **unknown: Any,
    ) -> None:
        _refuse_unknown(unknown)
        self.experts_quant_type = experts_quant_type
        self.experts_blocksize = experts_blocksize
        self.experts_double_quant = experts_double_quant
        self.experts_module = experts_module
        self.experts_exact = experts_exact
        self.experts_overrides = copy.copy(experts_overrides)
        self.quantize_linears = quantize_linears
        self.modules_to_not_convert = copy.copy(modules_to_not_convert)
        _check_dtype("bnb_4bit_compute_dtype", bnb_4bit_compute_dtype)
        super().__init__(
            load_in_4bit=True,
            llm_int8_skip_modules=copy.copy(llm_int8_skip_modules),
            llm_int8_enable_fp32_cpu_offload=llm_int8_enable_fp32_cpu_offload,
            bnb_4bit_compute_dtype=bnb_4bit_compute_dtype,
            bnb_4bit_quant_type=bnb_4bit_quant_type,
            bnb_4bit_use_double_quant=bnb_4bit_use_double_quant,
            bnb_4bit_quant_storage=bnb_4bit_quant_storage,
        )
        # The parent makes `None` float32; here it means the dtype of the model.
        if bnb_4bit_compute_dtype is None:
            self.bnb_4bit_compute_dtype: torch.dtype | None = None
        self.quant_method = QUANT_METHOD
        #: While a checkpoint of another method is loaded: what reads it (`hf_qmoe.sources.source.Source`). Not saved.
        self.source: Any = None

    def post_init(self) -> None:
        """Checks every field; called by the constructor.

        Raises:
            TypeError: a field of the wrong type.
            ValueError: a value outside what is allowed.
        """
        super().post_init()
        get_format(self.experts_quant_type)
        if isinstance(self.experts_blocksize, bool) or not isinstance(self.experts_blocksize, int):
            raise TypeError(f"experts_blocksize must be an int, got {self.experts_blocksize!r}")
        if self.experts_blocksize not in BLOCKSIZES_4BIT:
            raise ValueError(
                f"experts_blocksize={self.experts_blocksize} is not supported; choose one of "
                f"{', '.join(map(str, BLOCKSIZES_4BIT))}"
            )
        for name in ("experts_double_quant", "quantize_linears"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be a bool, got {getattr(self, name)!r}")
        if self.experts_exact is not None and not isinstance(self.experts_exact, bool):
            raise TypeError(f"experts_exact must be a bool or None, got {self.experts_exact!r}")
        if self.experts_module not in EXPERTS_MODULES:
            raise ValueError(
                f"experts_module={self.experts_module!r} is not known; choose one of {', '.join(EXPERTS_MODULES)}"
            )
        if self.bnb_4bit_quant_type not in ("nf4", "fp4"):
            raise ValueError(f"bnb_4bit_quant_type must be 'nf4' or 'fp4', got {self.bnb_4bit_quant_type!r}")
        self._check_patterns()
        for quant_type in (self.experts_quant_type, *(self.experts_overrides or {}).values()):
            check_blocksize(quant_type, self.experts_blocksize)

    def _check_patterns(self) -> None:
        if self.experts_overrides is not None:
            if not isinstance(self.experts_overrides, dict):
                raise TypeError(
                    f"experts_overrides must be a dict of pattern to quant type, got {self.experts_overrides!r}"
                )
            for pattern, quant_type in self.experts_overrides.items():
                check_pattern(pattern)
                get_format(quant_type)
        for name in ("modules_to_not_convert", "llm_int8_skip_modules"):
            patterns = getattr(self, name)
            if patterns is None:
                continue
            if not isinstance(patterns, list):
                raise TypeError(f"{name} must be a list of patterns, got {patterns!r}")
            for pattern in patterns:
                check_pattern(pattern)

    @classmethod
    def from_bitsandbytes(cls, config: BitsAndBytesConfig, **fields: Any) -> "QMoEConfig":
        """The config that treats linears as a 4-bit `BitsAndBytesConfig` does, and experts in the same format.

        Args:
            config: with ``load_in_4bit``. Its compute dtype is taken unless it is float32: bitsandbytes does not tell
                that from its default, and computes in the dtype of its input then.
            fields: fields of `QMoEConfig` to set otherwise.

        Raises:
            TypeError, ValueError: `config` is none of 4 bit, or as the constructor.
        """
        if not config.load_in_4bit:
            raise ValueError("only a BitsAndBytesConfig with load_in_4bit=True has an equal here")
        default = config.bnb_4bit_compute_dtype == torch.float32
        taken = {
            "experts_quant_type": config.bnb_4bit_quant_type,
            "experts_double_quant": config.bnb_4bit_use_double_quant,
            "bnb_4bit_quant_type": config.bnb_4bit_quant_type,
            "bnb_4bit_compute_dtype": None if default else config.bnb_4bit_compute_dtype,
            "bnb_4bit_use_double_quant": config.bnb_4bit_use_double_quant,
            "bnb_4bit_quant_storage": config.bnb_4bit_quant_storage,
            "llm_int8_skip_modules": config.llm_int8_skip_modules,
            "llm_int8_enable_fp32_cpu_offload": config.llm_int8_enable_fp32_cpu_offload,
        }
        return cls(**(taken | fields))

    @property
    def skip_patterns(self) -> list[str]:
        """Patterns of both skip lists."""
        return [*(self.modules_to_not_convert or []), *(self.llm_int8_skip_modules or [])]

    def to_dict(self) -> dict[str, Any]:
        """JSON types, for ``config.json``.

        ``load_in_4bit`` is left out on purpose: transformers takes any dict that has it for stock bitsandbytes.
        """
        values = {name: copy.copy(getattr(self, name)) for name in _FIELDS}
        for name, value in values.items():
            if isinstance(value, torch.dtype):
                values[name] = str(value).removeprefix("torch.")
        return {"quant_method": QUANT_METHOD, **values}

    def to_diff_dict(self) -> dict[str, Any]:
        """The fields that differ from their defaults, and ``quant_method``."""
        defaults = QMoEConfig().to_dict()
        return {k: v for k, v in self.to_dict().items() if k == "quant_method" or v != defaults[k]}


def _refuse_unknown(unknown: dict[str, Any]) -> None:
    if unknown.pop("quant_method", QUANT_METHOD) != QUANT_METHOD:
        raise ValueError(f"quant_method must be {QUANT_METHOD!r}")
    if unknown.pop("load_in_8bit", False):
        raise ValueError("load_in_8bit is not available with QMoEConfig; for experts use experts_quant_type='int8'")
    if not unknown.pop("load_in_4bit", True):
        raise ValueError(
            "load_in_4bit=False contradicts QMoEConfig; to leave linears alone use quantize_linears=False"
        )
    if unknown:
        raise ValueError(
            f"QMoEConfig has no field {', '.join(map(repr, sorted(unknown)))}; its fields are {', '.join(_FIELDS)}. "
            "If this comes from a saved config.json, a newer hf_qmoe wrote it: upgrade hf_qmoe."
        )


def _check_dtype(name: str, value: object) -> None:
    dtype = getattr(torch, value, None) if isinstance(value, str) else value
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ValueError(f"{name} must be a float torch.dtype or its name, got {value!r}")
    if isinstance(value, str) and dtype is None:
        raise ValueError(f"{name} must be a float torch.dtype or its name, got {value!r}")
