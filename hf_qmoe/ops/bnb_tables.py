"""bitsandbytes' own 4-bit tables, made in float32 before it makes them in another dtype."""

from importlib import import_module

import torch

from hf_qmoe.once import once
from hf_qmoe.ops.defaults import torch_defaults


# Since 0.50 it makes them at the first use, for each device.
_MAKERS = {
    "bitsandbytes.backends.utils": "_get_4bit_code",
    "bitsandbytes.backends.default.ops": "_get_4bit_quantize_bounds",
}


@once
def make_bnb_tables(quant_type: str, device: torch.device) -> None:
    """To be called before bitsandbytes packs or unpacks 4 bits.

    It keeps its tables for the life of the process, in what happens to be torch's default dtype at that moment: if
    another thread builds a bfloat16 model then, codes are off.
    """
    with torch_defaults():
        for module, name in _MAKERS.items():
            make = getattr(import_module(module), name, None)
            if make is not None:
                make(quant_type, device)
