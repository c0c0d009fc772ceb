"""Which tasks are connected with which, and which data shard each of them reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from spartito.cluster.spec import ClusterSpec
from spartito.collectives.collective import Collective, IdentityCollective
from spartito.collectives.membership.rendezvous import WORLD, Rendezvous
from spartito.mesh.axes import PIPELINE, Mesh
from spartito.steps.groups import AXIS, COPIES, DATA, LAYERS, MODEL, SHARDS, one_shard_each

Connected = Mapping[str, Collective]


class Topology(Protocol):
    """The groups of the tasks of a step; it knows no models."""

    def shard(self, tasks: ClusterSpec) -> tuple[int, int]:
        """Which data shard is this task's, as (index, count). Pure."""
        ...

    def connect(self, rendezvous: Rendezvous, cluster: ClusterSpec) -> Connected:
        """Find this task's groups; all tasks call it, when the first one is needed.

        Args:
            rendezvous: Makes groups of ranks, for tasks that ask for them in the same order.
            cluster: The tasks that train.

        Returns:
            The collectives "world", "data" and "model", and what more the parts ask for.

        Raises:
            TaskLostError: If a task does not come in time.
        """
        ...


@dataclass(frozen=True)
class OneShardEach:
    """Every task has a data shard of its own, and a whole model."""

    def shard(self, tasks: ClusterSpec) -> tuple[int, int]:
        """As `Topology.shard`."""
        return tasks.rank, tasks.world_size

    def connect(self, rendezvous: Rendezvous, cluster: ClusterSpec) -> Connected:
        """As `Topology.connect`."""
        return one_shard_each(rendezvous, cluster)


@dataclass(frozen=True)
class Rows:
    """A mesh of ``copies`` rows: the tasks of a row have shards of one model between them."""

    copies: int = 1

    def shard(self, tasks: ClusterSpec) -> tuple[int, int]:
        """As `Topology.shard`."""
        return tasks.rank, tasks.world_size

    def connect(self, rendezvous: Rendezvous, cluster: ClusterSpec) -> Connected:
        """As `Topology.connect`."""
        world, alone = rendezvous.group(), IdentityCollective()
        found: dict[str, Collective] = {WORLD: world, DATA: world, MODEL: alone}
        if self.copies == 1:
            return {**found, SHARDS: world, COPIES: alone}
        size = cluster.world_size // self.copies
        row = cluster.rank - cluster.rank % size
        column = range(cluster.rank % size, cluster.world_size, size)
        return {
            **found,
            SHARDS: rendezvous.group(SHARDS, range(row, row + size)) if size > 1 else alone,
            COPIES: rendezvous.group(COPIES, column),
        }


@dataclass(frozen=True)
class Grid:
    """The tasks along the axes of a mesh.

    Args:
        mesh: Its axes and their sizes.
        batch: The axis that divides the batch; None: there is none.
        has_shards: Whether those with the same part of a model keep shards of it.
    """

    mesh: Mesh
    batch: str | None
    has_shards: bool = False

    def shard(self, tasks: ClusterSpec) -> tuple[int, int]:
        """As `Topology.shard`."""
        if self.batch is None:
            return 0, 1
        return self.mesh.coordinates(tasks.rank)[self.batch], self.mesh.axes[self.batch]

    def connect(self, rendezvous: Rendezvous, cluster: ClusterSpec) -> Connected:
        """As `Topology.connect`: all, the data shards, the model, and each axis."""
        rank, mesh, batch = cluster.rank, self.mesh, self.batch
        here = mesh.coordinates(rank)
        ranks = range(mesh.size)
        beside = [r for r in ranks if batch is None or mesh.coordinates(r)[batch] == here[batch]]
        found = {WORLD: rendezvous.group()}
        found[DATA] = rendezvous.group(DATA, mesh.along(batch, rank) if batch else [rank])
        found[MODEL] = rendezvous.group(MODEL, beside)
        there = here.get(PIPELINE)
        layers = [r for r in beside if mesh.coordinates(r).get(PIPELINE) == there]
        wanted = {AXIS + axis: mesh.along(axis, rank) for axis in mesh.axes if axis != batch}
        made = {tuple(beside): found[MODEL]}
        for name, along in {LAYERS: layers, **wanted}.items():
            key = tuple(along)
            made[key] = found[name] = made.get(key) or rendezvous.group(name, along)
        shards = {SHARDS: found[DATA], COPIES: IdentityCollective()} if self.has_shards else {}
        return {**found, **shards}
