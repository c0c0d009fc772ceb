"""Sets the learning rate of every epoch by a function."""

from __future__ import annotations

import math
from collections.abc import Callable
from inspect import signature
from typing import Any

from spartito.errors import UserError
from spartito.training.arguments import known_names
from spartito.training.callback import Callback


class LearningRateScheduler(Callback):
    """Sets the learning rate before every epoch, as in Keras.

    Under parameter servers the servers have the new rate before work of the epoch is given out;
    without a bound on staleness, workers may be in it already. For rates by step give the
    `Trainer` a ``scheduler``, one of torch's.

    Args:
        schedule: ``(epoch, rate)`` or ``(epoch)`` to the rate, with epochs counted from 0. It is
            called for each parameter group with the rate that the group has.

    Raises:
        UserError: It returns no finite number of 0 or more.
    """

    @known_names("LearningRateScheduler")
    def __init__(self, schedule: Callable[..., float]) -> None:
        if not callable(schedule):
            raise UserError(
                f"LearningRateScheduler({schedule!r}) is no function",
                "Give one of the epoch: lambda epoch: 0.1 * 0.5**epoch.",
            )
        self.schedule = schedule
        self._set = -1
        self._takes_rate = len(signature(schedule).parameters) > 1

    def on_epoch_begin(self, epoch: int) -> None:
        """Set the rate.

        Raises:
            UserError: The schedule returns no finite number of 0 or more.
        """
        if epoch == self._set:  # resumed in the middle of it
            return
        self._set = epoch
        for group in self.trainer.optimizer.param_groups:
            before = float(group["lr"])
            rate = self.schedule(epoch, before) if self._takes_rate else self.schedule(epoch)
            if not isinstance(rate, int | float) or not math.isfinite(rate) or rate < 0:
                raise UserError(
                    f"the schedule returned {rate!r} for epoch {epoch}",
                    "A learning rate is a number, 0 or more.",
                )
            group["lr"] = type(group["lr"])(rate) if isinstance(group["lr"], float) else rate
        self.trainer.coordination.publish_rates()

    def on_train_end(self) -> None:
        """Another `fit` may begin with the same epoch."""
        self._set = -1

    def on_train_error(self, error: BaseException) -> None:
        """The same."""
        self._set = -1

    def state_dict(self) -> dict[str, Any]:
        """The epoch whose rate is set."""
        return {"epoch": self._set}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """In the middle of that epoch the rate is not set again."""
        self._set = state.get("epoch", -1)
