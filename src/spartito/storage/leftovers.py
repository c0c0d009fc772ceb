"""The names of what is being written or moved aside: nobody else has such names.

.spartito-new-5f1c9a20d3b47e68-step-00000400    is written, and takes the name in the end
.spartito-old-5f1c9a20d3b47e68-step-00000400    was moved aside for a new one of its name
"""

from __future__ import annotations

import re
import secrets
from pathlib import Path

NEW, OLD = "new", "old"

_NAME = re.compile(r"\.spartito-(new|old)-[0-9a-f]{16}-(.+)", re.DOTALL)


def beside(path: Path, kind: str) -> Path:
    """A name in the same folder that was never used, for what is to be ``path`` or was it."""
    return path.with_name(f".spartito-{kind}-{secrets.token_hex(8)}-{path.name}")


def is_leftover(path: Path) -> bool:
    """Whether ``path`` has a name that `beside` gave."""
    return _NAME.fullmatch(path.name) is not None


def parts_of(path: Path) -> tuple[str, Path]:
    """The kind of a leftover, and the path that it was to be or was; `ValueError` for others."""
    found = _NAME.fullmatch(path.name)
    if found is None:
        raise ValueError(f"{path} is no leftover")
    return found[1], path.with_name(found[2])
