"""Curves over the epochs as inline SVG that takes its colours and letters from the page."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

WIDTH, HEIGHT = 5.6, 2.9
"""Inches at 72 dots; the page scales the drawing to its column."""

# matplotlib draws with these colours, and the page's own take their place afterwards, so that
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
}
_TEXT, MUTED, _LINE, TRAINING, VALIDATION, NEUTRAL, _CARD, *SERIES = _INK


@dataclass(frozen=True)
class Curve:
    """One line: its values per epoch (None or NaN: a gap), its name and its colour."""

    name: str
    values: Sequence[float | None]
    colour: str

    @property
    def points(self) -> list[float]:
        """The values as floats, NaN where there is nothing to draw."""
        return [
            value if value is not None and math.isfinite(value) else math.nan
            for value in self.values
        ]

    @property
    def is_empty(self) -> bool:
        """Whether it has not a single point."""
        return all(math.isnan(value) for value in self.points)

    @property
    def paint(self) -> str:
        """The page's name for its colour."""
        return page_colour(self.colour)


@dataclass(frozen=True)
class Plot:
    """Curves over ``epochs``; ``percent`` writes the axis so, ``marked`` rings one epoch's point.

    ``marked`` is the index of an epoch on the last curve. With ``reach`` the axis starts at zero
    and reaches at least so far.
    """

    title: str
    epochs: Sequence[int]
    curves: Sequence[Curve]
    percent: bool = False
    reach: float | None = None
    marked: int | None = None

    @property
    def is_empty(self) -> bool:
        """Whether no curve has a single point."""
        return all(curve.is_empty for curve in self.curves)


def page_colour(colour: str) -> str:
    """What the page calls the ``colour`` of a drawing."""
    return _INK[colour]


def svg(plot: Plot) -> str:
    """``plot`` as an ``<svg>`` element without size, links or metadata, equal for equal input."""
    return draw_svg(plot.title, lambda axes: _draw(axes, plot))


def draw_svg(title: str, draw: Callable[[Any], None]) -> str:
    """What ``draw`` puts on matplotlib's axes, as an element; ``title`` is unlike all others'."""
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    style: Any = {"svg.fonttype": "none", "svg.hashsalt": title, "font.size": 10}
    with matplotlib.rc_context(style):
        drawing = Figure(figsize=(WIDTH, HEIGHT), layout="constrained")
        FigureCanvasSVG(drawing)
        draw(drawing.subplots())
        file = io.StringIO()
        drawing.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    return _for_the_page(file.getvalue(), title)


def _draw(axes: Any, plot: Plot) -> None:
    from matplotlib.ticker import MaxNLocator

    # A line through one point shows nothing, and few points are worth seeing one by one.
    marker = "o" if len(plot.epochs) <= 12 else ""
    for curve in plot.curves:
        axes.plot(
            plot.epochs,
            curve.points,
            color=curve.colour,
            linewidth=1.8,
            marker=marker,
            markersize=3.5,
            solid_capstyle="round",
        )
    if plot.marked is not None:
        last = plot.curves[-1]
        axes.plot(
            [plot.epochs[plot.marked]],
            [last.points[plot.marked]],
            marker="o",
            markersize=8,
            color=last.colour,
            markerfacecolor=_CARD,
            markeredgewidth=1.8,
        )
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True, min_n_ticks=1))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=5, min_n_ticks=2))
    if plot.reach is not None:
        axes.set_ylim(bottom=0, top=max(plot.reach, axes.get_ylim()[1] * 1.1))
    dress(axes, "epoch", plot.percent)


def dress(axes: Any, x_label: str, percent: bool) -> None:
    """The look that all drawings share: quiet lines, no frame, plain numbers or percent."""
    from matplotlib.ticker import FuncFormatter

    write = _percent if percent else _plain
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: write(value)))
    axes.set_xlabel(x_label, color=MUTED)
    axes.grid(axis="y", color=_LINE, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=MUTED, length=0, pad=6)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(_LINE)


def _percent(value: float) -> str:
    return f"{100 * value:.6g}%"


def _plain(value: float) -> str:
    return f"{value:,.6g}"


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
    own = re.sub(r"\W+", "-", title.lower())
    text = re.sub(r'\bid="([^"]*)"', rf'id="{own}-\1"', text)
    text = re.sub(r"url\(#([^)]*)\)", rf"url(#{own}-\1)", text)
    text = re.sub(r'href="#([^"]*)"', rf'href="#{own}-\1"', text)
    # Letters take the page's typeface; size, anchor and colour stay.
    text = re.sub(r"font: ([\d.]+px) [^;\"]*", r"font-size: \1", text)
    text = re.sub(r"font-family: [^;\"]*;?", "", text)
    for colour, variable in _INK.items():
        text = text.replace(colour, variable)
    return text.strip()
