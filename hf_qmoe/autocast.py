"""Autocast, asked of any device: torch's own question is an error for devices that have none, such as meta."""

import torch


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """The dtype that autocast gives products on devices of this type; `None` where it is off or there is none."""
    # The CPU has it: asking takes as long as the question that follows.
    has_autocast = device_type == "cpu" or torch.amp.is_autocast_available(device_type)
    return torch.get_autocast_dtype(device_type) if has_autocast and torch.is_autocast_enabled(device_type) else None
