"""What becomes of updates that are not finite."""

from __future__ import annotations

from spartito.errors import UserError
from spartito.log import warn
from spartito.names import nearest
from spartito.strategies import Strategy
from spartito.training.callback import Callback, Logs

IGNORE, SKIP, STOP = CHOICES = ("ignore", "skip", "stop")
IN_A_ROW = 100
"""So many updates that are left out one after the other end the training."""


def checked(choice: str, strategy: Strategy) -> str:
    """Have ``strategy`` do what is chosen; `UserError` for what cannot be chosen."""
    if choice not in CHOICES:
        raise UserError(f"on_nonfinite={choice!r}", nearest(str(choice), CHOICES))
    strategy.coordination.skips_nonfinite = choice != IGNORE
    return choice


class NonFinite(Callback):
    """Says which updates were left out, counts them, and ends what makes no progress."""

    def on_train_begin(self) -> None:
        """Nothing is left out yet."""
        self._skipped = self.trainer.coordination.skipped
        self._good = self._seen = self.trainer.step

    def on_train_batch_end(self, batch: int, logs: Logs) -> None:
        """Look at what the last updates were."""
        trainer = self.trainer
        count = trainer.coordination.skipped
        if count == self._skipped:
            if trainer.step > self._seen:
                self._good = trainer.step
            self._seen = trainer.step
            return
        new, self._skipped, self._seen = count - self._skipped, count, trainer.step
        ends = trainer.on_nonfinite == STOP and not trainer.stop_training
        if trainer.is_chief:
            warn(
                "loss or gradients at step %d were not finite: %d update%s left out (%d in all)%s",
                trainer.step - 1, new, "s" if new > 1 else "", count,
                "; training stops" if ends else "",
            )  # fmt: skip
        trainer.stop_training = trainer.stop_training or ends
        if trainer.step - self._good >= IN_A_ROW:
            raise UserError(
                f"no update of the last {IN_A_ROW} had a finite loss and gradients",
                f"The model is that of step {self._good}. Go back to a checkpoint, with a smaller "
                "learning rate; `spartito data check` finds samples that are not finite.",
            )
