"""What the doctor says more than once, as a person reads it."""

from __future__ import annotations

from collections.abc import Sequence

from spartito.names import listed

MANY = 6
"""More names than this are counted, not listed."""


def joined(names: Sequence[str]) -> str:
    """``a``, ``a and b``, ``a, b and c``, and of many ``a, b, c, d, e and 4 more``."""
    return listed(names, MANY)


def amount(size: float) -> str:
    """Bytes of memory and disks, as ``1.5 GiB``."""
    for name in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.3g} {name}"
        size /= 1024
    return f"{size:.4g} TiB"
