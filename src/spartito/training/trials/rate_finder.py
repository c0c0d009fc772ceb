"""Which learning rate to begin with: a short training in which it grows."""

from __future__ import annotations

import math
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from spartito.data.dataset import as_dataset
from spartito.errors import UserError
from spartito.training.trials.trial_steps import check_meets, undone, update, without_end

if TYPE_CHECKING:
    from spartito.training.trainer import Trainer

SMOOTHING = 0.9
"""What of the mean loss so far stays when the next one comes."""
DIVERGED = 4.0
"""How many times the best loss ends the search."""


@dataclass(frozen=True)
class LearningRates:
    """The losses of a training whose learning rate grew from step to step.

    Args:
        rates: The rate of each step.
        losses: The loss of each, smoothed, over all replicas.
        suggestion: The rate at which the loss fell fastest; None where it never fell.
    """

    rates: list[float]
    losses: list[float]
    suggestion: float | None


def find_learning_rate(
    trainer: Trainer, data: Any, low: float, high: float, steps: int, batch_size: int
) -> LearningRates:
    """As `Trainer.find_learning_rate`."""
    if not 0 < low < high or steps < 2:
        raise UserError(
            f"find_learning_rate(low={low}, high={high}, steps={steps})",
            "Rates grow from one above 0 to a larger one, in 2 steps or more.",
        )
    check_meets(trainer, "find_learning_rate")
    groups = trainer.optimizer.param_groups
    kept = [group["lr"] for group in groups]
    rates: list[float] = []
    losses: list[float] = []
    mean = best = math.inf
    batches = trainer.strategy.distribute(as_dataset(data, batch_size), seed=trainer.seed)
    with closing(without_end(batches)) as stream, undone(trainer):
        try:
            while len(rates) < steps:
                rate = low * (high / low) ** (len(rates) / (steps - 1))
                for group in groups:
                    group["lr"] = rate
                loss = update(trainer, stream).loss
                mean = loss if mean == math.inf else SMOOTHING * mean + (1 - SMOOTHING) * loss
                rates.append(rate)
                losses.append(mean)
                best = min(best, mean)
                if not mean <= DIVERGED * abs(best):
                    break
        finally:
            for group, rate in zip(groups, kept, strict=True):
                group["lr"] = rate
    return LearningRates(rates, losses, _steepest(rates, losses))


def _steepest(rates: list[float], losses: list[float]) -> float | None:
    """The rate where the loss fell fastest over the logarithm of the rate."""
    falls = [
        (losses[i + 1] - losses[i - 1], i)
        for i in range(1, len(losses) - 1)
        if math.isfinite(losses[i + 1])
    ]
    if not falls or min(falls)[0] >= 0:
        return None
    return rates[min(falls)[1]]
