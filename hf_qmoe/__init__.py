"""Mixture-of-Experts models in 4 bit for transformers and PEFT, correct under gradient checkpointing.

Importing this package registers the method ``qmoe`` with transformers and teaches PEFT's LoRA to adapt packed experts;
that is its only side effect.
"""

from hf_qmoe.versions import check_versions


check_versions()

from hf_qmoe.config import QMoEConfig  # noqa: E402
from hf_qmoe.enabling import disable, enable  # noqa: E402
from hf_qmoe.experts import Experts4bit, ExpertsNbit  # noqa: E402
from hf_qmoe.export.checkpoint import export_checkpoint  # noqa: E402
from hf_qmoe.inspection import inspect_checkpoint  # noqa: E402
from hf_qmoe.lora.export import export_adapter  # noqa: E402
from hf_qmoe.lora.merge_checkpoint import merge_checkpoint  # noqa: E402
from hf_qmoe.lora.merge_model import merge_adapter  # noqa: E402
from hf_qmoe.lora.targets import lora_targets  # noqa: E402
from hf_qmoe.matmul import matmul_4bit  # noqa: E402
from hf_qmoe.parametrize import parametrize_experts, parametrize_experts_prequantized  # noqa: E402
from hf_qmoe.quantizer import quantize_experts  # noqa: E402
from hf_qmoe.register import register  # noqa: E402
from hf_qmoe.report import report  # noqa: E402


__version__ = "0.1.0"
__all__ = [
    "Experts4bit",
    "ExpertsNbit",
    "QMoEConfig",
    "disable",
    "enable",
    "export_adapter",
    "export_checkpoint",
    "inspect_checkpoint",
    "lora_targets",
    "matmul_4bit",
    "merge_adapter",
    "merge_checkpoint",
    "parametrize_experts",
    "parametrize_experts_prequantized",
    "quantize_experts",
    "report",
]

register()
