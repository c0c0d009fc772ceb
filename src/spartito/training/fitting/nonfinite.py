"""What becomes of updates that are not finite."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from torch.optim import Optimizer

from spartito.errors import UserError
from spartito.names import nearest, plural
from spartito.notes import warn
from spartito.strategies import Strategy
from spartito.training.callback import Callback, Logs
from spartito.training.callbacks.backup_and_restore import BackupAndRestore

IGNORE, SKIP, STOP = CHOICES = ("ignore", "skip", "stop")
SKIPPED = "skipped"
"""The figure of an epoch that says how many of its updates were left out."""
IN_A_ROW = 100
"""So many updates that are left out one after the other end the training, or take it back."""
GOES_BACK = 3
"""So often at most, to the newest backup."""


def checked(choice: str) -> str:
    """``choice``; `UserError` for what cannot be chosen."""
    if choice not in CHOICES:
        raise UserError(f"on_nonfinite={choice!r}", nearest(str(choice), CHOICES))
    return choice


def have_skipped(choice: str, strategy: Strategy, optimizer: Optimizer) -> None:
    """Have a strategy leave out updates of an optimizer that are not finite, if that is chosen.

    Args:
        choice: As `checked` returned it.
        strategy: Has prepared the optimizer.
        optimizer: Whose updates.
    """
    strategy.engine.team.pairs.of(optimizer).skips_nonfinite = choice != IGNORE


@dataclass
class Skips:
    """How many updates were left out, as every task of the training counts them.

    Attributes:
        epoch: Of this epoch.
        row: One after the other, until now.
        total: In all.
        went_back: How often that took the training back to a backup.
    """

    epoch: int = 0
    row: int = 0
    total: int = 0
    went_back: int = 0

    def came(self, updates: int, skipped: int) -> None:
        """Count what a step came to.

        Args:
            updates: How many were due.
            skipped: How many of them were left out.
        """
        if skipped:
            self.epoch += skipped
            self.total += skipped
            self.row = self.row + skipped if skipped >= updates else 0
        elif updates:
            self.row = 0

    def state_dict(self) -> dict[str, int]:
        """All of it, for a checkpoint or a task that comes later."""
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Count on from what `state_dict` returned.

        Args:
            state: The same.
        """
        for name, value in state.items():
            setattr(self, name, value)


class NonFinite(Callback):
    """Says which updates were left out, and takes back or ends what makes no progress."""

    def on_train_begin(self) -> None:
        """What was left out before is known."""
        self._told = self.trainer.skips.total

    def on_train_batch_end(self, batch: int, logs: Logs) -> None:
        """Look at what the last updates were."""
        trainer, skips = self.trainer, self.trainer.skips
        new = skips.total - self._told
        if not new:
            return
        ends = trainer.on_nonfinite == STOP and not trainer.stop_training
        if trainer.is_chief:
            warn(
                "loss or gradients at step %d were not finite: %s left out (%d in all)%s",
                trainer.step - 1, plural(new, "update"), skips.total,
                "; training stops" if ends else "",
            )  # fmt: skip
        trainer.stop_training = trainer.stop_training or ends
        if skips.row >= IN_A_ROW:
            self._make_progress(trainer.step - skips.row)
        self._told = skips.total  # last: after the loss of a task all of it is done again

    def _make_progress(self, good: int) -> None:
        """Go back to a backup; an error where there is none, or that has not helped."""
        trainer, skips = self.trainer, self.trainer.skips
        what = f"no update of the last {IN_A_ROW} had a finite loss and gradients"
        meets = trainer.coordination.skips_together
        for backup in trainer.callbacks if meets and skips.went_back < GOES_BACK else ():
            if isinstance(backup, BackupAndRestore) and (path := backup.go_back()):
                skips.went_back, skips.row = skips.went_back + 1, 0
                if trainer.is_chief:
                    warn(
                        "%s: model and optimizer go back to those of %s, with the data that come "
                        "next (%d of %d times)", what, path, skips.went_back, GOES_BACK,
                    )  # fmt: skip
                return
        skips.row = 0
        raise UserError(
            what,
            f"The model is that of step {good}. Go back to a checkpoint, with a smaller "
            "learning rate; `spartito data check` finds samples that are not finite.",
        )
