"""One logger for the package: plain lines on stderr, silent on replicas that are not the chief."""

from __future__ import annotations

import ctypes
import logging
import os
import sys
from contextlib import suppress
from pathlib import Path

logger = logging.getLogger("spartito")


def note(message: str, *args: object) -> None:
    """Tell the user something once that is no error, as ``spartito: message``."""
    logger.info(message, *args)


def warn(message: str, *args: object) -> None:
    """Tell the user of something that probably should not be so."""
    logger.warning(message, *args)


def configure() -> None:
    """Show our lines on stderr unless the application has set up logging of its own."""
    if logger.handlers or logging.getLogger().handlers:
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("spartito: %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False


TORCH_LEVEL = {"TORCH_CPP_LOG_LEVEL": "ERROR"}
"""Without it torch's C++ parts print dozens of stack frames when a store is gone, before our
errors say the same in a line. Read when torch loads."""


def quiet_torch() -> None:
    """Set torch's C++ log level unless the user did; torch may be loaded already."""
    (name, level), *_ = TORCH_LEVEL.items()
    if name in os.environ:
        return
    os.environ[name] = level
    if (torch := sys.modules.get("torch")) is None:
        return
    library = Path(str(torch.__file__)).parent / "lib" / "libc10.so"
    with suppress(OSError, AttributeError):  # another build of torch: it stays as loud as it is
        ctypes.CDLL(str(library))._ZN3c1011initLoggingEv()  # c10::initLogging reads the level
