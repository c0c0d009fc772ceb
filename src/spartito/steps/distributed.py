"""What a strategy gives to the trainer: the batches of a data shard, and what a step did."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from math import nan
from typing import Any, Protocol

import msgspec
from torch import Tensor

from spartito.data.batch import Batch


class Figures(Protocol):
    """What a task has found out in an epoch, where replicas do not meet in each step."""

    def sums(self) -> list[float]:
        """Its sums of the epoch so far."""
        ...

    def take(self) -> bytes:
        """The state of its metrics since the last call."""
        ...

    def show(self) -> bytes:
        """The same, which the next call has too."""
        ...


class StepResult(msgspec.Struct, frozen=True):
    """What one step did.

    ``output`` is the model's output for this task's rows, None where it had none. The counts
    tell how far the whole training came since the last result, as this task knows: ``examples``
    trained on, global ``batches`` they make, and ``updates``, which are global steps. ``loss``
    is the sum of losses since the last update and ``weight`` what it is to be divided by; both
    are 0 when the step only accumulated. Strategies that meet in every step return the same
    numbers on every replica. ``stop`` says that somebody asked for an end, ``dropped`` how many
    updates (pushes to servers) were not finite since then, and changed nothing. ``norm`` is that
    of the update's gradients before they were clipped, where it is a figure.
    """

    output: Any
    examples: int
    batches: int = 1
    updates: int = 0
    loss: float | Tensor = 0.0
    weight: float | Tensor = 0.0
    stop: bool = False
    dropped: int = 0
    norm: Tensor | None = None

    @property
    def shown(self) -> tuple[float | Tensor, float | Tensor] | None:
        """The loss to look at, and what it is divided by; None before an update.

        Returns:
            NaN where gradients were dropped, whose losses are in no sum.
        """
        if self.dropped:
            return nan, 1.0
        has_weight = isinstance(self.weight, Tensor) or self.weight
        return (self.loss, self.weight) if has_weight else None


class Distributed(Protocol):
    """One task's data shard of a data set; it knows its position."""

    waited: float
    """Seconds that iterating took so far because of other tasks, not because of the data."""

    overlaps: bool
    """Whether other tasks begin the next epoch while this one still evaluates the last."""

    alike: bool
    """Whether the results of steps are equal on all tasks."""

    def __len__(self) -> int:
        """How many global batches a pass has; ``TypeError`` where that is not known before.

        Under parameter servers it is not, as a worker gets as many as it has time for.
        """
        raise TypeError("these batches have no known number")

    def __iter__(self) -> Generator[Batch]:
        """From the present position to the end of the epoch; the next iteration is the next one."""
        ...

    def epochs(
        self, count: int, steps: int | None, done: int, figures: Figures | None = None
    ) -> Generator[Generator[Batch]]:
        """The next ``count`` epochs of ``steps`` global batches, or of as many as there are.

        ``done`` batches of the first one were trained on before. ``figures`` are
        asked for where replicas do not meet in each step.
        """
        ...

    def watch(self) -> Iterator[StepResult]:
        """What others do until the epoch ends, for a task that has no batches of its own."""
        ...

    def total(self, shared: Sequence[float], own: Sequence[float]) -> list[float]:
        """The epoch's figures over all data shards: sums of step results, and this task's own."""
        ...

    def gather(self, rows: Tensor) -> Tensor:
        """The rows ``(n, ...)`` of all data shards, in their order; n may differ."""
        ...

    def collect(self, own: bytes) -> list[bytes]:
        """What all tasks took of their metrics in this epoch; ``own`` is what is left here."""
        ...

    def order(self) -> int:
        """A checksum of the examples of all batches so far, in their order; 0: not known."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """The position of the next batch."""
        ...

    def settled(self, step: int, done: int, ended: bool) -> tuple[dict[str, Any], int, int]:
        """The position to go on from, its global step, and how many batches of its epoch are done.

        These are ``step`` and ``done`` where all that was counted comes before it; ``ended`` says
        that the epoch which was trained last is over.
        """
        return self.state_dict(), step, done

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to that position.

        After `Step.load` that may be between the batches of one update: they are taken up.
        """
        ...
