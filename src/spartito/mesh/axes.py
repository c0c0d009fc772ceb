"""The mesh: tasks in rows and columns, each direction an axis with a name."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from spartito.errors import UserError
from spartito.numeric import is_whole

DATA = "data"
"""The axis along which the batch is cut; all others split the model."""
PIPELINE = "pipeline"
"""The axis along which the layers are divided; no tensor is cut there."""


@dataclass(frozen=True)
class Mesh:
    """Named axes and their sizes; ranks are numbered row by row, the last axis fastest.

    ``Mesh({"data": 2, "model": 2}).coordinates(1) == {"data": 0, "model": 1}``.

    Args:
        axes: The size of each axis, by its name.

    Raises:
        UserError: An axis without a size of 1 or more, or no axis.
    """

    axes: Mapping[str, int]

    def __post_init__(self) -> None:
        object.__setattr__(self, "axes", dict(self.axes))
        wrong = [
            name for name, size in self.axes.items() if not name or not is_whole(size) or size < 1
        ]
        if wrong or not self.axes:
            raise UserError(
                f"mesh={self.axes}", 'Give each axis a size of 1 or more: {"data": 2, "model": 2}.'
            )

    def __hash__(self) -> int:
        return hash(tuple(self.axes.items()))

    @cached_property
    def size(self) -> int:
        """How many tasks it has."""
        return math.prod(self.axes.values())

    def coordinates(self, rank: int) -> dict[str, int]:
        """Where ``rank`` is on each axis."""
        found = {}
        for name, size in reversed([*self.axes.items()]):
            rank, found[name] = divmod(rank, size)
        return {name: found[name] for name in self.axes}

    def rank(self, coordinates: Mapping[str, int]) -> int:
        """The rank that is there; the inverse of `coordinates`."""
        rank = 0
        for name, size in self.axes.items():
            rank = rank * size + coordinates[name]
        return rank

    def along(self, axis: str, rank: int) -> list[int]:
        """The ranks of the group of ``rank`` along ``axis``, in the order of the axis."""
        here = self.coordinates(rank)
        return [self.rank({**here, axis: index}) for index in range(self.axes[axis])]

    def check(self, tasks: int) -> None:
        """Raise `UserError` unless the job has as many tasks as the mesh."""
        if tasks != self.size:
            text = " x ".join(f"{name} {size}" for name, size in self.axes.items())
            raise UserError(
                f"a mesh of {text} = {self.size} tasks in a job of {tasks}",
                f"Start {self.size} tasks, or give axes whose sizes multiply to {tasks}.",
            )
