"""How a model lies on a mesh, as a picture of a run's page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from spartito.names import size
from spartito.report.bars import Bar, Bars
from spartito.report.figures import percent

MOST = 40
"""Modules that have a bar of their own; the rest have one together."""


def layout_bars(layout: Mapping[str, Any], here: str, elsewhere: str) -> list[Bars]:
    """What one task has of each module, beside what one device has.

    Args:
        layout: What a run's settings say: the mesh, and its tensors.
        here: The colour of what a task has.
        elsewhere: That of what others have.

    Returns:
        One picture; none where the run had no mesh.
    """
    tensors = layout.get("tensors") or []
    if not tensors:
        return []
    modules: dict[str, list[Sequence[Any]]] = {}
    for tensor in tensors:
        modules.setdefault(tensor[0].rpartition(".")[0] or tensor[0], []).append(tensor)
    if len(modules) > MOST:
        names = sorted(modules, key=lambda name: -_bytes(modules[name], 4))
        rest = [tensor for name in names[MOST:] for tensor in modules[name]]
        shown = set(names[:MOST])
        modules = {name: own for name, own in modules.items() if name in shown}
        modules["all others"] = rest
    most = max(_bytes(own, 4) for own in modules.values()) or 1
    rows = [
        Bar(
            name,
            _bytes(own, 4) / most,
            f"{size(_bytes(own, 3))} of {size(_bytes(own, 4))}{_along(own)}",
            f"linear-gradient(to right, {here} {percent(_bytes(own, 3) / _bytes(own, 4))}, "
            f"{elsewhere} 0)",
        )
        for name, own in modules.items()
        if _bytes(own, 4)
    ]
    mesh = " x ".join(f"{name} {count}" for name, count in layout.get("mesh", {}).items())
    note = (
        f"Mesh {mesh}. A bar is a module; its first part is what one task has of it, the rest is "
        f"on other tasks. In all one task has {size(_bytes(tensors, 3))} of "
        f"{size(_bytes(tensors, 4))}."
    )
    return [Bars("How the model lies on the mesh", rows, note)]


def _bytes(tensors: Sequence[Sequence[Any]], column: int) -> int:
    return sum(int(tensor[column]) for tensor in tensors)


def _along(tensors: Sequence[Sequence[Any]]) -> str:
    """Which dims are cut, and along which axes."""
    found = dict.fromkeys(
        f"{dim} along {axis}"
        for _, dims, axes, *_ in tensors
        for dim, axis in zip(dims, axes, strict=True)
        if axis
    )
    return f": {', '.join(found)}" if found else ""
