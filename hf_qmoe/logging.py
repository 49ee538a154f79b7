"""One place that decides how this package logs.

``transformers.logging.set_verbosity_*`` governs only loggers named under ``transformers.``; ours are, so that users
have one switch.
"""

from functools import cache
from logging import Logger

from transformers.utils import logging as transformers_logging


def get_logger(name: str) -> Logger:
    """The logger for a module of this package."""
    logger: Logger = transformers_logging.get_logger(f"transformers.{name}")
    return logger


@cache
def warn_once(logger: Logger, message: str) -> None:
    """Logs a warning the first time it is asked to."""
    logger.warning(message)
