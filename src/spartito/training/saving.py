"""A checkpoint of a whole training, written by all of its tasks together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spartito.checkpoint.manager import write_sections
from spartito.storage.atomic import write_directory
from spartito.training.schedule import scheduler_state

if TYPE_CHECKING:
    from spartito.training.trainer import Trainer

About = Callable[[], Mapping[str, Any]]
"""What a manifest is to say beside the files, as JSON; asked on the chief."""


def save_training(trainer: Trainer, path: str | Path, about: About | None) -> None:
    """Write a checkpoint; all tasks call it, and have the same error where it fails."""
    attempt = trainer.coordination.attempt
    with ExitStack() as stack:

        def begin() -> str:
            if not trainer.is_chief:
                return ""
            told = {**_position(trainer), **(about() if about else {})}
            return str(stack.enter_context(write_directory(path, told)))

        def end() -> str:
            if trainer.is_chief:
                write_sections(directory, {"trainer": own})
            stack.close()
            return ""

        directory = Path(attempt(begin)[0])
        trainer.strategy.save(directory)
        own = _state(trainer)
        attempt(end)


def _position(trainer: Trainer) -> dict[str, Any]:
    """Where the training is, and on what, for people who look into a manifest."""
    coordination = trainer.coordination
    return {
        "strategy": coordination.name,
        "tasks": coordination.cluster.num_computing,
        "step": trainer.step,
        "epoch": trainer.epoch,
    }


def _state(trainer: Trainer) -> dict[str, Any]:
    """What training needs to go on beside model and optimizer; all replicas call it."""
    return {
        "step": trainer.step,
        "epoch": trainer.epoch,
        "seed": trainer.seed,
        "scheduler": scheduler_state(trainer.scheduler),
        "loop": trainer._loop.state_dict() if trainer._loop else None,
        "callbacks": [[type(given).__name__, given.state_dict()] for given in trainer._given],
    }
