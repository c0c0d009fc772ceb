"""One model on several tasks: each has a part of every tensor, as a layout by names says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from spartito.engine.gradients.compression import Compress
from spartito.errors import UserError
from spartito.mesh.describe import Description
from spartito.mesh.layout import DEFAULT, read_rules
from spartito.steps.exchanges.all_reduce import AllReduce
from spartito.steps.exchanges.sharded import BLOCK, Sharded
from spartito.steps.parts import Exchange, Parts
from spartito.steps.placements.tensor_parallel import (
    InColumns,
    TensorParallel,
    check_recovery,
    mesh_of,
)
from spartito.steps.recovery import EndsWithLoss, Recovering, Regrouping
from spartito.steps.team import Team
from spartito.steps.topology import Grid
from spartito.strategies.declaration import Strategy


@dataclass(frozen=True, kw_only=True, eq=False)
class MeshStrategy(Strategy):
    """Tensors are cut along the axes of a mesh, by rules about their named dims.

    The model stays as it was written. The results are those of one device; the layout decides
    on time and memory alone.

    Args:
        mesh: The sizes of its axes, ``{"data": 2, "model": 2}``; tasks are numbered row by
            row, the last axis fastest. None: ``model`` tasks hold one model.
        layout: Ordered rules ``(dim, axis)``, or a dict: for each dim of a tensor the first
            rule whose axis the tensor does not use yet. The axis of "batch" has the data
            shards.
        names: Patterns of parameters' paths, as ``"blocks.*.up.weight"``, and the names of
            their dims, which win over those of their module's type: ``("hidden", None)``;
            ``"3*heads"`` is packed queries, keys and values.
        strict: Whether dims that do not divide are refused; else they stay whole.
        model: Short for ``mesh={"data": tasks / model, "model": model}``; None: all tasks.
        zero: 1, 2 or 3: what tasks with the same part of the model keep in shards among them, as
            under `ShardedStrategy`; 0: nothing.
        block_bytes: As under `ShardedStrategy`.
        compress: As under `MultiWorkerMirroredStrategy`, along the axis of the data shards.
    """

    name = "mesh"
    recovers = True

    mesh: Mapping[str, int] | None = None
    layout: Any = DEFAULT
    names: Mapping[str, Sequence[str | None]] | None = None
    strict: bool = False
    model: int | None = None
    zero: int = 0
    block_bytes: int = BLOCK
    compress: Compress = None

    def parts(self, team: Team) -> Parts:
        if self.mesh is not None and self.model is not None:
            raise UserError(
                f"mesh={dict(self.mesh)} and model={self.model}",
                "model=2 is short for a mesh: give one.",
            )
        if team.communication == "ddp":
            raise UserError(
                "communication='ddp' on a mesh: DDP takes models that are whole",
                "Leave it out, or choose strategy 'mirrored'.",
            )
        rules, tasks = read_rules(self.layout), team.tasks.world_size
        mesh, layout = mesh_of(self.mesh, self.model, rules, tasks, team.job.is_evaluator)
        mesh.check(tasks)
        topology = Grid(mesh, layout.batch_axis, self.zero > 0)
        exchange: Exchange = AllReduce(team, compress=self.compress, overlaps=False)
        if self.zero:
            exchange = Sharded(team, self.zero, self.block_bytes, compress=self.compress)
        placement = TensorParallel(team, exchange, mesh, layout, self.names, self.strict)
        recovery: Recovering = EndsWithLoss()
        if team.recovery is not None:
            check_recovery(team, topology.shard(team.tasks)[1], self.zero)
            copies = InColumns(team, placement)
            recovery = Regrouping(team, copies, placement.gradients, exchange)
        return Parts(topology, placement, exchange, recovery)

    def describe(self, model: nn.Module, example: Any = None, loss: Any = None) -> Description:
        """What the layout does to a model, before any step and without the other tasks.

        Args:
            model: A whole one; it is not changed.
            example: An input, a tuple or a dict of inputs of one task, of which shapes matter
                alone; None tries some that the first layer could take.
            loss: A function of the output alone; None is the sum of all that is in it.

        Returns:
            What ``print`` shows: each tensor with its dims, where it lies and its bytes on a task,
            the collectives of one step by module, and warnings.

        Raises:
            UserError: For a layout that `prepare` would refuse.
        """
        found: Description = self.engine.parts.placement.describe(model, example, loss)  # type: ignore[attr-defined]
        return found
