"""Which loop a training has."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spartito.data.dataset import Dataset
from spartito.steps.recovery import Regrouping
from spartito.steps.servers.coordination import LeasedCoordination
from spartito.training.loops.chief_loop import JournaledLoop
from spartito.training.loops.recovering_loop import RecoveringLoop
from spartito.training.loops.training_loop import TrainingLoop

if TYPE_CHECKING:
    from spartito.training.trainer import Trainer


def make_loop(trainer: Trainer, chain: Dataset, before: TrainingLoop | None) -> TrainingLoop:
    """The loop of a trainer over a data set: one that recovers where its strategy does."""
    if isinstance(trainer.coordination, LeasedCoordination):
        keeps = trainer.coordination.keeps
        return (JournaledLoop if keeps else TrainingLoop)(trainer, chain, before)
    recovers = isinstance(trainer.strategy.engine.recovery, Regrouping)
    return (RecoveringLoop if recovers else TrainingLoop)(trainer, chain, before)
