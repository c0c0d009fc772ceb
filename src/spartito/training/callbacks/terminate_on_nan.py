"""Stops the training when its loss is no longer a number."""

from __future__ import annotations

import math

from spartito.notes import warn
from spartito.training.callback import Callback, Logs


class TerminateOnNaN(Callback):
    """Stops after the first step whose loss is NaN or infinite, as in Keras.

    The loss of a step is exact over all replicas, so all of them stop at the same one. Nothing is
    raised: the log says where it happened. Reading the loss after every step has its price on an
    accelerator, where it waits for the step to end.
    """

    def on_train_begin(self) -> None:
        """No step of this training has a loss yet."""
        self._seen = self.trainer.step

    def on_train_batch_end(self, batch: int, logs: Logs) -> None:
        """Look at the loss of this step; batches that are accumulated have none before its end."""
        if self.trainer.step == self._seen:
            return
        self._seen = self.trainer.step
        loss = logs["loss"]
        if not math.isfinite(loss) and not self.trainer.stop_training:
            warn("the loss is %s at step %d: training stops", loss, self.trainer.step - 1)
            self.trainer.stop_training = True
