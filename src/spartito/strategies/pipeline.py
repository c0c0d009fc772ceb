"""Pipelines: each task computes some layers, and microbatches pass from one to the next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from spartito.engine.gradients.compression import Compress
from spartito.errors import UserError
from spartito.mesh.axes import PIPELINE, Mesh
from spartito.mesh.describe import Description
from spartito.mesh.layout import DEFAULT, read_rules
from spartito.pipeline import schedules
from spartito.pipeline.schedules import Shape
from spartito.steps.exchanges.all_reduce import AllReduce
from spartito.steps.exchanges.sharded import Sharded
from spartito.steps.parts import Exchange, Parts
from spartito.steps.placements.stage_passes import check_options
from spartito.steps.placements.stages import Lines, Stages, layout_without_stages, mesh_of_stages
from spartito.steps.placements.tensor_parallel import InColumns, TensorParallel, check_recovery
from spartito.steps.recovery import Regrouping
from spartito.steps.team import Team
from spartito.steps.topology import Grid
from spartito.strategies.declaration import Strategy


@dataclass(frozen=True, kw_only=True, eq=False)
class PipelineStrategy(Strategy):
    """The layers of a model are divided among tasks; batches pass them in microbatches.

    The model stays as it is, and each task keeps the parameters and the optimizer's state of its
    own stages. Several pipelines each take a data shard of the batch. On a mesh with further axes
    the tensors of each stage are cut along these, as under `MeshStrategy`. The chief has the last
    stage, and with it the loss and the output.

    Args:
        stages: Parts of the model; None: as many as there are tasks.
        microbatches: Parts of each data shard's batch; of a batch with fewer rows, one of each
            row. BatchNorm sees one at a time, as if so many small batches were accumulated.
        schedule: "gpipe", "1f1b", "interleaved" (two stages for each task; "interleaved:3"
            three), "zero_bubble" (gradients of weights are put off to fill gaps).
        split: "auto" balances the stages by the time of each part in the first batch. Or paths
            of modules, as ``["blocks.2"]``: with each a new stage begins.
        mesh: The sizes of its axes, ``{"pipeline": 2, "data": 2, "model": 2}``: those along
            "pipeline" have the stages, the others are as under `MeshStrategy`. None: a
            pipeline of all tasks, or as many as ``stages`` leaves.
        layout: As under `MeshStrategy`, like the two that follow.
        names: Patterns of parameters' paths, and the names of their dims.
        strict: Whether dims that do not divide are refused.
        zero: 1, 2 or 3: what tasks with the same layers keep in shards among them, as under
            `ShardedStrategy`; 0: nothing.
        compress: As under `MultiWorkerMirroredStrategy`, among the tasks with the same layers.
    """

    name = "pipeline"
    recovers = True
    without = ("sync_batchnorm",)

    stages: int | None = None
    microbatches: int = 8
    schedule: str = "1f1b"
    split: str | Sequence[str] = "auto"
    mesh: Mapping[str, int] | None = None
    layout: Any = DEFAULT
    names: Mapping[str, Sequence[str | None]] | None = None
    strict: bool = False
    zero: int = 0
    compress: Compress = None

    def parts(self, team: Team) -> Parts:
        check_options(self.stages, self.microbatches, self.split)
        schedule, per_task = schedules.parse(self.schedule)
        if team.communication == "ddp":
            raise UserError(
                "communication='ddp' in a pipeline", "DDP wraps whole models: take 'auto'."
            )
        rules, tasks = read_rules(self.layout), team.tasks.world_size
        mesh = mesh_of_stages(self.mesh, self.stages, per_task, tasks)
        if team.job.is_evaluator:  # alone: it has the whole model
            mesh = Mesh(dict.fromkeys(mesh.axes, 1))
        mesh.check(tasks)
        layout = layout_without_stages(rules, mesh, default=rules == DEFAULT)
        lines = Lines(Grid(mesh, layout.batch_axis, self.zero > 0), per_task)
        exchange: Exchange = AllReduce(team, compress=self.compress, overlaps=False)
        if self.zero:
            exchange = Sharded(team, self.zero, gathers=False, compress=self.compress)
        inside = TensorParallel(team, exchange, mesh, layout, self.names, self.strict)
        shape = Shape(mesh.axes[PIPELINE], per_task, self.microbatches)
        placement = Stages(team, lines, inside, exchange, shape, schedule, self.split)
        if team.recovery is None:
            return Parts(lines, placement, exchange)
        check_recovery(team, lines.shard(team.tasks)[1], self.zero)
        copies, stage = InColumns(team, placement), placement.pipelines.own.start
        recovery = Regrouping(team, copies, placement.gradients, exchange, stage)
        return Parts(lines, placement, exchange, recovery)

    def describe(self, model: nn.Module, example: Any = None, loss: Any = None) -> Description:
        """As `MeshStrategy.describe`, of the tensors along the other axes.

        Args:
            model: A whole one; it is not changed.
            example: An input of one task, of which shapes matter alone.
            loss: A function of the output alone.

        Returns:
            What ``print`` shows.

        Raises:
            UserError: For a layout that `prepare` would refuse.
        """
        found: Description = self.engine.parts.placement.describe(model, example, loss)  # type: ignore[attr-defined]
        return found
