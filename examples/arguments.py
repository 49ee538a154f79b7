"""What the two scripts can be told, as dataclasses: the keys of the YAML files in `configs/`, and the flags.

Both scripts take the same file: each uses its own keys, knows the other's, and refuses any other.
"""

from dataclasses import dataclass, field, fields, make_dataclass
from difflib import get_close_matches
from inspect import signature
from pathlib import Path

import yaml
from huggingface_hub import snapshot_download
from tiny_model import create_tiny_model
from transformers import AutoModelForCausalLM, PreTrainedModel, TrainingArguments
from transformers.hf_argparser import HfArg, HfArgumentParser

from hf_qmoe import QMoEConfig


@dataclass
class ModelArguments:
    """Which checkpoint, and how it is loaded."""

    model_name_or_path: str = HfArg(default="", help="Folder, or owner/name on the Hub. Required.")
    model_revision: str = HfArg(default="main", help="Branch, tag or commit on the Hub.")
    create_tiny_model: bool = HfArg(default=False, help="Make a tiny random model where the folder does not exist.")
    dtype: str = HfArg(default="auto", help="Of what is not packed, and of products; auto: as in the checkpoint.")
    device_map: str | None = HfArg(default=None, help="Such as cpu; nothing: the accelerator of this process, if any.")

    def folder(self) -> Path:
        """The checkpoint as a folder: it is there, is made now, or comes from the Hub."""
        folder = Path(self.model_name_or_path)
        if self.create_tiny_model:
            create_tiny_model(folder)
        if self.model_name_or_path and folder.is_dir():
            return folder
        if self.model_name_or_path.count("/") != 1:
            raise ValueError(f"model_name_or_path={self.model_name_or_path!r} is neither a folder nor an owner/name")
        files = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja"]
        return Path(snapshot_download(self.model_name_or_path, revision=self.model_revision, allow_patterns=files))

    def load(self, quantization: object) -> PreTrainedModel:
        """The model, packed as `quantization` (`QuantizationArguments`) says; a packed checkpoint stays as it is."""
        options = {"revision": self.model_revision, "dtype": self.dtype, "device_map": self.device_map}
        config = QMoEConfig(**vars(quantization))
        return AutoModelForCausalLM.from_pretrained(self.model_name_or_path, quantization_config=config, **options)


# The fields of `QMoEConfig`, with its defaults.
OPTIONS = [p for p in signature(QMoEConfig).parameters.values() if p.kind != p.VAR_KEYWORD]
QuantizationArguments = make_dataclass("QuantizationArguments", [(p.name, p.annotation, p.default) for p in OPTIONS])


@dataclass
class LoraArguments:
    """The adapter."""

    lora_r: int = HfArg(default=16, help="Rank.")
    lora_alpha: int = HfArg(default=32, help="Scale: the update is multiplied by lora_alpha / lora_r.")
    lora_dropout: float = HfArg(default=0.05, help="Dropout on the input of each adapter.")
    lora_target_modules: list[str] = field(
        default_factory=lambda: ["q_proj", "k_proj", "v_proj", "o_proj"], metadata={"help": "Modules that get one."}
    )
    lora_target_parameters: list[str] = field(
        default_factory=lambda: ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        metadata={"help": "Parameters that get one: stacks of experts."},
    )


@dataclass
class DataArguments:
    """The text."""

    train_file: str | None = HfArg(default=None, help="A .txt or .jsonl file; nothing: the help texts of Python.")
    text_field: str = HfArg(default="text", help="Field of each line of a .jsonl file.")
    block_size: int = HfArg(default=512, help="Tokens per sample: the text is cut into blocks of this length.")
    validation_split_percentage: float = HfArg(default=5.0, help="Share of the blocks, at the end, held out.")
    max_eval_samples: int | None = HfArg(default=None, help="At most this many held-out blocks.")


@dataclass
class OutputArguments:
    """What this script writes."""

    quantized_model_dir: str = HfArg(default="", help="Folder for the packed model. Required.")
    check_reload: bool = HfArg(default=True, help="Read the result back; compare every byte, and the logits.")


QUANTIZER_ARGUMENTS = [ModelArguments, QuantizationArguments, OutputArguments]
TRAINER_ARGUMENTS = [ModelArguments, QuantizationArguments, LoraArguments, DataArguments, TrainingArguments]


def parse_arguments(classes: list[type], argv: list[str]) -> tuple:
    """One of each of `classes` from ``[file.yaml] [--key value ...]``; the other script's keys may be in the file."""
    parser = HfArgumentParser(classes, allow_abbrev=False)
    if argv and argv[0].endswith((".yaml", ".yml")):
        known = {
            field.name: cls in classes for cls in (*QUANTIZER_ARGUMENTS, *TRAINER_ARGUMENTS) for field in fields(cls)
        }
        values = yaml.safe_load(Path(argv[0]).read_text(encoding="utf-8"))
        if unknown := sorted(values.keys() - known):
            raise ValueError(f"{argv[0]}: unknown keys {unknown}; close to {get_close_matches(unknown[0], known)}")
        # As text, numbers are checked against the type of the field, as flags are.
        parser.set_defaults(**{k: str(v) if isinstance(v, int | float) else v for k, v in values.items() if known[k]})
        argv = argv[1:]
    return parser.parse_args_into_dataclasses(argv, look_for_args_file=False)
