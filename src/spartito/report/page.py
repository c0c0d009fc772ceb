"""The report of a run: one HTML file that is made from the files of the run's folder alone."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from spartito.errors import UserError
from spartito.names import FOR_DATA, RATE, plural
from spartito.report.bars import Bars, staleness_bars
from spartito.report.charts import NEUTRAL, SERIES, TRAINING, Chart, Line, drawn, page_colour
from spartito.report.charts import VALIDATION as VALIDATION_COLOUR
from spartito.report.evaluations import EVALUATIONS, with_evaluations
from spartito.report.figures import (
    GROUP_LOSS,
    NOTHING,
    VALIDATION,
    clock_time,
    figure,
    finite,
    higher_is_better,
    is_fraction,
    label,
    metric_names,
    number,
    scalars,
)
from spartito.report.layouts import layout_bars
from spartito.report.lines import json_object, record_of
from spartito.report.pipeline import timeline
from spartito.report.predicted import beside, read_plan
from spartito.report.templating import page_template
from spartito.storage.atomic import write_file_atomically
from spartito.storage.own_files import check_own, contains

CONFIG, HISTORY, REPORT = "config.json", "history.jsonl", "report.html"
OF_A_PAGE = contains(" · Spartito</title>")
"""How a page of ours is known."""
Epoch = Mapping[str, Any]
Facts = tuple[str, list[tuple[str, str]]]


def write_report(run_dir: str | os.PathLike[str], plan: Path | None = None) -> Path:
    """Write ``report.html`` into the run folder ``run_dir`` and return its path.

    It stands alone: no script, no link to elsewhere. Parts that the folder lacks are left out.
    With a ``plan`` it shows what that predicted, too.
    Raises `UserError` when it is no run folder, or cannot be written.
    """
    folder = Path(run_dir)
    path = folder / REPORT
    check_own(folder, {REPORT: OF_A_PAGE})
    write_file_atomically(path, render(folder, plan))
    return path


def render(folder: Path, plan: Path | None = None) -> str:
    """The page for the run folder ``folder``, as text; with what a plan predicted."""
    run = read_run(folder)
    template = page_template(
        "run.html.j2", figure=lambda value, name: figure(name, number(value)), heading=_heading
    )
    return template.render(
        run=run,
        title=_title(run),
        subtitle=_subtitle(run),
        cards=headline(run),
        charts=drawn(charts(run)),
        columns=_columns(run.epochs),
        best=best_epoch(run),
        predicted=[] if plan is None else _predicted(run, folder, plan),
        cluster=_cluster(run.section("cluster"), run.config.get("strategy")),
        servers=_servers(run.config),
        pipeline=timeline(run.section("pipeline")),
        staleness=_staleness(run.section("staleness")),
        layout=layout_bars(run.section("layout"), page_colour(TRAINING), page_colour(NEUTRAL)),
        settings=_settings(run),
        model=_model(run.section("model")),
        summary=str(run.section("model").get("summary") or "").strip("\n"),
    )


@dataclass(frozen=True)
class Run:
    """What the files of a run folder say; ``unreadable`` counts the lines that say nothing."""

    name: str
    config: Mapping[str, Any]
    epochs: Sequence[Epoch]
    unreadable: int = 0
    tables: Mapping[str, Any] = field(default_factory=dict)
    """Figures of the last epoch that are rows of numbers: confusion matrices."""

    def section(self, name: str) -> Mapping[str, Any]:
        """One part of the settings, empty when it is not there."""
        part = self.config.get(name)
        return part if isinstance(part, dict) else {}

    def series(self, name: str) -> list[float | None]:
        """The figure ``name`` of every epoch."""
        return [number(epoch.get(name)) for epoch in self.epochs]

    @property
    def axis(self) -> list[int]:
        """The number of every epoch, counted on where a later `fit` began at 1 again."""
        numbers = [number(epoch.get("epoch")) for epoch in self.epochs]
        known = [int(number) for number in numbers if number is not None]
        rising = all(a < b for a, b in pairwise(known))
        return known if rising and len(known) == len(numbers) else [*range(1, len(numbers) + 1)]


def read_run(folder: Path) -> Run:
    """Read ``config.json`` and ``history.jsonl``; either may be absent, not both."""
    if not any((folder / name).is_file() for name in (CONFIG, HISTORY)):
        raise UserError(
            f"{folder} is no run folder: it has neither {CONFIG} nor {HISTORY}",
            "Name the folder that was given as run_dir or --out.",
        )
    config = json_object(_text(folder / CONFIG))
    lines = [line for line in _text(folder / HISTORY).splitlines() if line.strip()]
    epochs: list[Epoch] = []
    unreadable = 0
    for line in lines:
        epoch = record_of(line)
        if not epoch:
            unreadable += 1
            continue
        # A resume from an older checkpoint went back: what it does again counts, not what was.
        while epochs and _goes_back(epochs[-1], epoch):
            epochs.pop()
        epochs.append(epoch)
    seen = [record_of(line) for line in _text(folder / EVALUATIONS).splitlines()]
    whole = with_evaluations(epochs, seen)
    tables = {name: value for name, value in (whole or [{}])[-1].items() if _is_table(value)}
    found = [scalars(epoch) for epoch in whole]
    return Run(folder.resolve().name, config, found, unreadable, tables)


def _is_table(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(row, list) for row in value)


def charts(run: Run) -> list[Chart]:
    """Loss, every metric, and the speed, over the epochs."""
    best = best_epoch(run)

    def chart(title: str, *lines: tuple[str, str, str], **options: Any) -> Chart:
        return Chart(
            title,
            "epoch",
            [Line(name, run.axis, run.series(key), colour) for name, key, colour in lines],
            epochs=True,
            **options,
        )

    quality = [
        chart(
            label(name).capitalize(),
            ("training", name, TRAINING),
            ("validation", VALIDATION + name, VALIDATION_COLOUR),
            percent=is_fraction(name),
            marked=run.axis[best[0]] if best and best[1] == VALIDATION + name else None,
        )
        for name in metric_names(name for epoch in run.epochs for name in epoch)
    ]
    groups = sorted(
        {name for epoch in run.epochs for name in epoch if name.startswith(GROUP_LOSS)},
        key=lambda name: int(name.removeprefix(GROUP_LOSS)),
    )
    losses = [
        (name.removeprefix("loss_of_").replace("_", " "), name, SERIES[number % len(SERIES)])
        for number, name in enumerate(groups)
    ]
    apart = [chart("Loss of each group", *losses)]
    if any("staleness" in epoch for epoch in run.epochs):
        merges = [(name, f"merges_of_{name.replace(' ', '_')}", colour)
                  for name, _, colour in losses]  # fmt: skip
        apart += [
            chart("Merges of each group", *merges, reach=0.0),
            chart("Staleness", ("merges since a group began", "staleness", NEUTRAL), reach=0.0),
        ]
    for level in ("groups", "sites"):
        sent = f"bytes_between_{level}"
        drift = "drift" if level == "groups" else "drift_of_sites"
        if any(sent in epoch for epoch in run.epochs):
            apart += [
                chart(
                    f"Drift of the {level}", ("distance from their mean", drift, NEUTRAL), reach=0.0
                ),
                chart(f"Bytes between {level}", ("bytes", sent, NEUTRAL), sizes=True, reach=0.0),
            ]
    apart.append(
        chart(
            "Waiting for meetings",
            ("fraction of the epoch", "meeting_wait_fraction", NEUTRAL),
            percent=True,
            reach=0.05,
        )
    )
    return [
        *quality,
        *(apart if groups else ()),
        chart("Throughput", ("examples per second", "examples_per_second", NEUTRAL), reach=0.0),
        chart(
            "Waiting for data",
            ("fraction of the epoch", "data_wait_fraction", NEUTRAL),
            percent=True,
            reach=0.05,
        ),
    ]


@dataclass(frozen=True)
class Card:
    """One figure of the headline, what it is, and a word more."""

    value: str
    name: str
    more: str = ""


def _predicted(run: Run, folder: Path, plan: Path) -> list[Bars]:
    """What the plan at a path said, beside what the run did."""
    told = [json_object(_text(file)) for file in sorted((folder / "tasks").glob("*.json"))]
    memory = [number(each.get("peak_memory_bytes")) for each in told]
    return beside(
        read_plan(plan),
        run.config,
        finite(run.series("examples_per_second")),
        [value for value in memory if value],
        (page_colour(NEUTRAL), page_colour(TRAINING)),
    )


def headline(run: Run) -> list[Card]:
    """The figures that a reader looks for first."""
    cards: list[Card] = []
    best = best_epoch(run)
    if best is not None:
        index, name = best
        value = run.series(name)[index]
        cards.append(Card(figure(name, value), f"best {label(name)}", f"epoch {run.axis[index]}"))
    for name in _final_names(run):
        cards.append(Card(figure(name, run.series(name)[-1]), f"final {label(name)}"))
    seconds = finite(run.series("seconds"))
    if seconds:
        cards.append(
            Card(clock_time(sum(seconds)), "training time", plural(len(run.epochs), "epoch"))
        )
    rates = sorted(finite(run.series("examples_per_second")))
    if rates:
        middle = figure("examples_per_second", rates[len(rates) // 2])
        waits = finite(run.series("data_wait_fraction"))
        waited = figure("data_wait_fraction", sum(waits) / len(waits)) if waits else ""
        cards.append(Card(middle, "examples per second", waited and f"{waited} waiting for data"))
    return cards


def best_epoch(run: Run) -> tuple[int, str] | None:
    """Which epoch did best, by which figure: the first metric of validation, else its loss."""
    names = metric_names(name for epoch in run.epochs for name in epoch)
    for name in (*(VALIDATION + n for n in [*names[1:], *names[:1]]), *names[1:], *names[:1]):
        found = [
            (v, i) for i, v in enumerate(run.series(name)) if v is not None and not math.isnan(v)
        ]
        if found:
            pick = max if higher_is_better(name) else min
            return pick(found, key=lambda pair: pair[0])[1], name
    return None


def _final_names(run: Run) -> list[str]:
    last = run.epochs[-1] if run.epochs else {}
    names = metric_names(last)
    prefix = VALIDATION if any(name.startswith(VALIDATION) for name in last) else ""
    return [prefix + name for name in [*names[1:], *names[:1]][:3] if prefix + name in last]


def _title(run: Run) -> str:
    recipe = run.section("recipe").get("name")
    return str(recipe or run.section("model").get("name") or run.name)


def _subtitle(run: Run) -> str:
    replicas = run.section("cluster").get("replicas")
    parts = [
        str(run.section("model").get("name", "")) if run.section("recipe").get("name") else "",
        str(run.config.get("strategy", "")),
        plural(replicas, "replica") if isinstance(replicas, int) else "",
        f"run {run.name}",
    ]
    return " · ".join(part for part in parts if part)


def _columns(epochs: Sequence[Epoch]) -> list[str]:
    """The table's columns: training beside validation, bookkeeping around them."""
    there = dict.fromkeys(name for epoch in epochs for name in epoch)
    pairs = [n for name in metric_names(there) for n in (name, VALIDATION + name)]
    order = ["epoch", "step", *pairs, "seconds", "examples_per_second", "data_wait_fraction"]
    order += ["redone"] if any(epoch.get("redone") for epoch in epochs) else []
    return [name for name in order if name in there]


