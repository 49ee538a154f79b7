"""`inspect_checkpoint`: reads a folder's config and file headers, and counts.

Stored bytes come from the headers of the safetensors files; all other sizes are counted on models without weights
(`hf_qmoe.inspection.skeleton`) by the functions that count loaded ones. They are exact, not estimates.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers import __version__ as transformers_version
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from hf_qmoe import selection
from hf_qmoe.checkpoint import StoredTensors, read_headers
from hf_qmoe.config import QUANT_METHOD, QMoEConfig
from hf_qmoe.folders import read_json
from hf_qmoe.inspection.parts import PARTS, ROUTED_EXPERTS, UNUSED, ModelParts
from hf_qmoe.inspection.result import Inspection, InspectionError, PartSize, Size
from hf_qmoe.inspection.skeleton import Skeleton
from hf_qmoe.logging import get_logger
from hf_qmoe.memory import storage_bytes
from hf_qmoe.ops.formats import FORMATS
from hf_qmoe.report import report
from hf_qmoe.sources.bitsandbytes_4bit import BitsAndBytes4bit
from hf_qmoe.sources.merge import merged_config, source_of


_FLOAT_DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def inspect_checkpoint(
    path: str | Path,
    config: QMoEConfig | None = None,
    *,
    memory: int | None = None,
    trust_remote_code: bool = False,
) -> Inspection:
    """Says what is in a checkpoint folder and what it takes in memory. No weights are read.

    Args:
        path: a folder with a ``config.json``; safetensors files need not be there.
        config: how the model would be loaded; `QMoEConfig()` if omitted. Where the folder was packed by this package,
            the config it was saved with takes its place.
        memory: bytes available, to say what fits.
        trust_remote_code: run Python files of the folder, if its model needs them.

    Raises:
        FileNotFoundError: no such folder, or no ``config.json`` in it.
        InspectionError: a damaged file, a model that transformers does not know, or the name of a model of the Hub.
    """
    folder = _folder(path)
    fields = _config_fields(folder)
    try:
        stored = read_headers(folder)
    except ValueError as error:
        raise InspectionError(str(error)) from None
    saved = fields.get("quantization_config") or (fields.get("text_config") or {}).get("quantization_config")
    method = _method(saved, stored)
    skeleton = _skeleton(folder, fields, stored, trust_remote_code)
    plain = skeleton.plain()
    with _without_warnings():
        parts = ModelParts(plain)
    counter = _Counter(skeleton, parts)
    if method == QUANT_METHOD:
        packed, model = counter.packed(_saved_config(folder, saved), pre_quantized=True)
        if model is None:
            raise InspectionError(f"{folder}: its quantization_config does not suit its model: {packed.problem}")
    else:
        packed, model = counter.packed(config or QMoEConfig())
        refusal = _refusal(saved, config or QMoEConfig()) if isinstance(saved, dict) else None
        if refusal is not None:
            packed, model = replace(_labels((config or QMoEConfig()).to_dict()), problem=refusal), None
    bitsandbytes = skeleton.bitsandbytes()
    dtype = str(skeleton.dtype).removeprefix("torch.")
    has_experts = parts.parameters()[ROUTED_EXPERTS] > 0
    if not has_experts:
        packed = replace(packed, name="qmoe", quant_type=None, blocksize=None, double_quant=False)
    return Inspection(
        path=str(folder),
        model_class=skeleton.model_class.__name__,
        model_type=skeleton.config.model_type,
        dtype=dtype,
        quantized_by=method,
        stored=stored,
        parts=_part_sizes(parts, stored, plain, bitsandbytes, model),
        unquantized=counter.size(Size(dtype), plain),
        bitsandbytes=counter.size(Size("bitsandbytes"), bitsandbytes),
        packed=packed,
        formats=_formats(counter, config or QMoEConfig(), saved) if has_experts and method != QUANT_METHOD else [],
        report=None if model is None else report(model),
        memory=memory,
    )


class _Counter:
    """Sizes of one skeleton in memory."""

    def __init__(self, skeleton: Skeleton, parts: ModelParts) -> None:
        self._skeleton = skeleton
        self._parts = parts

    def size(self, labels: Size, model: PreTrainedModel) -> Size:
        """`labels` with the bytes of `model`."""
        floats = [
            part.nbytes
            for part in report(model).parts
            if part.form == "float" and self._parts.of_module(part.name) == ROUTED_EXPERTS
        ]
        experts = self._parts.nbytes(model)[ROUTED_EXPERTS]
        return replace(labels, nbytes=storage_bytes(model), experts=experts, experts_float=sum(floats))

    def packed(self, config: QMoEConfig, pre_quantized: bool = False) -> tuple[Size, PreTrainedModel | None]:
        """Size with `config`, and the model; none if `config` does not suit it."""
        labels = _labels(config.to_dict())
        try:
            model = self._skeleton.packed(config, pre_quantized)
        except ValueError as error:
            return replace(labels, problem=_one_line(error)), None
        return self.size(labels, model), model

    def formats(self, base: QMoEConfig) -> list[Size]:
        """Sizes in all formats of experts, nf4 with and without double quantization, `base` otherwise the same."""
        sizes = []
        for quant_type, storage in FORMATS.items():
            for double_quant in (False, True) if quant_type == "nf4" else (base.experts_double_quant,):
                changes = {
                    "experts_quant_type": quant_type,
                    "experts_double_quant": storage.has_scales and double_quant,
                }
                fields = base.to_dict() | changes
                try:
                    with _without_warnings():
                        sizes.append(self.packed(QMoEConfig(**fields))[0])
                except ValueError as error:  # a block size that this format does not know
                    sizes.append(replace(_labels(fields), problem=_one_line(error)))
        return sizes


def _labels(fields: dict[str, Any]) -> Size:
    """A size of a config, given by its fields, that says what it is of but not how large."""
    quant_type, blocksize = fields["experts_quant_type"], fields["experts_blocksize"]
    has_scales = FORMATS[quant_type].has_scales
    double_quant = has_scales and fields["experts_double_quant"]
    name = f"qmoe {quant_type}"
    if has_scales and blocksize != QMoEConfig().experts_blocksize:
        name += f" block {blocksize}"
    name += (" double quant" if double_quant else "") + (" + overrides" if fields["experts_overrides"] else "")
    return Size(name, quant_type, blocksize if has_scales else None, double_quant)


def _part_sizes(
    parts: ModelParts,
    stored: StoredTensors | None,
    plain: PreTrainedModel,
    bitsandbytes: PreTrainedModel,
    packed: PreTrainedModel | None,
) -> list[PartSize]:
    parameters = parts.parameters()
    floats, stock = parts.nbytes(plain), parts.nbytes(bitsandbytes)
    ours = None if packed is None else parts.nbytes(packed)
    on_disk = None if stored is None else parts.stored(stored.nbytes)
    names = [name for name in (*PARTS, UNUSED) if parameters[name] or floats[name] or (on_disk and on_disk[name])]
    return [
        PartSize(
            name,
            parameters[name],
            floats[name],
            None if on_disk is None else on_disk[name],
            stock[name],
            None if ours is None else ours[name],
        )
        for name in names
    ]


def _folder(path: str | Path) -> Path:
    folder = Path(path)
    if folder.is_dir():
        return folder
    if folder.exists():
        raise InspectionError(f"{folder} is a file; give the folder of a checkpoint")
    if re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", str(path)):
        raise InspectionError(
            f"there is no folder {path}. If it is a model of the Hub, download it first; `hf download {path} "
            "config.json --local-dir FOLDER` is enough for sizes in memory"
        )
    raise FileNotFoundError(f"there is no folder {folder}")


def _config_fields(folder: Path) -> dict[str, Any]:
    file = folder / "config.json"
    if not file.is_file():
        raise FileNotFoundError(f"{folder} has no config.json")
    return read_json(file)


def _method(saved: Any, stored: StoredTensors | None) -> str | None:
    """How the checkpoint is quantized, by its ``quantization_config`` or else by its dtypes."""
    if isinstance(saved, dict):
        method = str(saved.get("quant_method") or "bitsandbytes")
        bits = next((bits for bits in ("4bit", "8bit") if saved.get(f"load_in_{bits}")), None)
        return f"{method} {bits}" if bits else method
    return "unknown method, matrices in 8 bit" if stored and stored.eight_bit_matrix else None


def _refusal(saved: dict[str, Any], config: QMoEConfig) -> str | None:
    """Why a checkpoint of another method is not loaded with `config`; `None` if it is."""
    try:
        merged_config(saved, config)
    except ValueError as error:
        return _one_line(error)
    return None


def _formats(counter: "_Counter", config: QMoEConfig, saved: Any) -> list[Size]:
    """Sizes in the formats that a load can give: all of them, but for bytes of bitsandbytes, which are kept."""
    sizes = counter.formats(config)
    if not isinstance(saved, dict):
        return sizes
    if _refusal(saved, QMoEConfig()) is not None:
        return []
    if isinstance(source_of(saved), BitsAndBytes4bit):
        kept = saved.get("bnb_4bit_quant_type", "fp4")
        return [size for size in sizes if size.quant_type == kept and not size.double_quant]
    return sizes


def _saved_config(folder: Path, saved: Any) -> QMoEConfig:
    try:
        return QMoEConfig(**saved)
    except (ValueError, TypeError) as error:
        raise InspectionError(f"the quantization_config of {folder} is not valid: {_one_line(error)}") from None


def _skeleton(folder: Path, fields: dict[str, Any], stored: StoredTensors | None, trust_remote_code: bool) -> Skeleton:
    model_type = fields.get("model_type")
    if "auto_map" in fields and not trust_remote_code and model_type not in CONFIG_MAPPING:
        raise InspectionError(
            f"{folder} needs Python code of its own; allow it with trust_remote_code if you trust it"
        )
    if "auto_map" not in fields and model_type not in CONFIG_MAPPING:
        raise InspectionError(f"transformers {transformers_version} does not know the model_type {model_type!r}")
    dtypes = (_FLOAT_DTYPES.get(entry.dtype) for entry in (stored.tensors if stored else {}).values())
    try:
        skeleton = Skeleton.read(folder, next(filter(None, dtypes), None), trust_remote_code)
        skeleton.plain()
    except Exception as error:  # whatever a config's values make the model's own code raise
        raise InspectionError(f"no model can be built from the config of {folder}: {_one_line(error)}") from error
    return skeleton


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Keeps selection quiet: what it warns of has been said once, of the config that was asked for."""
    logger = get_logger(selection.__name__)
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = False
