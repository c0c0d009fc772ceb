"""One logger for the package: plain lines on stderr, silent on replicas that are not the chief."""

from __future__ import annotations

import logging
import sys
import threading
import time

logger = logging.getLogger("spartito")


def note(message: str, *args: object) -> None:
    """Tell the user something once that is no error, as ``spartito: message``."""
    logger.info(message, *args)


def warn(message: str, *args: object) -> None:
    """Tell the user of something that probably should not be so."""
    logger.warning(message, *args)


def say(text: str) -> None:
    """Print a line of a command's own, beside what its tasks print."""
    print(f"spartito: {text}", file=sys.stderr, flush=True)


def shown(text: str, most: int = 100) -> str:
    """``text`` of an unknown peer for a log: on one line, without control characters, cut off."""
    plain = "".join(char if char.isprintable() else "?" for char in text[: most + 1])
    return plain if len(plain) <= most else plain[:most] + "..."


class RareWarnings:
    """Warns, but not more often than every ``seconds``: then says how many were left out."""

    def __init__(self, seconds: float = 10.0) -> None:
        self._seconds = seconds
        self._next = 0.0
        self._left_out = 0
        self._lock = threading.Lock()

    def warn(self, message: str, *args: object) -> None:
        """As `warn`, or nothing."""
        with self._lock:
            now = time.monotonic()
            if now < self._next:
                self._left_out += 1
                return
            self._next, left_out = now + self._seconds, self._left_out
            self._left_out = 0
        more = f" ({left_out} more such lines were left out)" if left_out else ""
        warn(message + "%s", *args, more)


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
