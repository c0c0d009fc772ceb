"""The schedule of a pipeline as it really ran: what each task computed when, and its gaps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from spartito.report.figures import percent

WIDTH, ROW, LEFT, TOP = 960, 34, 96, 8
"""Of the drawing, in its own units; the page scales it."""
_PAINTS = {
    "forward": ("--training", "forward"),
    "backward": ("--validation", "backward"),
    "inputs": ("--validation", "backward, inputs"),
    "weights": ("--neutral", "backward, weights"),
}
_WIDE = 16  # from which on a box is wide enough for its number


@dataclass(frozen=True, slots=True)
class Action:
    """One computation: what, of which stage and microbatch, from when to when in seconds."""

    kind: str
    stage: int
    microbatch: int
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """A drawing of one step, its legend, and a sentence on it."""

    drawing: str
    legend: Sequence[tuple[str, str]]
    note: str


def timeline(section: Mapping[str, Any]) -> Timeline | None:
    """Draw what a run's settings tell of its last step; None where they tell nothing."""
    found = section.get("tasks")
    rows = [(str(task["name"]), _actions(task["actions"])) for task in found or ()]
    rows = [row for row in rows if row[1]]
    if not rows:
        return None
    whole = max(_end(row) for _, row in rows) - min(_begin(row) for _, row in rows)
    apart = whole > 10 * max(_end(row) - _begin(row) for _, row in rows)
    if apart:  # of machines whose clocks have nothing in common
        rows = [(name, _moved(row, _begin(row))) for name, row in rows]
    else:
        first = min(_begin(row) for _, row in rows)
        rows = [(name, _moved(row, first)) for name, row in rows]
    length = max(_end(row) for _, row in rows)
    busy = sum(a.end - a.start for _, row in rows for a in row) / len(rows)
    kinds = dict.fromkeys(a.kind for _, row in rows for a in row)
    legend = [(name, f"var({paint})") for paint, name in map(_PAINTS.__getitem__, kinds)]
    note = (
        f"The last step, {1000 * length:.1f} ms; the numbers are microbatches. The tasks were idle "
        f"for {percent(1 - busy / length)} of it, sending and receiving included; "
        f"{section.get('schedule')} with {section.get('microbatches')} microbatches and stages "
        f"that take equally long has {percent(float(section.get('bound') or 0.0))}."
    )
    if apart:
        note += " The tasks' clocks differ: each row begins with its own first action."
    return Timeline(_drawn(rows, length), legend, note)


def _actions(found: Sequence[Sequence[Any]]) -> list[Action]:
    return [Action(*each) for each in found if each[0] in _PAINTS]


def _begin(row: Sequence[Action]) -> float:
    return min(action.start for action in row)


def _end(row: Sequence[Action]) -> float:
    return max(action.end for action in row)


def _moved(row: Sequence[Action], by: float) -> list[Action]:
    return [Action(a.kind, a.stage, a.microbatch, a.start - by, a.end - by) for a in row]


def _drawn(rows: Sequence[tuple[str, Sequence[Action]]], length: float) -> str:
    scale = (WIDTH - LEFT) / length
    parts = []
    for number, (name, row) in enumerate(rows):
        y = TOP + number * ROW
        parts.append(
            f'<text x="0" y="{y + 18}" font-size="13" fill="var(--text)">{escape(name)}</text>'
            f'<rect x="{LEFT}" y="{y}" width="{WIDTH - LEFT}" height="26" fill="var(--line)" '
            'opacity="0.35"/>'
        )
        parts += [_box(action, y, scale) for action in row]
    height = TOP + len(rows) * ROW
    return (
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-label="What each task computed when">{"".join(parts)}</svg>'
    )


def _box(action: Action, y: int, scale: float) -> str:
    x, width = LEFT + action.start * scale, max(0.5, (action.end - action.start) * scale)
    paint, what = _PAINTS[action.kind]
    title = (
        f"{what}: stage {action.stage}, microbatch {action.microbatch}, "
        f"{1000 * (action.end - action.start):.2f} ms"
    )
    number = ""
    if width > _WIDE:
        number = (
            f'<text x="{x + width / 2:.1f}" y="{y + 17}" font-size="11" text-anchor="middle" '
            f'fill="var(--card)">{action.microbatch}</text>'
        )
    return (
        f'<g><title>{title}</title><rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="26" '
        f'rx="2" fill="var({paint})" stroke="var(--card)"/>{number}</g>'
    )
