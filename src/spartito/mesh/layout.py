"""Which named dim lies on which axis of a mesh: ordered rules, and what they make of a tensor."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from spartito.errors import UserError
from spartito.mesh.axes import PIPELINE
from spartito.names import nearest

BATCH = "batch"
"""The dim of the examples: its axis has the data shards."""

ROWS = "rows"
"""The first dim of a sum of products that divides: each task of its axis goes on with its rows."""

ROWS_FROM = 128 << 10
"""Bytes of a sum that is worth a second crossing, when what follows needs all of it."""

DEFAULT = (
    (BATCH, "data"),
    ("heads", "model"),
    ("hidden", "model"),
    ("channels", "model"),
    ("vocab", "model"),
    (ROWS, "model"),
)
"""The rules of `MeshStrategy` where no others are given."""

AXES = frozenset({PIPELINE, *(axis for _, axis in DEFAULT)})
"""The axes that need no rule of the user's: one of size 1 may be left unused."""


@dataclass(frozen=True, slots=True)
class Dim:
    """One dim of a parameter.

    Args:
        name: What rules call it; None: no rule is about it.
        parts: The relative sizes of parts that lie one behind the other in it, as queries, keys
            and values of a packed projection; each is divided by itself. () for a single one.
        units: How many heads or groups a part of relative size 1 has, which stay whole; 0: every
            element may be cut off from the next.
    """

    name: str | None = None
    parts: tuple[int, ...] = ()
    units: int = 0

    @classmethod
    def read(cls, text: str | None) -> Dim:
        """The dim that a user wrote.

        Args:
            text: A name, ``"3*heads"`` for three equal parts, or None.

        Returns:
            The dim.

        Raises:
            UserError: For anything else.
        """
        if text is None:
            return cls()
        count, star, name = text.rpartition("*") if isinstance(text, str) else ("", "", "")
        if not name.strip() or (star and not (count.strip().isdecimal() and int(count))):
            raise UserError(
                f"{text!r} is no name of a dim", "Write 'hidden', '3*heads' (packed), or None."
            )
        return cls(name.strip(), (1,) * int(count) if star else ())

    def blocks(self, size: int) -> tuple[int, ...]:
        """The sizes of its parts.

        Args:
            size: Elements of the dim.

        Returns:
            They add up to ``size``; () for a dim of a single part.
        """
        total = sum(self.parts)
        return tuple(size * part // total for part in self.parts)

    def divides(self, size: int, shards: int) -> bool:
        """Whether ``size`` elements of it can be given to ``shards`` tasks, evenly.

        Args:
            size: Elements of the dim.
            shards: Tasks along the axis.

        Returns:
            Whether every part, in whole units, divides.
        """
        parts = self.parts or (1,)
        each, rest = divmod(size, sum(parts))
        return not rest and not any(part * (self.units or each) % shards for part in parts)

    def __str__(self) -> str:
        name = "-" if self.name is None else self.name
        return f"{len(self.parts)}*{name}" if self.parts else name


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the dims of one tensor lie.

    Args:
        axes: For each dim the axis that it is cut along, None for whole.
        uneven: The dims that a rule is about, and that do not divide: they stay whole.
    """

    axes: tuple[str | None, ...]
    uneven: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Layout:
    """Ordered rules, as Flax's logical ones: for each dim the first that is free wins.

    An axis is used once in a tensor.

    Args:
        rules: Pairs of a dim and an axis.
        axes: The sizes of the mesh's axes.

    Raises:
        UserError: For an axis that the mesh lacks, an axis that no rule uses (one of `AXES` may
            have size 1), or a dim beside the batch on the batch's axis.
    """

    rules: tuple[tuple[str, str], ...]
    axes: Mapping[str, int]

    def __post_init__(self) -> None:
        for dim, axis in self.rules:
            if axis not in self.axes:
                raise UserError(
                    f"layout: {dim!r} on the axis {axis!r}, which the mesh has not",
                    nearest(axis, self.axes),
                )
            if dim != BATCH and axis == self.batch_axis:
                raise UserError(
                    f"layout: {dim!r} on the axis {axis!r}, which divides the batch",
                    "Give it another axis of the mesh. To divide parameters over the tasks that "
                    "divide the batch, choose strategy 'sharded'.",
                )
        used = {axis for _, axis in self.rules}
        for axis, size in self.axes.items():
            if axis not in used and (size > 1 or axis not in AXES):
                close = get_close_matches(axis, (AXES | used) - {axis}, n=1)
                raise UserError(
                    f"layout: no rule is about the axis {axis!r} of size {size}, whose tasks would "
                    "all do the same",
                    (f"Did you mean {close[0]!r}? Else name" if close else "Name")
                    + f" a dim for it, as ('hidden', {axis!r}), or leave it out of the mesh.",
                )

    @property
    def batch_axis(self) -> str | None:
        """The axis along which the batch is divided."""
        return next((axis for dim, axis in self.rules if dim == BATCH), None)

    def rows_from(self, axis: str) -> float:
        """From how many bytes on a sum over an axis stays cut by rows.

        Args:
            axis: Its name.

        Returns:
            Infinity where no rule says that it does.
        """
        return ROWS_FROM if (ROWS, axis) in self.rules else math.inf

    def lay(
        self, dims: Sequence[Dim], shape: Sequence[int], name: str = "", exact: bool = False
    ) -> Placement:
        """What the rules make of one tensor.

        Args:
            dims: The names of its dims.
            shape: Its whole shape.
            name: What errors call it.
            exact: Whether two dims that want one axis are an error; else the first has it.

        Returns:
            Where each dim lies.

        Raises:
            UserError: Where ``exact`` and two dims want one axis.
        """
        axes: list[str | None] = []
        uneven: list[int] = []
        taken: dict[str, Dim] = {}
        for number, (dim, size) in enumerate(zip(dims, shape, strict=True)):
            wanted = [a for rule, a in self.rules if rule == dim.name and self.axes[a] > 1]
            free = [axis for axis in wanted if axis not in taken]
            if exact and wanted and not free:
                raise UserError(
                    f"{name}: the dims {str(taken[wanted[0]])!r} and {str(dim)!r} of one tensor "
                    f"are both on the axis {wanted[0]!r}",
                    "An axis divides a tensor once: name one of them otherwise, or None.",
                )
            fits = [axis for axis in free if dim.divides(size, self.axes[axis])]
            if free and not fits:
                uneven.append(number)
            if fits:
                taken[fits[0]] = dim
            axes.append(fits[0] if fits else None)
        return Placement(tuple(axes), tuple(uneven))


def read_rules(layout: Any) -> tuple[tuple[str, str], ...]:
    """The rules that a user wrote.

    Args:
        layout: Pairs ``(dim, axis)`` in a list, or a dict.

    Returns:
        The pairs in their order.

    Raises:
        UserError: For anything else.
    """
    given: Iterable[Any] = layout.items() if isinstance(layout, Mapping) else layout
    found = []
    for rule in given if isinstance(given, Iterable) and not isinstance(given, str) else [given]:
        pair = tuple(rule) if isinstance(rule, Sequence) and not isinstance(rule, str) else ()
        if len(pair) != 2 or not all(isinstance(one, str) for one in pair):
            raise UserError(
                f"layout: {rule!r} is no rule", "A rule is a dim and an axis: ('hidden', 'model')."
            )
        found.append((pair[0], pair[1]))
    return tuple(found)


def check_dims(rules: Iterable[tuple[str, str]], has: Mapping[str, int]) -> None:
    """Refuse rules about dims that nothing has.

    Args:
        rules: Pairs of a dim and an axis.
        has: The dims of the model, and how many of its tensors have each.

    Raises:
        UserError: For a dim that neither the model has nor any module that Spartito knows.
    """
    for dim, _ in rules:
        if dim != BATCH and dim not in has and dim not in dict(DEFAULT):
            listed = ", ".join(f"{name} ({count} tensors)" for name, count in has.items())
            raise UserError(
                f"layout: no tensor of the model has a dim {dim!r}",
                f"{nearest(dim, [BATCH, *has])} The model has {listed or 'no named dims'}; "
                "names={pattern: dims} gives others.",
            )
