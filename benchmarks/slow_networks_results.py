"""Table and pictures of `benchmarks.slow_networks`."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.study_results import LINE, PAPER, QUIET, TEXT
from spartito.launch.lines.line import Link
from spartito.report.figures import figure

DOCS = Path(__file__).parents[1] / "docs" / "guides" / "slow-networks.md"
BEGIN, END = "<!-- from benchmarks.slow_networks -->", "<!-- until here -->"
TABLE = "table.md"
BATCH = 64
EXACT = "multi_worker_mirrored"
TITLES = {"digits": "Digits (269,322 parameters)", "photos": "Photos (2,782,649 parameters)"}
RANGE = {"digits": 0.05, "photos": 0.3}
"""Of accuracy, below the best."""
COLOURS = (
    "#8a8a8a",
    "#1f6fb4",
    "#63a5dd",
    "#0b3c6f",
    "#c2528b",
    "#7d2a63",
    "#d9822b",
    "#e8b04a",
    "#8c4a0f",
    "#2f2f2f",
)
"""By strategy: one machine grey, gradients blue, servers pink, groups orange."""


def write_results(
    out: Path, models: Sequence[str], names: Sequence[str], rates: Sequence[str]
) -> str:
    """Draw what the folder ``out`` has, and return the tables, which are kept too."""
    parts = []
    for model in models:
        ran = [name for name in names if (out / model / name / "learned.json").exists()]
        found = {name: _read(out / model / name, rates) for name in ran}
        parts.append(_table(model, found, rates))
        _draw(out / f"{model}.svg", model, found, rates)
    here: dict[str, Any] = next(iter(found.values()))["machine"]
    words = f"Measured on: {here['cpu']}, {here['cores']} cores, torch {here['torch']}."
    text = "\n\n".join([words, *parts])
    (out / TABLE).write_text(text + "\n")
    return text


def write_docs(out: Path, models: Sequence[str], docs: Path = DOCS) -> None:
    """Put tables and pictures of ``out`` where the page ``docs`` shows them."""
    target = docs.parents[1] / "pictures" / "slow-networks"
    target.mkdir(parents=True, exist_ok=True)
    for model in models:
        shutil.copy(out / f"{model}.svg", target)
    block = f"{BEGIN}\n\n{(out / TABLE).read_text()}\n{END}"
    text, count = re.subn(
        f"{re.escape(BEGIN)}.*{re.escape(END)}", lambda _: block, docs.read_text(), flags=re.DOTALL
    )
    if count != 1:
        raise ValueError(f"{docs} has no markers for the tables: {BEGIN} ... {END}")
    docs.write_text(text)


def _read(folder: Path, rates: Sequence[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "learned.json").read_text())
    files = {rate: folder / f"{rate}.json" for rate in rates}
    found["rates"] = {r: json.loads(f.read_text())["rate"] for r, f in files.items() if f.exists()}
    return found


def times(
    found: dict[str, dict[str, Any]], name: str, rate: str, batch: int = BATCH
) -> list[float]:
    """Seconds of training until the end of each epoch on that line.

    PowerSGD's first epoch is exact, so that it takes as long as one without it.
    """
    ends = found[name]["step"]
    seconds, before = [], 0
    for number, end in enumerate(ends):
        of = EXACT if number == 0 and name.endswith("powersgd") else name
        seconds.append((end - before) * batch / found[of]["rates"][rate])
        before = end
    return [sum(seconds[: n + 1]) for n in range(len(seconds))]


def _table(model: str, found: dict[str, dict[str, Any]], rates: Sequence[str]) -> str:
    epochs = len(next(iter(found.values()))["step"])
    lines = [Link.read(rate).spoken for rate in rates]
    heads = [f"{model}: examples/s on", *lines, f"accuracy after {epochs} epochs"]
    rows = [heads, ["---"] * len(heads)]
    for name, run in found.items():
        speeds = [f"{run['rates'][r]:,.0f}" if r in run["rates"] else "not run" for r in rates]
        rows.append([_title(name), *speeds, figure("val_accuracy", run["accuracy"][-1])])
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    return f"{table}\n\n![{TITLES[model]}](../pictures/slow-networks/{model}.svg)"


def _title(name: str) -> str:
    strategy, _, options = name.partition("-")
    return f"`{strategy}`" + (f", {options.replace('-', ', ')}" if options else "")


def _draw(path: Path, model: str, found: dict[str, dict[str, Any]], rates: Sequence[str]) -> None:
    """A panel for each rate: validation accuracy over seconds, these on a logarithmic axis."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine
    from matplotlib.ticker import FuncFormatter

    style: Any = {
        "svg.fonttype": "none",
        "svg.hashsalt": path.name,
        "font.family": "sans-serif",
        "font.sans-serif": ["DejaVu Sans"],
        "font.size": 10,
    }
    with matplotlib.rc_context(style):
        engine = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.08)
        drawing = Figure(figsize=(9.0, 7.4), layout=engine, facecolor=PAPER)
        panels = drawing.subplots(2, 2, sharex=True, sharey=True).flat
        best = max(max(run["accuracy"]) for run in found.values())
        panels[0].set_ylim(best - RANGE[model], best + RANGE[model] / 20)
        for axes, rate in zip(panels, rates, strict=True):
            axes.set_facecolor(PAPER)
            for (name, run), colour in zip(found.items(), COLOURS, strict=False):
                if rate not in run["rates"]:
                    continue
                label = _title(name).replace("`", "")
                axes.plot(
                    times(found, name, rate), run["accuracy"], color=colour, linewidth=1.8,
                    marker="o", markersize=2.5, label=label,
                )  # fmt: skip
            axes.set_xscale("log")
            title = Link.read(rate).spoken
            axes.set_title(title, color=TEXT, loc="left", fontweight="bold", fontsize=11)
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g}%"))
            axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g} s"))
            axes.grid(color=LINE, linewidth=0.8)
            axes.set_axisbelow(True)
            axes.tick_params(which="both", colors=QUIET, length=0, pad=6)
            for side, spine in axes.spines.items():
                spine.set_visible(side == "bottom")
                spine.set_color(LINE)
        title = f"{TITLES[model]}: validation accuracy over time"
        drawing.suptitle(title, color=TEXT, x=0.01, ha="left", fontweight="bold", fontsize=12)
        names = panels[0].get_legend_handles_labels()
        drawing.legend(
            *names, loc="outside lower center", ncols=2, frameon=False, fontsize=9, labelcolor=TEXT
        )
        drawing.savefig(path, format="svg", facecolor=PAPER, metadata={"Date": None})
