"""What an earlier job has left under a name that is written anew keeps its content."""

from __future__ import annotations

import os
from itertools import count
from pathlib import Path


def put_aside(path: Path) -> Path | None:
    """Let what is in a file go on under another name: ``worker-0.log.1``, or the next one free.

    Args:
        path: The file; it may be missing. Of a link the file that it points to is meant.

    Returns:
        Where it is now; None where nothing would be lost: an empty file, or a device.

    Raises:
        OSError: It cannot be renamed.
    """
    path = Path(os.path.realpath(path))
    if not path.is_file() or not path.stat().st_size:
        return None
    names = (path.with_name(f"{path.name}.{number}") for number in count(1))
    return path.rename(next(name for name in names if not os.path.lexists(name)))
