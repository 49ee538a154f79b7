"""What a module's class does with the weight of a linear it holds, read from its source."""

import inspect
import re
from contextlib import suppress
from functools import cache
from typing import Any

from torch import nn


def weight_is_read(parent: nn.Module, name: str) -> bool:
    """Whether the class of `parent` uses ``self.<name>.weight`` as a value, or casts its input to the weight's dtype.

    Fused kernels take the weight and never call the linear: packed bytes would be read as numbers, and an adapter on
    it would do nothing. A cast to the dtype of packed bytes would round the input to integers.
    """
    cls: Any = type(parent)
    weight = rf"\bself\.{re.escape(name)}\.weight\b"
    source = _source(cls)
    is_value = re.search(rf"(?<!isinstance\(){weight}(?!\.)", source) is not None
    is_cast_to = re.search(rf"\.to\([^)]*{weight}\.dtype", source) is not None and "torch.uint8" not in source
    return is_value or is_cast_to


def parameter_is_read(parent: nn.Module, child: str, name: str) -> bool:
    """Whether the class of `parent` reads the parameter `name` of its module `child` by itself.

    Whatever is put around the child, as an adapter is, would be passed by.
    """
    cls: Any = type(parent)
    return re.search(rf"\bself\.{re.escape(child)}\.{re.escape(name)}\b", _source(cls)) is not None


@cache
def _source(cls: Any) -> str:
    """Source of a class and its bases below `nn.Module`; empty where there is none (made at run time)."""
    sources = []
    for base in cls.__mro__[: cls.__mro__.index(nn.Module)]:
        with suppress(OSError, TypeError):
            sources.append(inspect.getsource(base))
    return "\n".join(sources)
