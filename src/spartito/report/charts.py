"""Lines over epochs, steps or a setting as inline SVG in the colours and letters of the page."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any
from zlib import crc32

from spartito.names import size

WIDTH, HEIGHT = 5.6, 2.9
"""Inches at 72 dots; the page scales the drawing to its column."""

# matplotlib draws with these colours, and the page's own replace them afterwards, so that
# one drawing is readable on light and on dark.
_INK = {
    "#010101": "var(--text)",
    "#020202": "var(--muted)",
    "#030303": "var(--line)",
    "#040404": "var(--training)",
    "#050505": "var(--validation)",
    "#060606": "var(--neutral)",
    "#070707": "var(--card)",
    "#080808": "var(--series-1)",
    "#090909": "var(--series-2)",
    "#0a0a0a": "var(--series-3)",
    "#0b0b0b": "var(--series-4)",
    "#0c0c0c": "var(--series-5)",
    "#0d0d0d": "var(--series-6)",
    "#0e0e0e": "var(--series-7)",
    "#0f0f0f": "var(--series-8)",
    "#101010": "var(--series-9)",
    "#111111": "var(--series-10)",
    "#121212": "var(--series-11)",
    "#131313": "var(--series-12)",
}
_TEXT, MUTED, _LINE, TRAINING, VALIDATION, NEUTRAL, _CARD, *SERIES = _INK


FEW = 12
"""Points up to which each is drawn for itself."""

LEAST_SPAN = 0.02
"""An axis of fractions shows two points of a percent at least: what is tiny must look tiny."""


@dataclass(frozen=True, slots=True)
class Line:
    """One line: its name, its colour, and a value for each x (None: nothing there, NaN: a gap).

    ``quiet`` lines are context.
    """

    name: str
    xs: Sequence[float]
    ys: Sequence[float | None]
    colour: str
    quiet: bool = False

    @property
    def points(self) -> list[tuple[float, float]]:
        """The points that there are, with NaN for a gap."""
        return [
            (x, y if math.isfinite(y) else math.nan)
            for x, y in zip(self.xs, self.ys, strict=True)
            if y is not None and math.isfinite(x)
        ]

    @property
    def is_empty(self) -> bool:
        """Whether it has not a single point."""
        return all(math.isnan(y) for _, y in self.points)

    @property
    def paint(self) -> str:
        """The page's name for its colour."""
        return page_colour(self.colour)


@dataclass(frozen=True, slots=True)
class Chart:
    """Lines over ``x_label``.

    ``percent`` writes the y axis so, ``sizes`` as bytes; with ``reach`` it starts at zero and
    reaches at least so far. ``epochs``: the x axis has whole numbers only. With ``ticks`` it is
    logarithmic and has just these. ``marked`` is the x of a point of the last line that gets a
    ring.
    """

    title: str
    x_label: str
    lines: Sequence[Line]
    percent: bool = False
    sizes: bool = False
    reach: float | None = None
    epochs: bool = False
    ticks: Sequence[float] = ()
    log_y: bool = False
    marked: float | None = None

    @property
    def is_empty(self) -> bool:
        """Whether no line has a single point."""
        return all(line.is_empty for line in self.lines)


def page_colour(colour: str) -> str:
    """What the page calls the ``colour`` of a drawing."""
    return _INK[colour]


def drawn(charts: Iterable[Chart]) -> list[tuple[Chart, str]]:
    """Each chart that shows something, with its drawing."""
    return [(chart, svg(chart)) for chart in charts if not chart.is_empty]


def svg(chart: Chart) -> str:
    """``chart`` as an ``<svg>`` element without size, links or metadata, equal for equal input.

    Titles must be unlike each other on a page.
    """
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    style: Any = {"svg.fonttype": "none", "svg.hashsalt": chart.title, "font.size": 10}
    with matplotlib.rc_context(style):
        drawing = Figure(figsize=(WIDTH, HEIGHT), layout="constrained")
        FigureCanvasSVG(drawing)
        _draw(drawing.subplots(), chart)
        file = io.StringIO()
        drawing.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    return _for_the_page(file.getvalue(), chart.title)


def _draw(axes: Any, chart: Chart) -> None:
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
        if line is chart.lines[-1] and chart.marked is not None:
            axes.plot(
                [chart.marked],
                [dict(points)[chart.marked]],
                marker="o",
                markersize=8,
                color=line.colour,
                markerfacecolor=_CARD,
                markeredgewidth=1.8,
            )
    _axes(axes, chart)


def _axes(axes: Any, chart: Chart) -> None:
    """Ticks and limits, and the look of all drawings: quiet lines, no frame, plain numbers."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullLocator

    across: Any = MaxNLocator(nbins=6, min_n_ticks=2)
    if chart.ticks:
        across = FixedLocator(list(chart.ticks))
        axes.set_xscale("log", base=2)
        axes.set_xlim(min(chart.ticks) / 1.15, max(chart.ticks) * 1.15)
    elif chart.epochs:
        across = MaxNLocator(nbins=8, integer=True, min_n_ticks=1)
    else:
        axes.set_xlim(left=0)
    if chart.log_y:
        axes.set_yscale("log")
    up = LogLocator(subs=(1, 2, 5)) if chart.log_y else MaxNLocator(nbins=5, min_n_ticks=2)
    for axis, locator, write in (
        (axes.xaxis, across, _plain),
        (axes.yaxis, up, _percent if chart.percent else size if chart.sizes else _plain),
    ):
        axis.set_major_locator(locator)
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(FuncFormatter(lambda value, _, write=write: write(value)))
    low, high = axes.get_ylim()
    if chart.reach is not None:
        axes.set_ylim(bottom=0, top=max(chart.reach, high * 1.05))
    elif chart.log_y and high < 2 * low:
        axes.set_ylim(low / 2, high * 2)
    elif chart.percent and high - low < LEAST_SPAN:
        axes.set_ylim((low + high - LEAST_SPAN) / 2, (low + high + LEAST_SPAN) / 2)
    axes.set_xlabel(chart.x_label, color=MUTED)
    axes.grid(axis="y", color=_LINE, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=MUTED, length=0, pad=6)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(_LINE)


def _percent(value: float) -> str:
    return f"{100 * value:.6g}%"


def _plain(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1e6 else f"{value:,.6g}"


def _for_the_page(text: str, title: str) -> str:
    """Leave of a file of matplotlib what an element of a page needs."""
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    # A style element would hold for the whole page; of the names of formats HTML needs none.
    text = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", text, flags=re.DOTALL)
    text = re.sub(r' xmlns(:\w+)?="[^"]*"', "", text).replace("xlink:href", "href")
    text = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", text, count=1)
    text = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text, count=1)
    # Several drawings share one page, and an id must be there once.
    words = re.sub(r"\W+", "-", title.lower())  # of a strategy's options some differ in signs alone
    own = f"{words}-{crc32(title.encode()):x}"
    text = re.sub(r'\bid="([^"]*)"', rf'id="{own}-\1"', text)
    text = re.sub(r"url\(#([^)]*)\)", rf"url(#{own}-\1)", text)
    text = re.sub(r'href="#([^"]*)"', rf'href="#{own}-\1"', text)
    # Letters take the page's typeface; size, anchor and colour stay.
    text = re.sub(r"font: ([\d.]+px) [^;\"]*", r"font-size: \1", text)
    text = re.sub(r"font-family: [^;\"]*;?", "", text)
    for colour, variable in _INK.items():
        text = text.replace(colour, variable)
    return text.strip()
