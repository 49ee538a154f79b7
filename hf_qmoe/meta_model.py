"""The model of a checkpoint folder without its weights, for names, shapes and conversions."""

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from hf_qmoe.folders import CheckpointError, read_json


def config_fields(folder: Path) -> dict[str, Any]:
    """What ``config.json`` says.

    Raises:
        CheckpointError: there is none that can be read.
    """
    file = folder / "config.json"
    if not file.is_file():
        raise CheckpointError(f"{folder} has no config.json, so it is not a model checkpoint")
    return read_json(file)


def meta_model(folder: Path) -> PreTrainedModel:
    """The float model of a folder's config on the meta device, of the class that the config names.

    Raises:
        CheckpointError: no model can be built from the config.
    """
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    except (ValueError, OSError, KeyError) as error:
        raise CheckpointError(f"the config of {folder} cannot be used: {in_short(error)}") from error
    cls = getattr(transformers, (config.architectures or [""])[0], None)
    try:
        with torch.device("meta"):
            return cls(config) if cls is not None else AutoModelForCausalLM.from_config(config)
    except (ValueError, KeyError, AttributeError) as error:
        raise CheckpointError(f"no model can be built from the config of {folder}: {in_short(error)}") from error


def in_short(error: Exception) -> str:
    """The first lines of a message of transformers or PEFT, in one."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:3]) + (f" (and {len(lines) - 3} more)" if len(lines) > 3 else "")
