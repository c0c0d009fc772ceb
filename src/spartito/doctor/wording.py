"""Numbers as a person reads them."""

from __future__ import annotations

from collections.abc import Sequence

MANY = 6
"""More names than this are counted, not listed."""


def joined(names: Sequence[str]) -> str:
    """``a``, ``a and b``, ``a, b and c``."""
    if len(names) > MANY:
        return f"{', '.join(names[: MANY - 1])} and {len(names) - MANY + 1} more"
    if len(names) < 2:
        return "".join(names)
    return f"{', '.join(names[:-1])} and {names[-1]}"


def amount(size: float) -> str:
    """Bytes, as ``1.5 GiB``."""
    for name in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.3g} {name}"
        size /= 1024
    return f"{size:.4g} TiB"


def rate(speed: float) -> str:
    """Bytes per second, as ``1.2 GB/s``."""
    for name in ("B/s", "kB/s", "MB/s"):
        if speed < 999.5:
            return f"{speed:.3g} {name}"
        speed /= 1000
    return f"{speed:.3g} GB/s"


def duration(seconds: float) -> str:
    """Seconds, as ``80 µs``, ``2.5 ms``, ``3.1 s``."""
    if seconds < 0.9995e-3:
        return f"{seconds * 1e6:.0f} µs"
    if seconds < 0.9995:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds:.1f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
