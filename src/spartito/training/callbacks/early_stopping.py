"""Stops the training when a figure has not got better for some epochs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from spartito.errors import UserError
from spartito.notes import note, warn
from spartito.strategies import Strategy
from spartito.training.arguments import known_names
from spartito.training.callback import Callback, Logs
from spartito.training.callbacks.monitor import Monitor


class EarlyStopping(Callback):
    """Stops when a figure has not improved for some epochs, as in Keras.

    All replicas see the same logs and stop together. An epoch that ``max_steps`` ends in the middle
    does not count: it goes on with the training.

    Args:
        monitor: The figure to watch.
        min_delta: An improvement is more than this.
        patience: Epochs without improvement before it stops.
        mode: "min", "max", or "auto": accuracies up, everything else down.
        restore_best_weights: Whether the model ends with the weights of its best epoch. They are
            held in memory, so after a resume only epochs since then can be restored.
        start_from_epoch: Epochs before this one, counted from 0, are not looked at.

    Raises:
        UserError: No epoch reports the monitor.
    """

    best: float | None
    best_epoch: int
    stopped_epoch: int | None
    _weights: Callable[[], None] | None

    @known_names("EarlyStopping")
    def __init__(
        self,
        monitor: str = "val_loss",
        min_delta: float = 0.0,
        patience: int = 0,
        mode: str = "auto",
        restore_best_weights: bool = False,
        start_from_epoch: int = 0,
    ) -> None:
        """Check the arguments."""
        if patience < 0 or start_from_epoch < 0:
            raise UserError(
                f"patience is {patience} and start_from_epoch {start_from_epoch}, in epochs",
                "Neither can be less than 0.",
            )
        self.monitor = Monitor(monitor, mode, abs(min_delta))
        self.patience = patience
        self.restore_best_weights = restore_best_weights
        self.start_from_epoch = start_from_epoch
        self._resumed = False
        self._forget()

    def on_train_begin(self) -> None:
        """Start counting anew, unless the training is resumed."""
        if not self._resumed:
            self._forget()
        self._resumed = False

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        """Count the epochs without improvement."""
        if epoch < self.start_from_epoch:
            return
        if self.trainer.epoch <= epoch:  # `max_steps` has cut it: its figures come again, of all
            return
        value = self.monitor.read(logs)
        if self.monitor.better(value, self.best):
            self.best, self.best_epoch, self.wait = value, epoch, 0
            if self.restore_best_weights:
                self._weights = self.trainer.strategy.keep()
            return
        self.wait += 1
        if self.wait >= self.patience and epoch > 0:
            self.stopped_epoch = epoch
            self.trainer.stop_training = True

    def on_train_end(self) -> None:
        """Say that it stopped, and put the best weights back."""
        self._resumed = False
        if self.stopped_epoch is not None:
            note(
                "stopped after epoch %d: %s has not improved since epoch %d",
                self.stopped_epoch + 1,
                self.monitor.name,
                self.best_epoch + 1,
            )
        if self._weights is not None:
            self._weights()
        elif self.restore_best_weights and self.best is not None:
            warn("the weights of epoch %d were not kept over the resume", self.best_epoch + 1)

    @property
    def kept(self) -> Callable[[], None] | None:
        """What puts the weights of the best epoch back, where they are kept."""
        return self._weights

    @kept.setter
    def kept(self, weights: Callable[[], None] | None) -> None:
        self._weights = weights

    def state_dict(self) -> dict[str, Any]:
        """The best value, its epoch, and the epochs since."""
        return {"best": self.best, "best_epoch": self.best_epoch, "wait": self.wait}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on counting where the training that is resumed stood."""
        self.best, self.best_epoch, self.wait = state["best"], state["best_epoch"], state["wait"]
        self._resumed = True

    def _forget(self) -> None:
        self.best = self.stopped_epoch = self._weights = None
        self.best_epoch = -1
        self.wait = 0


def kept_by(callback: Callback) -> Any:
    """The weights that a callback keeps, as `Strategy.load` takes them; None for most."""
    kept = callback.kept if isinstance(callback, EarlyStopping) else None
    return kept.args[0] if isinstance(kept, partial) else None


def forget_kept(callback: Callback) -> None:
    """Let a callback forget weights that it cannot give to others, who would keep those they have.

    Args:
        callback: Any of a training in which a task was replaced.
    """
    if isinstance(callback, EarlyStopping) and kept_by(callback) is None:
        callback.kept = None


def give_kept(callback: Callback, kept: Any, strategy: Strategy) -> None:
    """Have a callback keep what `kept_by` found on another task."""
    if kept is not None and isinstance(callback, EarlyStopping):
        callback.kept = partial(strategy.load, kept)
