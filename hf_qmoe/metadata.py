"""What packed bytes mean, written beside them.

nf4 and fp4 bytes have the same shape and dtype; read with the wrong codebook they give plausible, wrong numbers. Each
packed module therefore carries one small uint8 buffer, ``quant_metadata``: JSON in ASCII, so that it survives
safetensors, pickle, dtype casts and device moves, and a loader can refuse bytes that it would misread.
"""

import json
from typing import Any

import torch
from torch import Tensor

from hf_qmoe.packed import PackedStack


#: Version of the stored layout (``docs/format.md``); a reader refuses a newer one.
FORMAT_VERSION = 1


def describe(stacks: dict[str, PackedStack]) -> dict[str, Any]:
    """The construction data of a module's stacks, as JSON types.

    Where stacks differ in format, ``quant_type`` is "mixed" and each stack says its own.
    """
    first, *others = stacks.values()
    mixed = any((s.quant_type, s.double_quant) != (first.quant_type, first.double_quant) for s in others)
    return {
        "format_version": FORMAT_VERSION,
        "quant_type": "mixed" if mixed else first.quant_type,
        "double_quant": any(stack.double_quant for stack in stacks.values()),
        "stacks": {
            name: {"out_features": s.out_features, "in_features": s.in_features, "blocksize": s.blocksize}
            | ({"quant_type": s.quant_type, "double_quant": s.double_quant} if mixed else {})
            for name, s in stacks.items()
        },
    }


def encode(description: dict[str, Any]) -> Tensor:
    """`description` as a uint8 tensor on the CPU."""
    text = json.dumps(description, sort_keys=True, separators=(",", ":"))
    text += " " * (-len(text) % 16)  # tensors behind it in a file keep an aligned address
    return torch.tensor(list(text.encode("ascii")), dtype=torch.uint8, device="cpu")


def decode(buffer: Tensor) -> dict[str, Any]:
    """Inverse of `encode`.

    Raises:
        ValueError: the bytes are not such a description.
    """
    try:
        description = json.loads(bytes(buffer.cpu().tolist()).decode("ascii"))
    except (ValueError, TypeError) as error:
        raise ValueError(f"quant_metadata is not readable ({error})") from None
    if not isinstance(description, dict) or "quant_type" not in description:
        raise ValueError("quant_metadata holds no quant_type")
    return description


def problem(buffer: Tensor, expected: dict[str, Any]) -> str | None:
    """As `mismatch`, for what `buffer` holds; also says if that is not readable."""
    try:
        return mismatch(decode(buffer), expected)
    except ValueError as error:
        return str(error)


def mismatch(stored: dict[str, Any], expected: dict[str, Any]) -> str | None:
    """Says why bytes described by `stored` cannot be read as `expected`; `None` if they can."""
    if stored == expected:
        return None
    version = stored.get("format_version")
    if version != FORMAT_VERSION:
        advice = "; upgrade hf_qmoe" if isinstance(version, int) and version > FORMAT_VERSION else ""
        return f"the packed weights have format version {version}, this hf_qmoe reads version {FORMAT_VERSION}{advice}"
    for key in ("quant_type", "double_quant"):
        if stored.get(key) != expected[key]:
            return (
                f"the packed weights were stored with {key}={stored.get(key)!r}, the module was built with "
                f"{key}={expected[key]!r}; build it with {key}={stored.get(key)!r}"
            )
    if stored.get("stacks") != expected["stacks"]:
        stored, expected = stored.get("stacks"), expected["stacks"]  # type: ignore[assignment]
    return f"the packed weights were stored for {stored}, the module was built for {expected}"
