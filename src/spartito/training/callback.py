"""What happens around the loop: a base class whose hooks do nothing, and what it may look at."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from spartito.engine.loss import LossFunction
from spartito.errors import UserError
from spartito.strategies import Strategy
from spartito.strategies.coordination import Coordination
from spartito.training.history import History
from spartito.training.metrics import Metric

if TYPE_CHECKING:
    from spartito.training.schedule import Schedule

Logs = Mapping[str, Any]


class Training(Protocol):
    """A `Trainer` as the loop and the callbacks see it.

    ``step`` counts global steps since the first `fit`, ``epoch`` finished epochs; ``epochs`` is
    where the running `fit` ends, ``steps_per_epoch`` None where nobody knows. Any replica may
    set ``stop_training``: all stop together, after the next step at the latest.
    ``left_to_evaluator`` says that a task of its own validates: epochs report no ``val_``.
    """

    model: nn.Module
    optimizer: Optimizer
    loss: LossFunction | None
    metrics: list[Metric]
    scheduler: LRScheduler | ReduceLROnPlateau | None
    schedule: Schedule
    strategy: Strategy
    coordination: Coordination
    is_chief: bool
    callbacks: list[Callback]
    history: History
    step: int
    epoch: int
    epochs: int
    steps_per_epoch: int | None
    batch_size: int | None
    examples: int | None
    stop_training: bool
    left_to_evaluator: bool
    precision: str
    deterministic: bool
    seed: int
    run_dir: Path | None
    about: dict[str, Any]

    @property
    def data_wait_fraction(self) -> float:
        """The fraction of this epoch's time so far that this replica waited for data."""
        ...

    @property
    def examples_per_second(self) -> float:
        """Examples that all replicas trained on per second of this epoch so far."""
        ...

    def save(self, path: str | Path, about: Callable[[], Mapping[str, Any]] | None = None) -> Path:
        """Write a checkpoint; all replicas call it."""
        ...

    def load(self, path: str | Path) -> None:
        """Take back a checkpoint."""
        ...


class Callback:
    """Hooks around training, named as in Keras; override those that you need.

    Every hook runs on every replica, and ``logs`` of an epoch are equal on all of them. The
    ``logs`` of a batch are read lazily: what is not looked at costs nothing. ``loss`` there is
    exact over all replicas, other metrics are this replica's share until the epoch ends.
    """

    trainer: Training

    def set_trainer(self, trainer: Training) -> None:
        """Called once before anything else."""
        self.trainer = trainer

    def on_train_begin(self) -> None:
        """Before the first epoch of a `fit`."""

    def on_train_end(self) -> None:
        """After the last epoch of a `fit`, not after an error."""

    def on_train_error(self, error: BaseException) -> None:
        """When a `fit` ends by an exception (Ctrl-C too), which then goes on its way."""

    def on_epoch_begin(self, epoch: int) -> None:
        """Before epoch ``epoch``, counted from 0."""

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        """After epoch ``epoch`` and its validation; ``logs`` as in ``history.jsonl``."""

    def on_train_batch_end(self, batch: int, logs: Logs) -> None:
        """After global step ``batch`` of the epoch, counted from 0."""

    def state_dict(self) -> dict[str, Any]:
        """What must be remembered to resume, as JSON."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` returned."""


def check_given(callbacks: Callback | Sequence[Callback]) -> list[Callback]:
    """The callbacks that a user gave, one or several; `UserError` for what is none."""
    given = [callbacks] if isinstance(callbacks, Callback) else list(callbacks)
    for callback in given:
        if isinstance(callback, type):
            raise UserError(f"{callback.__name__} is a class", f"Give {callback.__name__}().")
        if not isinstance(callback, Callback):
            raise UserError(f"{callback!r} is no callback", "Give a list of sp.Callback.")
    return given
