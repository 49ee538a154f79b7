"""torch's own defaults for code whose results outlive the caller's settings."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import _disable_current_modes


class _Float32(TorchFunctionMode):
    """Functions that make tensors and are told no dtype make float32 where torch's default would be another.

    `torch.set_default_dtype` is the process's: other threads would see it, and they set it, too.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        defaults = func in _device_constructors() and kwargs.get("dtype") is None and made.is_floating_point()
        return func(*args, **{**kwargs, "dtype": torch.float32}) if defaults else made


@contextmanager
def torch_defaults() -> Iterator[None]:
    """CPU, float32 and no dispatch modes within, whatever the caller or another thread has set.

    Tables that are cached for the life of the process are made here, and so is what bitsandbytes makes without naming
    a dtype.
    """
    with _disable_current_modes(), torch.device("cpu"), _Float32():
        yield
