"""Steps that are tried and undone: what a search for a setting makes."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from spartito.data.batch import Batch
from spartito.engine.devices.host_reads import read
from spartito.engine.logged import listening
from spartito.engine.modules.step_undo import Undo
from spartito.engine.randomness.seed import random_state, set_random_state
from spartito.engine.updates.optimizers import NoOptimizer, unwrap
from spartito.errors import UserError
from spartito.heartbeat import STEP, beat
from spartito.steps.distributed import Distributed
from spartito.storage.tensors import copied

if TYPE_CHECKING:
    from spartito.training.trainer import Trainer


class Update(NamedTuple):
    """One update.

    Args:
        loss: The mean over all replicas; NaN where nothing counts.
        batches: How many global batches it took.
    """

    loss: float
    batches: int


def check_meets(trainer: Trainer, call: str) -> None:
    """Refuse a search where no step of all tasks can be tried.

    Args:
        trainer: Whose model it is about.
        call: The name of the search.

    Raises:
        UserError: Workers do not meet in a step, or nothing is trained.
    """
    if trainer.strategy.engine.cluster.addresses.get("ps"):
        raise UserError(
            f"{call} under {trainer.strategy}, whose workers do not meet in a step",
            "Find it on one device: python train.py.",
        )
    if isinstance(trainer.optimizer, NoOptimizer):
        raise UserError(f"{call}() without an optimizer", "Give the Trainer an optimizer.")


@contextmanager
def undone(trainer: Trainer) -> Iterator[None]:
    """A block of steps after which model, optimizer and generators are what they were.

    Where several tasks step together and one fails, nothing is put back: the others wait in a step.

    Args:
        trainer: Whose steps they are; all tasks enter.
    """
    strategy = trainer.strategy
    modes = [(module, module.training) for module in trainer.model.modules()]
    before, random = copied(strategy.engine.state_dict()), random_state()
    buffers = Undo(unwrap(trainer.model))  # no checkpoint has all of them
    buffers.begin(looks=True)
    is_alone = trainer.coordination.cluster.world_size == 1
    with trainer._stepping(True):
        trainer.modes.begin(trainer.model, False)
        try:
            yield
        except BaseException:
            if is_alone:
                buffers.undo()
                strategy.load(before)
            raise
        else:
            buffers.undo()
            strategy.load(before)
        finally:
            set_random_state(random)
            for module, mode in modes:
                module.training = mode


def update(trainer: Trainer, batches: Iterator[Batch]) -> Update:
    """Make one update; all tasks call it.

    Args:
        trainer: Whose it is.
        batches: Of `without_end`.
    """
    count = 0
    while True:
        beat(None, STEP)
        with listening(None):
            result = trainer.strategy.step(next(batches), trainer.loss)
        total, weight = read([result.loss, result.weight])
        count += 1
        if result.updates:
            return Update(total / weight if weight else math.nan, count)


def without_end(batches: Distributed) -> Generator[Batch]:
    """The batches of pass after pass."""
    while True:
        yield from batches
