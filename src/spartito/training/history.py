"""What `fit` returns, as in Keras."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass
class History:
    """The figures of every epoch, equal on all replicas.

    Args:
        epoch: The numbers of the epochs, counted from 0.
        history: Name (``loss``, ``accuracy``, ``val_loss``, ...) to the values in these epochs;
            a value is a float, or nested lists (a confusion matrix). All lists are as long as
            ``epoch``: a figure that an epoch did not report is NaN there.
    """

    epoch: list[int] = field(default_factory=list)
    history: dict[str, list[Any]] = field(default_factory=dict)

    def add(self, epoch: int, logs: Mapping[str, Any]) -> None:
        """Append the figures of one epoch, or of one that goes on where it was cut off before.

        Args:
            epoch: Its number.
            logs: Its figures by name.
        """
        if self.epoch and self.epoch[-1] == epoch:
            for values in (self.epoch, *self.history.values()):
                del values[-1]
        for name in logs:
            self.history.setdefault(name, [math.nan] * len(self.epoch))
        self.epoch.append(epoch)
        for name, values in self.history.items():
            values.append(logs.get(name, math.nan))

    def take(self, epoch: list[int], history: Mapping[str, list[Any]]) -> None:
        """Become what another one is.

        Args:
            epoch: Its numbers.
            history: Its figures.
        """
        self.epoch[:] = epoch
        self.history.clear()
        self.history.update(history)
