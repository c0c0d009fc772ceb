"""What an evaluator found about the checkpoints of a run, one line each."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from spartito.report.figures import VALIDATION
from spartito.report.lines import line_of
from spartito.storage.atomic import write_file_atomically

EVALUATIONS = "evaluations.jsonl"
Record = Mapping[str, Any]


def with_evaluations(epochs: Sequence[Record], evaluations: Iterable[Record]) -> list[Record]:
    """The ``epochs`` of a run, each with the ``val_`` figures of the checkpoint at its end.

    The two meet by their step: epochs may begin at 1 again, and some checkpoints are of the
    middle of an epoch. What an epoch itself reports stays.
    """
    found = {record.get("step"): record for record in evaluations}
    merged: list[Record] = []
    for epoch in epochs:
        other = found.get(epoch.get("step"), {}) if "step" in epoch else {}
        figures = {name: value for name, value in other.items() if name.startswith(VALIDATION)}
        merged.append({**figures, **epoch})
    return merged


def append_evaluation(run_dir: Path, record: Record) -> None:
    """Add one line to the ``evaluations.jsonl`` of the run folder."""
    run_dir.mkdir(parents=True, exist_ok=True)
    with open(run_dir / EVALUATIONS, "a") as file:
        file.write(line_of(record) + "\n")


def keep_until(file: Path, step: int, epoch: int) -> None:
    """Forget lines beyond global step ``step``, where a training begins or goes on.

    That is after ``epoch`` epochs. The line of the last of them may have a greater step: workers
    of parameter servers had begun the next one, which is done again.
    """
    if not file.exists():
        return
    lines = file.read_text(errors="replace").splitlines(keepends=True)
    kept: list[str] = []
    last = 0
    for line in lines:
        at, number = _position(line)
        if at <= step or (number == last + 1 <= epoch):
            kept.append(line)
            last = number
    if len(kept) < len(lines):
        write_file_atomically(file, "".join(kept))


def _position(line: str) -> tuple[float, int]:
    """Step and epoch of one line; an infinite step for one that says nothing, as if cut short."""
    try:
        record = json.loads(line)
        return float(record["step"]), int(record["epoch"])
    except (ValueError, KeyError, TypeError):
        return float("inf"), 0
