"""One logger for the package: plain lines on stderr, silent on replicas that are not the chief."""

from __future__ import annotations

import logging

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