def _cluster(cluster: Mapping[str, Any], strategy: Any) -> list[Facts]:
    tasks = cluster.get("tasks")
    members = [
        (f"{role} {index}", str(address))
        for role, addresses in (tasks if isinstance(tasks, dict) else {}).items()
        for index, address in enumerate(addresses or [])
    ]
    facts = {
        "strategy": strategy,
        "replicas": cluster.get("replicas"),
        "threads per replica": cluster.get("threads"),
        "found by": cluster.get("source"),
    }
    job = [(name, str(value)) for name, value in facts.items() if value is not None]
    return [(name, part) for name, part in (("Job", job), ("Tasks", members)) if part]


def _servers(config: Mapping[str, Any]) -> list[list[str]]:
    """Rows of server, tensor, which part of it, size; empty where there are no servers."""
    rows = config.get("servers")
    return [list(map(str, row)) for row in rows] if isinstance(rows, list) else []


def _staleness(counts: Mapping[str, Any]) -> list[Bars]:
    pushes = {int(late): int(count) for late, count in counts.items()}
    bars = staleness_bars("Staleness", pushes, page_colour(TRAINING))
    return [bars] if bars.rows else []


def _model(model: Mapping[str, Any]) -> str:
    counts = [
        f"{model[key]:,} {words}"
        for key, words in (("trainable", "trainable"), ("not_trainable", "not trainable"))
        if isinstance(model.get(key), int)
    ]
    parameters = ["parameters: " + ", ".join(counts)] if counts else []
    return " · ".join([*([str(model["name"])] if model.get("name") else []), *parameters])


