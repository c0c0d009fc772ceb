"""The loop of a chief of parameter servers that another process can replace.

What workers and servers did is in the chief's journal and with the servers; where the chief itself
was is kept there at the beginning of each epoch. What was done since then comes in at once, as the
first progress of the next process.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import msgspec

from spartito.data.dataset import Dataset
from spartito.errors import TaskLostError
from spartito.steps.servers.coordination import LeasedCoordination
from spartito.storage.tensors import pack_state, unpack_state
from spartito.training.callbacks.early_stopping import EarlyStopping, kept_by
from spartito.training.evaluation.evaluate import Evaluation
from spartito.training.files.resume import check_position, meaning, restore
from spartito.training.files.saving import callback_states
from spartito.training.fitting.schedule import scheduler_state
from spartito.training.history import History
from spartito.training.loops.training_loop import TrainingLoop
from spartito.training.metrics.base import decode, encode

if TYPE_CHECKING:
    from spartito.training.trainer import Trainer


class JournaledLoop(TrainingLoop):
    """As `TrainingLoop`; it begins where another process was lost that was the chief."""

    def __init__(self, trainer: Trainer, chain: Dataset, before: TrainingLoop | None) -> None:
        super().__init__(trainer, chain, before)
        self._journaled = trainer
        self._leased = cast("LeasedCoordination", trainer.coordination)
        self._first = 0
        self._went_on: list[list[Any]] | None = None

    def run(
        self, epochs: range, steps: int | None, validation: Evaluation | None, history: History
    ) -> None:
        self._history, self._steps, self._first = history, steps, epochs.start
        if kept := self._leased.kept:
            epochs = range(self._go_on(_unpacked(kept)), epochs.stop)
        super().run(epochs, steps, validation, history)

    def _begin_epoch(self, epoch: int) -> None:
        if self._went_on is None:
            self._leased.keep(_packed(self._state(epoch)))
        else:  # as it was kept; what callbacks did when the training began is undone
            restore(self._journaled._given, self._went_on)
            self._went_on = None
        super()._begin_epoch(epoch)

    def _state(self, epoch: int) -> dict[str, Any]:
        trainer = self._journaled
        return {
            "fit": trainer._fits,
            "first": self._first,
            "epoch": epoch,
            "at": [trainer.step, trainer.epoch],
            "begun": [self._done, self._examples, *self._before],
            "metrics_before": self._metrics_before,
            "data": self._batches.state_dict(),
            "meaning": meaning(self.chain, self._steps, trainer.seed),
            "scheduler": [scheduler_state(trainer.scheduler), trainer.schedule.ahead],
            "skips": trainer.skips.state_dict(),
            "history": asdict(self._history),
            "callbacks": callback_states(trainer._given),
            "kept": [kept_by(each) for each in trainer._given],
            "coordination": self._leased.state_dict(),
        }

    def _go_on(self, kept: dict[str, Any]) -> int:
        """Be where the chief was when the epoch began that is returned."""
        trainer, epoch = self._journaled, int(kept["epoch"])
        if kept["fit"] != trainer._fits:
            raise TaskLostError(
                f"the chief was lost in fit number {kept['fit']}, and cannot come there again",
                "A chief that is started again goes on where its first fit() runs.",
            )
        there = {"data": kept["data"], "done": kept["begun"][0], "meaning": kept["meaning"]}
        check_position(there, meaning(self.chain, self._steps, trainer.seed))
        trainer.went_on, self._first = True, kept["first"]
        trainer.step, trainer.epoch = kept["at"]
        self._done, self._examples, *self._before = kept["begun"]
        self._metrics_before = kept["metrics_before"]
        self._batches.load_state_dict(kept["data"])
        trainer.skips.load_state_dict(kept["skips"])
        self._history.epoch[:] = kept["history"]["epoch"]
        self._history.history.update(kept["history"]["history"])
        for callback, weights in zip(trainer._given, kept["kept"], strict=True):
            if weights is not None and isinstance(callback, EarlyStopping):
                callback.kept = partial(trainer.strategy.load, weights)
        self._went_on = kept["callbacks"]
        restore(trainer._given, self._went_on)
        trainer.schedule.go_on(*kept["scheduler"])
        self._leased.follow(trainer.schedule.by_step, trainer.schedule.ahead)
        self._leased.go_on(kept["coordination"], epoch - self._first)
        return epoch


def _packed(state: dict[str, Any]) -> bytes:
    tree, tensors = pack_state(state)
    return msgspec.msgpack.encode([json.dumps(tree), encode([tensors])])


def _unpacked(data: bytes) -> dict[str, Any]:
    tree, tensors = msgspec.msgpack.decode(data)
    state: dict[str, Any] = unpack_state(json.loads(tree), decode(tensors)[0])
    return state
