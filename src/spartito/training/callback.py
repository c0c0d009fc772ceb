"""What happens around the loop: a base class whose hooks do nothing, and what it may look at."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from spartito.engine.losses.loss import LossFunction
from spartito.errors import UserError
from spartito.steps.coordination import Coordination
from spartito.strategies import Strategy
from spartito.training.fitting.preemption import Notice
from spartito.training.fitting.train_modes import Modes
from spartito.training.history import History
from spartito.training.metrics import Metric

if TYPE_CHECKING:
    from spartito.training.fitting.nonfinite import Skips
    from spartito.training.fitting.schedule import Schedule

Logs = Mapping[str, Any]
Where = TypeVar("Where", str, Path)
"""A path, or the text of one or of a URL."""


class Training(Protocol):
    """A `Trainer` as the loop and the callbacks see it.

    ``step`` counts global steps since the first `fit`, ``epoch`` finished epochs; ``epochs`` is
    where the running `fit` ends, ``steps_per_epoch`` None where nobody knows. Any replica may
    set ``stop_training``: all stop together, after the next step at the latest. ``went_on`` says
    that the running `fit` lost a task: files of it may be another process's.
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
    went_on: bool
    left_to_evaluator: bool
    precision: str
    deterministic: bool
    seed: int
    on_nonfinite: str
    skips: Skips
    run_dir: Path | None
    about: dict[str, Any]
    notice: Notice
    modes: Modes

    @property
    def is_at_end(self) -> bool:
        """Whether as many steps are done as `fit` was asked for."""
        ...

    @property
    def ends_next(self) -> bool:
        """Whether the next update is the last one that `fit` was asked for."""
        ...

    @property
    def data_wait_fraction(self) -> float:
        """The fraction of this epoch's time so far that this replica waited for data."""
        ...

    @property
    def examples_per_second(self) -> float:
        """Examples that all replicas trained on per second of this epoch so far."""
        ...

    def save(
        self,
        path: Where,
        about: Callable[[], Mapping[str, Any]] | None = None,
        *,
        asynchronous: bool = False,
        then: Callable[[], None] | None = None,
        otherwise: Callable[[], None] | None = None,
    ) -> Where:
        """Write a checkpoint; all replicas call it."""
        ...

    def wait(self) -> None:
        """Wait until it is written; all replicas call it."""
        ...

    def load(self, path: str | Path) -> None:
        """Take back a checkpoint."""
        ...


class Callback:
    """Hooks around training, named as in Keras; override those that you need.

    Every hook runs on every replica (under ``parameter_server`` on the chief), and ``logs`` of an
    epoch are equal on all of them. The ``logs`` of a batch are read lazily: what is not looked
    at costs nothing, and a hook that is not overridden is never called. In training ``loss``
    there is exact over all replicas (under ``parameter_server`` that of the chief's own batches,
    as workers do not meet); metrics are those of this replica's rows until the end.

    Parameters have no ``.grad`` in a hook: an update has used them up. Where several batches make
    an update, it has those of this replica's rows until that is due, not yet summed.
    """

    trainer: Training

    def set_trainer(self, trainer: Training) -> None:
        """Called once before anything else.

        Args:
            trainer: Whose `fit`, `evaluate` or `predict` begins.
        """
        self.trainer = trainer

    def on_train_begin(self) -> None:
        """Before the first epoch of a `fit`."""

    def on_train_end(self) -> None:
        """After the last epoch of a `fit`, not after an error."""

    def on_train_error(self, error: BaseException) -> None:
        """When a `fit` ends by an exception (Ctrl-C too), which is raised again afterwards.

        Args:
            error: The exception.
        """

    def on_epoch_begin(self, epoch: int) -> None:
        """Before an epoch, and before any task works on it.

        It is called again where a training goes on in the middle of the epoch: what changes a
        value relative to itself keeps the epoch in its `state_dict`.

        Args:
            epoch: Its number, counted from 0.
        """

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        """After an epoch and its validation.

        Args:
            epoch: Its number, counted from 0.
            logs: Its figures, as in ``history.jsonl``.
        """

    def on_train_batch_begin(self, batch: int) -> None:
        """Before a step, on tasks that compute.

        Args:
            batch: Its number in the epoch, counted from 0.
        """

    def on_train_batch_end(self, batch: int, logs: Logs) -> None:
        """After a step.

        Args:
            batch: The number of the last global batch of the epoch that is done, from 0.
            logs: The figures of the epoch so far, computed when they are looked at. It is the
                same object after every step: to keep the figures of this one, keep a copy,
                ``dict(logs)``. Batches that are accumulated count with their update: before the
                first one of a training ``loss`` is NaN.
        """

    def on_test_begin(self) -> None:
        """Before an evaluation: of `evaluate`, or the validation of an epoch."""

    def on_test_end(self, logs: Logs) -> None:
        """After an evaluation.

        Args:
            logs: Its figures, without ``val_``, exact over all replicas.
        """

    def on_test_batch_begin(self, batch: int) -> None:
        """Before a batch is evaluated.

        Args:
            batch: Its number, counted from 0.
        """

    def on_test_batch_end(self, batch: int, logs: Logs) -> None:
        """After a batch was evaluated.

        Args:
            batch: Its number, counted from 0.
            logs: The figures so far, of this replica's rows.
        """

    def on_predict_begin(self) -> None:
        """Before the first batch of a `predict`."""

    def on_predict_end(self) -> None:
        """After the last batch of a `predict`."""

    def on_predict_batch_begin(self, batch: int) -> None:
        """Before a batch is predicted.

        Args:
            batch: Its number, counted from 0.
        """

    def on_predict_batch_end(self, batch: int, logs: Logs) -> None:
        """After a batch was predicted.

        Args:
            batch: Its number, counted from 0.
            logs: ``{"outputs": ...}``, the model's output for this replica's rows.
        """

    def state_dict(self) -> dict[str, Any]:
        """What must be remembered to resume.

        Returns:
            Plain values, as JSON has them.
        """
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned.

        Args:
            state: The same, from the checkpoint.
        """


def hooks(callbacks: Sequence[Callback], name: str) -> list[Callable[..., None]]:
    """The methods ``name`` of those callbacks that override it."""
    found = [getattr(callback, name) for callback in callbacks]
    default = getattr(Callback, name)
    return [hook for hook in found if getattr(hook, "__func__", None) is not default]


def runs_users_code(callback: Callback) -> bool:
    """Whether it does what a user wrote: a class of his own, or a `LambdaCallback`."""
    is_ours = type(callback).__module__.startswith("spartito.")
    return not is_ours or any(name.startswith("on_") for name in vars(callback))


def check_given(callbacks: Callback | Sequence[Callback]) -> list[Callback]:
    """The callbacks that a user gave, one or several; `UserError` for what is none."""
    given = list(callbacks) if isinstance(callbacks, Iterable) else [callbacks]
    for callback in given:
        if isinstance(callback, type):
            raise UserError(f"{callback.__name__} is a class", f"Give {callback.__name__}().")
        if not isinstance(callback, Callback):
            raise UserError(f"{callback!r} is no callback", "Give a list of sp.Callback.")
    return given