def _heading(name: str) -> str:
    short = {
        "examples_per_second": RATE,
        "data_wait_fraction": FOR_DATA,
        "redone": "done again",
        "seconds": "time",
    }
    return short.get(name, label(name))


def _settings(run: Run) -> list[Facts]:
    versions = {name: run.config.get(name) for name in ("spartito", "torch", "python")}
    sections = {
        "Fit": run.section("fit"),
        "Data": run.section("data"),
        "Recipe": run.section("recipe"),
        "Versions": {name: value for name, value in versions.items() if value is not None},
    }
    return [(name, list(_flat(part))) for name, part in sections.items() if part]


def _flat(part: Mapping[str, Any], before: str = "") -> Iterable[tuple[str, str]]:
    for key, value in part.items():
        name = f"{before}{str(key).replace('_', ' ')}"
        if isinstance(value, dict):
            yield from _flat(value, f"{name} · ")
        else:
            yield name, _words(value)


def _words(value: Any) -> str:
    if value is None:
        return NOTHING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(_words(part) for part in value)
    return f"{value:,}" if isinstance(value, int) and abs(value) >= 10_000 else str(value)


def _goes_back(before: Epoch, epoch: Epoch) -> bool:
    earlier, later = number(before.get("step")), number(epoch.get("step"))
    return earlier is not None and later is not None and earlier >= later


def _text(file: Path) -> str:
    try:
        return file.read_text(errors="replace")
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}") from error
