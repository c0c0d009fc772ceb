"""How a run of a comparison ended: well, or in a way that forbids to choose it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spartito.report.figures import VALIDATION, figure, label, number
from spartito.report.run_ends import COMPLETE, NOT_FINITE, STOPPED

DONE, FAILED, DIVERGED, UNFINISHED = "done", "failed", "diverged", "unfinished"
VERBS = {FAILED: "failed", DIVERGED: "diverged", UNFINISHED: "did not finish"}
"""What is said of a run that is not `DONE`."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended.

    Attributes:
        state: `DONE`, `FAILED`, `DIVERGED` or `UNFINISHED`. Only the first can be chosen.
        reason: Why it is not `DONE`, "" where it is.
        stopped_after: The epochs that it trained and those that it was told to, where a callback
            of its own ended it before; else None.
    """

    state: str = DONE
    reason: str = ""
    stopped_after: tuple[int, int] | None = None


def outcome(
    error: str | None,
    epochs: Sequence[Mapping[str, Any]],
    quality: str,
    told: int | None,
    end: str | None,
) -> Outcome:
    """How a run ended, from what it left.

    A loss that was not finite once and is finite again did not diverge: a step of fp16 that
    overflows and is left out makes such an epoch.

    Args:
        error: What a run that failed said last; None where its exit code was 0.
        epochs: Its history, NaN for what was not finite.
        quality: The figure that tells how well the model does.
        told: The epochs that it was told to train; None if unknown.
        end: What its settings say of its end, None if nothing.

    Returns:
        A failure before a divergence, and that before an early end.
    """
    if error is not None:
        return Outcome(FAILED, error)
    for name in dict.fromkeys(("loss", VALIDATION + "loss", quality)):
        if (since := _not_finite_since(epochs, name)) is not None:
            value, first = since
            return Outcome(
                DIVERGED,
                f"its {label(name)} is {figure('loss', value)} from epoch {first} "
                f"of {max(told or 0, _last(epochs))} on",
            )
    trained = _last(epochs)
    if end == NOT_FINITE:
        return Outcome(
            DIVERGED, f"loss or gradients were not finite in epoch {trained}, and training stopped"
        )
    if told is None or trained >= told or end == COMPLETE:
        return Outcome()
    if end == STOPPED:
        return Outcome(stopped_after=(trained, told))
    return Outcome(UNFINISHED, f"it ended after {trained} of {told} epochs without an error")


def _not_finite_since(epochs: Sequence[Mapping[str, Any]], name: str) -> tuple[float, int] | None:
    """The newest value of a figure and the epoch from which on it was not finite, if it is not."""
    known = [
        (value, int(number(epoch.get("epoch")) or index))
        for index, epoch in enumerate(epochs, start=1)
        if (value := number(epoch.get(name))) is not None
    ]
    bad: tuple[float, int] | None = None
    for value, epoch in reversed(known):
        if math.isfinite(value):
            break
        bad = known[-1][0], epoch
    return bad


def _last(epochs: Sequence[Mapping[str, Any]]) -> int:
    """The number of the last epoch, counted from 1; 0 without any."""
    numbers = [number(epoch.get("epoch")) for epoch in epochs]
    known = [int(found) for found in numbers if found is not None and math.isfinite(found)]
    return max([len(epochs), *known]) if epochs else 0
