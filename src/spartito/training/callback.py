"""What happens around the loop: a base class whose hooks do nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spartito.training.trainer import Trainer

Logs = Mapping[str, float]


class Callback:
    """Hooks around training, named as in Keras; override those that you need.

    Every hook runs on every replica, and ``logs`` of an epoch are equal on all of them. The
    ``logs`` of a batch are read lazily: what is not looked at costs nothing. ``loss`` there is
    exact over all replicas, other metrics are this replica's share until the epoch ends.
    """

    trainer: Trainer

    def set_trainer(self, trainer: Trainer) -> None:
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

    def state(self) -> dict[str, Any]:
        """What must be remembered to resume, as JSON."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Take back what `state` answered."""
