"""From a laptop to volunteers: what a plan says of two models on 2, 16, 256 and 10,000 tasks.

    python -m benchmarks.scales --profiles DIR [--docs]

Profiles that are missing in DIR are made there, one process for each, on a machine that has nothing
else to do. Everything else is computed. ``--docs`` writes table and pictures of
docs/explanation/scales.md.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.study_results import LINE, PAPER, QUIET, TEXT
from spartito.declared import parse
from spartito.launch.lines.line import Link
from spartito.names import size
from spartito.planning.cluster import Cluster, Kind
from spartito.planning.costs.parts import Situation
from spartito.planning.profile import Profile
from spartito.planning.search import Choice, Outcome, predict, search

DOCS = Path(__file__).parents[1] / "docs" / "explanation" / "scales.md"
BEGIN, END = "<!-- from benchmarks.scales -->", "<!-- until here -->"
MODELS = {"mnist": "Digits, a network of three layers", "gpt": "A small GPT over characters"}
MEMORY = 8e9
"""Bytes for each task."""
HOUR = 3600.0
SERVERS = 100
"""Parameter servers, where there are so many machines; else one on each."""
COLOURS = {
    "one_device": "#8a8a8a",
    "mirrored": "#1f6fb4",
    "multi_worker_mirrored": "#1f6fb4",
    "central_storage": "#63a5dd",
    "sharded": "#0b3c6f",
    "mesh": "#7d2a63",
    "pipeline": "#c2528b",
    "local_sgd": "#d9822b",
    "parameter_server": "#4a7f6c",
}


@dataclass(frozen=True, slots=True)
class Setting:
    """Machines, and how often one of them fails.

    Attributes:
        title: What a person calls them.
        machines: How many.
        workers: Tasks on each, with a core for each.
        link: The line of each; None on one machine.
        fail: Failures of one machine in an hour.
    """

    title: str
    machines: int
    workers: int
    link: str | None = None
    fail: float = 0.0

    @property
    def cluster(self) -> Cluster:
        """As a plan has them."""
        kind = Kind("machine", self.machines, self.workers, MEMORY * self.workers)
        line = Link.read(self.link) if self.link else None
        return Cluster((kind,), self.workers, line, min(self.machines, SERVERS))


SETTINGS = (
    Setting("2 cores of one machine", 1, 2),
    Setting("16 tasks: 4 machines at 10 Gbit/s", 4, 4, "10gbit"),
    Setting("256 tasks: 64 machines at 1 Gbit/s", 64, 4, "1gbit"),
    Setting(
        "10,000 volunteers at 50 Mbit/s and 80 ms; 30% leave every hour", 10_000, 1, "50mbit,80ms",
        0.3,
    ),
)  # fmt: skip


def profiles(folder: Path) -> dict[str, Profile]:
    """The profile of each model, made where it is missing."""
    found = {}
    folder.mkdir(parents=True, exist_ok=True)
    for model in MODELS:
        path = folder / f"{model}.json"
        if not path.exists():
            command = [sys.executable, "-m", "spartito", "plan", model, "--save-profile", str(path)]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        found[model] = Profile.read(path)
    return found


def outcome(profile: Profile, setting: Setting) -> Outcome:
    """The plan for a setting: each task has as many examples as one process has alone."""
    batch = profile.batch_size * setting.cluster.tasks
    return search(Situation(profile, setting.cluster, batch), fail=setting.fail / HOUR)


def best_of_each(found: Outcome) -> list[Choice]:
    """The fastest form of each strategy, by speed."""
    kinds: dict[str, Choice] = {}
    for choice in found.choices:
        kinds.setdefault(choice.strategy.name, choice)
    return list(kinds.values())


def efficiency(choice: Choice, profile: Profile, setting: Setting) -> float:
    """Its speed over that of as many single processes that exchange nothing and never fail."""
    alone = Cluster((Kind("core", 1, 1, MEMORY),), 1)
    one = predict(parse("one_device"), Situation(profile, alone, profile.batch_size))
    return choice.rate / (one.rate * setting.cluster.tasks)


def table(model: str, profile: Profile) -> str:
    """The best three of each setting, as lines of a page."""
    heads = [
        "tasks",
        "strategy",
        "examples/s",
        "of ideal",
        "sent",
        "lost",
        "limited by",
    ]
    rows = [heads, ["---"] * len(heads)]
    for setting in SETTINGS:
        for turn, choice in enumerate(best_of_each(outcome(profile, setting))[:3]):
            rows.append(
                [
                    setting.title if not turn else "",
                    f"`{choice.strategy}`",
                    f"{choice.rate:,.0f}",
                    f"{efficiency(choice, profile, setting):.0%}",
                    size(choice.cost.sent) if choice.cost.sent else "nothing",
                    f"{choice.loss.fraction:.0%}" if setting.fail else "",
                    choice.cost.limit,
                ]
            )
    lines = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    return f"## {MODELS[model]}\n\n![{MODELS[model]}](../pictures/scales/{model}.svg)\n\n{lines}"


def draw(path: Path, model: str, profile: Profile) -> None:
    """A panel for each setting: how near to ideal the best form of each strategy is."""
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
        engine = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1)
        drawing = Figure(figsize=(9.0, 7.0), layout=engine, facecolor=PAPER)
        for axes, setting in zip(drawing.subplots(2, 2, sharex=True).flat, SETTINGS, strict=True):
            shown = [
                (each, efficiency(each, profile, setting))
                for each in best_of_each(outcome(profile, setting))
                if each.strategy.name != "one_device"
            ]
            names = [each.strategy.name for each, _ in shown]
            values = [value for _, value in shown]
            axes.barh(names, values, color=[COLOURS[name] for name in names], height=0.62)
            for index, value in enumerate(values):
                text = f"{value:.0%}" if value >= 0.01 else f"{value:.1g}"
                axes.text(value + 0.01, index, text, va="center", color=QUIET, fontsize=9)
            axes.invert_yaxis()
            axes.set_xlim(0, max(1.12, *values))
            axes.set_facecolor(PAPER)
            title = textwrap.fill(setting.title, 36)
            axes.set_title(title, color=TEXT, loc="left", fontweight="bold", fontsize=10)
            axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g}%"))
            axes.grid(axis="x", color=LINE, linewidth=0.8)
            axes.set_axisbelow(True)
            axes.tick_params(colors=QUIET, length=0, pad=6)
            for side, spine in axes.spines.items():
                spine.set_visible(side == "left")
                spine.set_color(LINE)
        drawing.suptitle(
            f"{MODELS[model]}: speed over that of as many processes alone. Simulated",
            color=TEXT, x=0.01, ha="left", fontweight="bold", fontsize=12,
        )  # fmt: skip
        drawing.savefig(path, format="svg", facecolor=PAPER, metadata={"Date": None})


def write_docs(folder: Path, found: dict[str, Profile], docs: Path = DOCS) -> None:
    """Put tables and pictures where the page shows them."""
    target = docs.parents[1] / "pictures" / "scales"
    target.mkdir(parents=True, exist_ok=True)
    for model in found:
        shutil.copy(folder / f"{model}.svg", target)
    tables = "\n\n".join(table(model, profile) for model, profile in found.items())
    block = f"{BEGIN}\n\n{tables}\n\n{END}"
    pattern = f"{re.escape(BEGIN)}.*{re.escape(END)}"
    text, count = re.subn(pattern, lambda _: block, docs.read_text(), flags=re.DOTALL)
    if count != 1:
        raise ValueError(f"{docs} has no markers for the tables: {BEGIN} ... {END}")
    docs.write_text(text)


def main(arguments: Sequence[str] | None = None) -> None:
    """Make profiles, draw, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--profiles", type=Path, required=True, metavar="DIR")
    parser.add_argument("--docs", action="store_true", help="write the page's tables and pictures")
    given = parser.parse_args(arguments)
    found = profiles(given.profiles)
    for model, profile in found.items():
        draw(given.profiles / f"{model}.svg", model, profile)
        print(table(model, profile), end="\n\n")
    if given.docs:
        write_docs(given.profiles, found)


if __name__ == "__main__":
    main()
