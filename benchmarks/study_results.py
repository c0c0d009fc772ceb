"""What the study found: a table, and a picture of each curve; read from its run folders."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spartito.comparison.report.results import Figures, comparison, read_result
from spartito.report.figures import NOTHING, clock_time, figure, is_fraction, or_nothing, percent

DOCS = Path(__file__).resolve().parent.parent / "docs" / "explanation" / "study.md"
PICTURES = "pictures"
TABLE = "table.md"
BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"
QUARTER = "_quarter"

SIZE = (8.6, 4.0)
"""Inches at 72 dots."""

TEXT, QUIET, LINE, PAPER = "#26282b", "#6b675c", "#dcd8cc", "#fbfaf6"
BLUE, ORANGE = "#2b6ca3", "#bf5f12"
TITLES = {"cats_vs_dogs": "Cats and dogs", "digits": "Digits"}
HEADS = (
    "training",
    "workers' CPUs",
    "accuracy",
    "best",
    "loss",
    "time",
    "start to end",
    "examples/s",
    "waits for tasks",
    "staleness mean / most",
)


@dataclass(frozen=True, slots=True)
class Result:
    """One run: its figures, and the seconds of the whole job."""

    name: str
    cpus: str
    seconds: float
    figures: Figures

    @property
    def study(self) -> str:
        """The study that it belongs to."""
        return self.name.removesuffix(QUARTER)

    @property
    def model(self) -> str:
        """What was trained."""
        return self.study.rpartition("_")[0]

    @property
    def kind(self) -> str:
        """``synchronous`` or ``asynchronous``."""
        return self.study.rpartition("_")[2]

    @property
    def rate(self) -> float | None:
        """Examples per second over the whole training, with its evaluations.

        A chief that evaluates while others train cannot tell an epoch's own time.
        """
        batch = self.figures.batch_size
        return None if batch is None else batch * self.figures.steps[-1] / self.figures.times[-1]

    @property
    def is_even(self) -> bool:
        """Whether both workers have the same."""
        return self.name == self.study


@dataclass(frozen=True, slots=True)
class Curve:
    """A line of a picture; that of training is ``faint``, that of even workers ``wide``."""

    label: str
    xs: Sequence[float]
    ys: Sequence[float | None]
    colour: str
    faint: bool = False
    wide: bool = False


def write_results(out: Path, names: Sequence[str]) -> str:
    """Draw the runs ``names`` of the folder ``out``, and return their table, which is kept too."""
    results = [read(out, name) for name in names]
    found = machine_line(out, names) + "\n\n" + table(results)
    (out / TABLE).write_text(found + "\n")
    folder = out / PICTURES
    folder.mkdir(exist_ok=True)
    for study in dict.fromkeys(result.study for result in results):
        runs = sorted((r for r in results if r.study == study), key=lambda r: not r.is_even)
        for name in ("accuracy", "loss"):
            title = f"{TITLES[runs[0].model]}, {runs[0].kind}: {name}"
            draw(folder / f"{study}_{name}.svg", title, "epoch", name, _by_epoch(runs, name))
    for model in dict.fromkeys(result.model for result in results):
        runs = sorted(
            (r for r in results if r.model == model), key=lambda r: (r.kind, not r.is_even)
        )
        title = f"{TITLES[model]}: validation accuracy over time"
        words = "seconds of training"
        draw(folder / f"{model}_time.svg", title, words, "accuracy", _by_time(runs))
    return found


def write_docs(out: Path, docs: Path = DOCS) -> None:
    """Put the table and the pictures of ``out`` where the page ``docs`` shows them."""
    target = docs.parents[1] / "pictures" / "study"
    target.mkdir(parents=True, exist_ok=True)
    for picture in sorted((out / PICTURES).glob("*.svg")):
        shutil.copy(picture, target)
    text = docs.read_text()
    block = f"{BEGIN}\n\n{(out / TABLE).read_text()}\n{END}"
    found, count = re.subn(
        f"{re.escape(BEGIN)}.*{re.escape(END)}", lambda _: block, text, flags=re.DOTALL
    )
    if count != 1:
        raise ValueError(f"{docs} has no markers for the table: {BEGIN} ... {END}")
    docs.write_text(found)


def read(out: Path, name: str) -> Result:
    """The run ``name`` of the folder ``out``."""
    facts = json.loads((out / f"{name}.json").read_text())
    run = {"strategy": name, "workers": 2, "run": name, **read_result(out / name)}
    (figures,) = comparison({"runs": [run]}).all_runs
    return Result(name, facts["cpus"], facts["seconds"], figures)


def machine_line(out: Path, names: Sequence[str]) -> str:
    """What the runs had, and how many epochs they were, in a sentence."""
    facts = json.loads((out / f"{names[0]}.json").read_text())
    here: Mapping[str, Any] = facts["machine"]
    trial = f" **A trial of {facts['epochs']} epochs.**" if facts["epochs"] else ""
    return f"Measured on: {here['cpu']}, {here['cores']} cores, torch {here['torch']}.{trial}"


def table(results: Sequence[Result]) -> str:
    """All runs as rows of Markdown, synchronous and asynchronous below each other."""
    order = sorted(results, key=lambda r: (r.model, not r.is_even, r.kind != "synchronous"))
    rows = [HEADS, ["---"] * len(HEADS), *map(_row, order)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _row(result: Result) -> list[str]:
    run = result.figures
    mean = run.mean_staleness
    return [
        f"{TITLES[result.model].lower()}, {result.kind}",
        "1 and 1" if result.is_even else result.cpus.replace(",", " and "),
        figure("val_accuracy", run.final),
        figure("val_accuracy", run.best),
        figure("val_loss", run.loss),
        clock_time(run.times[-1]),
        clock_time(result.seconds),
        figure("examples_per_second", result.rate),
        or_nothing(run.waited_for_tasks, percent),
        NOTHING if mean is None else f"{mean:.2f} / {max(run.staleness)}",
    ]


def _by_epoch(runs: Sequence[Result], name: str) -> list[Curve]:
    curves = []
    for run in runs:
        epochs = range(1, len(run.figures.epochs) + 1)
        cpus = "1 CPU each" if run.is_even else "1 and ¼ CPU"
        colour = BLUE if run.is_even else ORANGE
        for key, faint in ((f"val_{name}", False), (name, True)):
            label = f"{'training' if faint else 'validation'}, {cpus}"
            values = run.figures.series(key)
            curves.append(Curve(label, list(epochs), values, colour, faint, run.is_even))
    return curves


def _by_time(runs: Sequence[Result]) -> list[Curve]:
    return [
        Curve(
            f"{run.kind}, {'1 CPU each' if run.is_even else '1 and ¼ CPU'}",
            run.figures.times,
            run.figures.series("val_accuracy"),
            BLUE if run.kind == "synchronous" else ORANGE,
            wide=run.is_even,
        )
        for run in runs
    ]


def draw(path: Path, title: str, x_label: str, name: str, curves: Sequence[Curve]) -> None:
    """Write the picture of ``curves``, equal for equal input."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    style: Any = {
        "svg.fonttype": "none",
        "svg.hashsalt": path.name,
        "font.family": "sans-serif",
        "font.sans-serif": ["DejaVu Sans"],
        "font.size": 10,
    }
    with matplotlib.rc_context(style):
        engine = ConstrainedLayoutEngine(w_pad=0.15, h_pad=0.06)
        drawing = Figure(figsize=SIZE, layout=engine, facecolor=PAPER)
        axes = drawing.subplots()
        axes.set_facecolor(PAPER)
        for curve in curves:
            axes.plot(
                curve.xs,
                [float("nan") if y is None else y for y in curve.ys],
                color=curve.colour,
                # Where both are equal the narrow line lies on the wide one, and both are seen.
                linewidth=(4.5 if curve.wide else 1.6) * (0.6 if curve.faint else 1),
                linestyle=(0, (4, 2)) if curve.faint else "-",
                alpha=0.45 if curve.wide else 1,
                solid_capstyle="round",
                label=curve.label,
            )
        axes.set_title(title, color=TEXT, loc="left", fontweight="bold", fontsize=12, pad=10)
        axes.set_xlabel(x_label, color=QUIET)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=10, steps=[1, 2, 5, 10], integer=True))
        axes.margins(x=0.01)
        if is_fraction(name):
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0%}"))
        axes.grid(axis="y", color=LINE, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.tick_params(colors=QUIET, length=0, pad=6)
        for side, spine in axes.spines.items():
            spine.set_visible(side == "bottom")
            spine.set_color(LINE)
        drawing.legend(
            loc="outside lower center", ncols=2, frameon=False, fontsize=9, labelcolor=TEXT
        )
        drawing.savefig(path, format="svg", facecolor=PAPER, metadata={"Date": None})
