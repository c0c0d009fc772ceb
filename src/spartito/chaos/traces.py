"""The traces that tasks leave: who did which step when, with which loss."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from spartito.chaos.inside import TRACES


@dataclass(frozen=True, slots=True)
class Step:
    """One step as one process did it: ``loss`` is written as `float.hex` does, exactly."""

    at: float
    number: int
    loss: str


Traces = Mapping[str, list[Step]]
"""The steps of each task in order of time, over all processes that it was."""


def read_traces(folder: Path) -> dict[str, list[Step]]:
    """The traces in the folder of a run.

    Args:
        folder: as `spartito.chaos.inside.ENV` says.

    Returns:
        The steps by task, ``worker:0``.
    """
    found: dict[str, list[Step]] = {}
    for path in sorted((folder / TRACES).glob("*")):
        steps = [Step(float(at), int(n), loss) for at, n, loss in _lines(path)]
        found.setdefault(path.name.rpartition(".")[0], []).extend(steps)
    return {task: sorted(steps, key=lambda step: step.at) for task, steps in found.items()}


def reached(folder: Path) -> int:
    """The last step of any task so far; -1 before the first one.

    Args:
        folder: as for `read_traces`.

    Returns:
        It, from the last line of each file.
    """
    most = -1
    for path in (folder / TRACES).glob("*"):
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 200))
            lines = file.read().split(b"\n")[:-1]
        if lines and len(words := lines[-1].split()) == 3:
            most = max(most, int(words[1]))
    return most


def curve(steps: Iterable[Step]) -> dict[int, str]:
    """The loss of each step, as it was when it was done last."""
    return {step.number: step.loss for step in steps if step.loss != "nan"}


def repeated(steps: Iterable[Step]) -> int:
    """How many steps were done more than once."""
    seen: set[int] = set()
    again = 0
    for step in steps:
        again += step.number in seen
        seen.add(step.number)
    return again


def pause_after(traces: Traces, at: float) -> float | None:
    """Seconds from ``at`` until every task that made steps before has made one after it.

    Args:
        traces: of all tasks.
        at: a moment of the machine's monotonic clock.

    Returns:
        None where one did not.
    """
    firsts = []
    for steps in traces.values():
        if any(step.at <= at for step in steps):
            firsts.append(next((step.at for step in steps if step.at > at), None))
    known = [first for first in firsts if first is not None]
    return max(known) - at if known and len(known) == len(firsts) else None


def _lines(path: Path) -> list[list[str]]:
    lines = (line.split() for line in path.read_text().splitlines())
    return [words for words in lines if len(words) == 3]
