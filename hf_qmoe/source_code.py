"""What a module's class does with the weight of a linear it holds, read from its source."""

import ast
import inspect
import re
import sys
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
    return _weight_is_read(cls, name)


@cache
def _weight_is_read(cls: Any, name: str) -> bool:
    """`weight_is_read` of a class: asked for every linear of every layer, answered once."""
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
    sources = [
        _classes(base.__module__).get(base.__qualname__, "") for base in cls.__mro__[: cls.__mro__.index(nn.Module)]
    ]
    return "\n".join(sources)


@cache
def _classes(module: str) -> dict[str, str]:
    """Source of each class of a Python module, by qualified name. A file is parsed once: that takes its time."""
    found: dict[str, str] = {}
    with suppress(OSError, TypeError, SyntaxError):
        text = inspect.getsource(sys.modules[module])
        lines = text.splitlines()
        pending: list[tuple[str, ast.AST]] = [("", ast.parse(text))]
        while pending:
            path, node = pending.pop()
            for child in ast.iter_child_nodes(node):
                inside = path
                if isinstance(child, ast.ClassDef):
                    found[path + child.name] = "\n".join(lines[child.lineno - 1 : child.end_lineno])
                    inside = f"{path}{child.name}."
                elif isinstance(child, ast.FunctionDef):
                    inside = f"{path}{child.name}.<locals>."
                if not isinstance(child, ast.expr):
                    pending.append((inside, child))
    return found
