"""All results as one HTML page that needs no other file: a table and a chart for each."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.common import Figure, show
from benchmarks.results import Result, machines
from spartito.report.bars import Bar, Bars
from spartito.report.templating import page_template

TEMPLATE = Path(__file__).with_name("page.html.j2")
REACHED, MISSED, SHOWN = "var(--series-3)", "var(--series-2)", "var(--series-1)"
TICK = 0.003
"""Half of how wide the mark of a target is."""


def render(results: Sequence[Result]) -> str:
    """The page, as text."""
    reached, targets = (sum(column) for column in zip(*(r.targets for r in results), strict=True))
    template = page_template("base.html.j2").environment.from_string(TEMPLATE.read_text())
    return template.render(
        title="Benchmarks",
        subtitle=f"{machines(results)} · {reached} of {targets} targets reached",
        results=[(result, charts(result)) for result in results],
        show=show,
        paints={True: REACHED, False: MISSED, None: SHOWN},
    )


def charts(result: Result) -> list[Bars]:
    """Bars of the figures, those that are measured alike together, and of the sides' rates."""
    measures = dict.fromkeys(figure.measure for figure in result.figures)
    groups = [_figures(measure, [f for f in result.figures if f.measure == measure])
              for measure in measures]  # fmt: skip
    if result.sides:
        longest = max(result.sides.values())
        rows = [Bar(side, rate / longest, show(rate), SHOWN) for side, rate in result.sides.items()]
        groups.append(Bars(result.sides_in, rows))
    return groups


def _figures(measure: str, figures: Sequence[Figure]) -> Bars:
    """Their values, with a mark at each target."""
    longest = max(max(abs(f.value), f.target or 0.0) for f in figures) or 1.0
    paint = {True: REACHED, False: MISSED, None: SHOWN}
    rows = []
    for figure in figures:
        span = None
        if figure.target is not None:
            at = figure.target / longest
            span = (max(0.0, at - TICK), min(1.0, at + TICK))
        fraction = max(0.0, figure.value) / longest
        rows.append(Bar(figure.name, fraction, show(figure.value), paint[figure.reached], span))
    return Bars("Ratios" if measure == "times" else measure, rows)
