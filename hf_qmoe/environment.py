"""What this package runs on: versions, CPU kernels, devices, as ``hf-qmoe env`` prints them."""

import platform
from importlib.metadata import PackageNotFoundError, version

import torch

from hf_qmoe.ops import native_library


PACKAGES = ("hf_qmoe", "torch", "transformers", "peft", "bitsandbytes", "accelerate", "trl")


def environment() -> dict[str, str]:
    """Facts for a bug report, by name, in the order to print them in."""
    facts = {"python": f"{platform.python_version()} on {platform.system()} {platform.machine()}"}
    facts |= {name: _version(name) for name in PACKAGES}
    facts["CPU kernels"] = _kernels()
    facts["threads"] = str(torch.get_num_threads())
    facts["accelerator"] = _accelerator()
    return facts


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _kernels() -> str:
    try:
        name, reason = native_library.instruction_set(), native_library.why_not()
    except (ValueError, RuntimeError) as error:  # HF_QMOE_CPU_KERNELS asks for what cannot be had
        return f"none: {error}"
    return f"native, {name}" if name else f"those of bitsandbytes, because {reason}"


def _accelerator() -> str:
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        return "none"
    name_of = getattr(torch.get_device_module(device), "get_device_name", None)  # MPS has none
    count = torch.accelerator.device_count()
    return f"{device.type}: {', '.join(map(name_of, range(count))) if name_of else f'{count} of them'}"
