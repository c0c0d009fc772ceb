"""Equal copies on the chips of TPU slices."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from spartito.engine.devices.full_batches import FullBatches
from spartito.steps.exchanges.all_reduce import AllReduce
from spartito.steps.parts import Parts
from spartito.steps.placements.computation import WholeModel
from spartito.steps.placements.replicated import replicas
from spartito.steps.team import Team
from spartito.strategies.declaration import Strategy


@dataclass(frozen=True, kw_only=True, eq=False)
class TPUStrategy(Strategy):
    """One replica per process, one process per chip, over the chips of one or more slices.

    What runs on a TPU is compiled for the shapes of its tensors, so batches are kept at one size.
    Not run on a TPU: tested with the package for them on another machine.

    Args:
        fill: Whether a batch that is smaller than the largest before is filled up with copies that
            count for nothing. Models whose rows depend on each other, and trainings with
            ``deterministic``, get batches as they are in any case.
        device: The kind of devices; another one serves for trials.
    """

    name = "tpu"

    fill: bool = True
    device: torch.device | str | None = "tpu"

    def parts(self, team: Team) -> Parts:
        exchange = AllReduce(team)
        computation = WholeModel(team, run=FullBatches()) if self.fill else None
        return replicas(team, exchange, computation)
