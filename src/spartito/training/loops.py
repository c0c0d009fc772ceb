"""Which loop a training has."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spartito.data.dataset import Dataset
from spartito.training.loop import TrainingLoop
from spartito.training.recovering import RecoveringLoop

if TYPE_CHECKING:
    from spartito.training.trainer import Trainer


def make_loop(trainer: Trainer, chain: Dataset, before: TrainingLoop | None) -> TrainingLoop:
    """The loop of a trainer over a data set: one that recovers where its strategy does."""
    recovers = getattr(trainer.strategy, "recovery", None) is not None
    return (RecoveringLoop if recovers else TrainingLoop)(trainer, chain, before)
