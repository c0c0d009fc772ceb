"""Files in which a system says what it knows."""

from __future__ import annotations

from pathlib import Path


def text_of(path: Path) -> str:
    """The text of a file of the system, "" where it cannot be read."""
    try:
        return path.read_text()
    except OSError:
        return ""
