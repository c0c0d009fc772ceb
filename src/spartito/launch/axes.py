"""How many tasks a model is divided among, as the options of its strategy say."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from spartito.declared import Declared
from spartito.errors import UserError
from spartito.names import nearest

AXES = frozenset({"data", "model", "pipeline"})
"""The axes that the default layout knows: `spartito.mesh.layout.AXES`, without torch."""


def parse_axes(text: str) -> dict[str, int]:
    """The axes of a mesh that was typed.

    Args:
        text: As ``data=2,model=2``.

    Returns:
        Their sizes, in this order.

    Raises:
        UserError: It is no such list.
    """
    axes: dict[str, int] = {}
    for word in text.split(","):
        name, _, size = (part.strip() for part in word.partition("="))
        if not name or not size.isdecimal() or not int(size) or name in axes:
            raise UserError(
                f"--mesh {text}: {word!r} is no axis, or one twice",
                "Write each axis once with its size: data=2,model=2",
            )
        axes[name] = int(size)
    return axes


def mesh_size(options: Mapping[str, Any]) -> int | None:
    """The tasks of a mesh.

    Args:
        options: The keyword arguments of a strategy.

    Returns:
        Their number; None where no mesh is given.
    """
    axes = options.get("mesh")
    if not isinstance(axes, dict) or not all(isinstance(size, int) for size in axes.values()):
        return None
    return math.prod(axes.values())


def check_axes(strategy: Declared) -> None:
    """Refuse an axis that nothing is about, before anything starts.

    Args:
        strategy: A strategy and its options.

    Raises:
        UserError: There is one, and no layout of the user's.
    """
    options = strategy.options
    if mesh_size(options) is None or "layout" in options:
        return
    if unknown := [axis for axis in options["mesh"] if axis not in AXES]:
        raise UserError(
            f"no rule is about the axis {unknown[0]!r} of mesh={options['mesh']}",
            f"{nearest(unknown[0], AXES)} Others want a layout that names them.",
        )


def pipeline_size(strategy: Declared) -> int | None:
    """The tasks of one pipeline, where its stages are given.

    Args:
        strategy: A strategy and its options.

    Returns:
        Their number; None for other strategies, and for stages that do not divide.
    """
    options = strategy.options
    name, _, text = str(options.get("schedule", "")).partition(":")
    each = int(text) if text.isdecimal() else 2 if name == "interleaved" else 1
    stages = options.get("stages")
    if strategy.name != "pipeline" or not isinstance(stages, int):
        return None
    return stages // each if stages > 0 and each > 0 and stages % each == 0 else None
