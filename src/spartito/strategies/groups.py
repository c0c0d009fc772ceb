"""The named groups of tasks that a task belongs to."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from spartito.collectives.collective import Collective, IdentityCollective

WORLD = "world"
"""All tasks that train together."""
DATA = "data"
"""One task for each data shard: their gradients, metrics and statistics are summed."""
MODEL = "model"
"""The tasks that compute one data shard together, each with its part of the model."""


class Groups(Mapping[str, Collective]):
    """Collectives by name; the tasks meet when one of them is needed first, or at `meet`.

    ``connect`` makes them, and has to be called by all tasks. A task has a rank and a size in
    each group: ``groups["data"].rank``, ``groups["data"].world_size``.
    """

    def __init__(self, connect: Callable[[], Mapping[str, Collective]]) -> None:
        self._connect = connect
        self._found: Mapping[str, Collective] = {}

    @classmethod
    def alone(cls) -> Groups:
        """A task that is alone in every group."""
        own = IdentityCollective()
        return cls(lambda: {WORLD: own, DATA: own, MODEL: IdentityCollective()})

    @property
    def world(self) -> Collective:
        """All tasks."""
        return self[WORLD]

    @property
    def data(self) -> Collective:
        """One task for each data shard."""
        return self[DATA]

    @property
    def model(self) -> Collective:
        """The tasks that share this one's data shard."""
        return self[MODEL]

    def meet(self) -> Mapping[str, Collective]:
        """Connect the groups, unless they are."""
        if not self._found:
            self._found = self._connect()
        return self._found

    def close(self) -> None:
        """Leave all groups; who never met has nothing to leave."""
        for group in {id(group): group for group in self._found.values()}.values():
            group.close()

    def __getitem__(self, name: str) -> Collective:
        return self.meet()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.meet())

    def __len__(self) -> int:
        return len(self.meet())
