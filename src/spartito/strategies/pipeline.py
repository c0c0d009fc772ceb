"""Pipelines: each task computes some layers, and microbatches pass from one to the next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from spartito.mesh.describe import Description
from spartito.mesh.layout import DEFAULT
from spartito.steps.sharding import BLOCK
from spartito.strategies.declaration import Strategy


@dataclass(frozen=True, eq=False)
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
        schedule: "gpipe", "1f1b", "interleaved" (several stages for each task), "zero_bubble"
            (gradients of weights are put off to fill gaps).
        split: "auto" balances the stages by the time of each part in the first batch. Or paths
            of modules, as ``["blocks.2"]``: with each a new stage begins.
        stages_per_task: None: 2 if interleaved, else 1.
        mesh: The sizes of its axes, ``{"pipeline": 2, "data": 2, "model": 2}``: those along
            "pipeline" have the stages, the others are as under `MeshStrategy`. None: a
            pipeline of all tasks, or as many as ``stages`` leaves.
        layout: As under `MeshStrategy`, like the two that follow.
        names: Patterns of parameters' paths, and the names of their dims.
        strict: Whether dims that do not divide are refused.
        zero: 1, 2 or 3: what tasks with the same layers keep in shards among them, as under
            `ShardedStrategy`; 0: nothing.
        block_bytes: As under `ShardedStrategy`.
    """

    name = "pipeline"
    implementation = "spartito.steps.pipeline:PipelineStep"

    stages: int | None = None
    microbatches: int = 8
    schedule: str = "1f1b"
    split: str | Sequence[str] = "auto"
    stages_per_task: int | None = None
    mesh: Mapping[str, int] | None = None
    layout: Any = DEFAULT
    names: Mapping[str, Sequence[str | None]] | None = None
    strict: bool = False
    zero: int = 0
    block_bytes: int = BLOCK

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
        found: Description = self.engine.describe(model, example, loss)  # type: ignore[attr-defined]
        return found
