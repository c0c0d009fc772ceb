"""Lines over steps, seconds or a swept setting, one colour per strategy, as inline SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from spartito.report.plots import MUTED, SERIES, draw_svg, dress, page_colour

LEAST_SPAN = 0.02
"""An axis of shares shows two points at least: what is tiny shall look tiny."""

FEW = 12
"""Points up to which each is drawn for itself."""


@dataclass(frozen=True, slots=True)
class Line:
    """Points ``(x, y)``, None or NaN where there is nothing; ``quiet`` lines are context."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float | None]
    colour: str
    quiet: bool = False

    @property
    def points(self) -> list[tuple[float, float]]:
        """The points that there are."""
        return [
            (x, y)
            for x, y in zip(self.xs, self.ys, strict=True)
            if y is not None and math.isfinite(x) and math.isfinite(y)
        ]

    @property
    def paint(self) -> str:
        """The page's name for its colour."""
        return page_colour(self.colour)


@dataclass(frozen=True, slots=True)
class Chart:
    """Lines over ``x_label``; with ``ticks`` the x axis is logarithmic and has just these."""

    title: str
    x_label: str
    lines: Sequence[Line]
    percent: bool = False
    from_zero: bool = False
    ticks: Sequence[float] = ()
    log_y: bool = False

    @property
    def is_empty(self) -> bool:
        """Whether no line has a single point."""
        return not any(line.points for line in self.lines)


def series_colour(place: int) -> str:
    """The colour of the ``place``-th strategy of a page."""
    return SERIES[place % len(SERIES)]


def ideal(lines: Sequence[Line]) -> Line | None:
    """What the fastest start would grow to if each worker added as much as the first."""
    starts = [line.points[0] for line in lines if line.points]
    if not starts:
        return None
    least = min(x for x, _ in starts)
    each = max(y for x, y in starts if x == least) / least
    xs = sorted({x for line in lines for x, _ in line.points})
    return Line("ideal", xs, [each * x for x in xs], MUTED, quiet=True)


def chart_svg(chart: Chart) -> str:
    """``chart`` as an ``<svg>`` element, equal for equal input."""
    return draw_svg(chart.title, lambda axes: _draw(axes, chart))


def _draw(axes: Any, chart: Chart) -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullLocator

    for line in sorted(chart.lines, key=lambda line: not line.quiet):
        points = line.points
        axes.plot(
            [x for x, _ in points],
            [y for _, y in points],
            color=line.colour,
            linewidth=1.2 if line.quiet else 1.8,
            linestyle=(0, (4, 3)) if line.quiet else "-",
            marker="o" if len(points) <= FEW and not line.quiet else "",
            markersize=3.5,
        )
    if chart.ticks:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_locator(FixedLocator(list(chart.ticks)))
        axes.set_xlim(min(chart.ticks) / 1.15, max(chart.ticks) * 1.15)
    else:
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6, min_n_ticks=2))
        axes.set_xlim(left=0)
    if chart.log_y:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    else:
        axes.yaxis.set_major_locator(MaxNLocator(nbins=5, min_n_ticks=2))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))
    dress(axes, chart.x_label, chart.percent)
    low, high = axes.get_ylim()
    if chart.percent and high - low < LEAST_SPAN:
        middle = (low + high) / 2
        axes.set_ylim(middle - LEAST_SPAN / 2, middle + LEAST_SPAN / 2)
    if chart.log_y and high < 2 * low:
        axes.set_ylim(low / 2, high * 2)
    if chart.from_zero:
        axes.set_ylim(bottom=0, top=axes.get_ylim()[1] * 1.05)
