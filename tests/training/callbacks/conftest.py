from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from spartito.checkpoint.manager import write_checkpoint
from spartito.training.callback import Callback, Logs


@dataclass
class Task:
    """What a strategy says of this replica."""

    is_chief: bool = True
    model: torch.nn.Module | None = None

    def keep(self) -> Callable[[], None]:
        """Copy the model's values, to put them back."""
        model = self.model
        assert model is not None
        kept = {name: value.clone() for name, value in model.state_dict().items()}

        def put_back() -> None:
            model.load_state_dict(kept)

        return put_back


@dataclass
class Loop:
    """The attributes that a trainer offers its callbacks, and the order in which it calls them."""

    run_dir: Path | None = None
    strategy: Task = field(default_factory=Task)
    model: torch.nn.Module = field(default_factory=lambda: torch.nn.Linear(2, 1))
    step: int = 0
    epoch: int = 0
    epochs: int = 0
    steps_per_epoch: int | None = 4
    stop_training: bool = False
    went_on: bool = False
    left_to_evaluator: bool = False
    data_wait_fraction: float = 0.012
    examples_per_second: float = 1234.5
    states: int = 0
    callbacks: Sequence[Callback] = ()

    @property
    def is_chief(self) -> bool:
        """Whether this replica writes."""
        return self.strategy.is_chief

    def save(
        self,
        path: Path,
        about: Callable[[], Mapping[str, Any]],
        *,
        asynchronous: bool,
        then: Callable[[], None],
        otherwise: Callable[[], None],
    ) -> Path:
        """As a trainer: all call it, the chief writes."""
        state = self.state_dict()
        if self.is_chief:
            write_checkpoint(path, state, about())
            then()
        return path

    def state_dict(self) -> dict[str, Any]:
        """Counts how often it was asked; holds the model."""
        self.states += 1
        return {
            "model": self.model.state_dict(),
            "optimizer": {"state": {0: {"step": torch.tensor(float(self.step))}}},
            "trainer": {
                "step": self.step,
                "callbacks": [callback.state_dict() for callback in self.callbacks],
            },
        }

    def fit(self, *callbacks: Callback, epochs: list[Logs], losses: list[float] = []) -> int:  # noqa: B006
        """Run as many epochs as there are logs; returns how many that were."""
        self.callbacks, self.stop_training = callbacks, False
        self.strategy.model = self.model
        self.epochs = len(epochs)
        for callback in callbacks:
            callback.set_trainer(self)  # type: ignore[arg-type]
        try:
            return self._run(epochs, losses)
        except BaseException as error:
            for callback in callbacks:
                callback.on_train_error(error)
            raise

    def _run(self, epochs: list[Logs], losses: list[float]) -> int:
        done = 0
        for callback in self.callbacks:
            callback.on_train_begin()
        for epoch, logs in enumerate(epochs):
            for callback in self.callbacks:
                callback.on_epoch_begin(epoch)
            for batch in range(self.steps_per_epoch or 4):
                self.step += 1
                loss = losses[batch] if losses else 0.5
                for callback in self.callbacks:
                    callback.on_train_batch_end(batch, {"loss": loss, "accuracy": 0.25})
                if self.stop_training:
                    break
            with torch.no_grad():
                for parameter in self.model.parameters():
                    parameter.fill_(epoch)
            self.epoch, done = epoch + 1, done + 1
            for callback in self.callbacks:
                callback.on_epoch_end(epoch, logs)
            if self.stop_training:
                break
        for callback in self.callbacks:
            callback.on_train_end()
        return done


@pytest.fixture
def trainer(tmp_path: Path) -> Loop:
    """A trainer with a run folder, on the chief."""
    return Loop(run_dir=tmp_path / "run")
