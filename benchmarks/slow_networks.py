"""Accuracy over time on lines of 10 Gbit/s to 10 Mbit/s: digits and photos, by strategy.

    python -m benchmarks.slow_networks --out DIR [--data PetImages] [--docs]

Two machines of one worker each. Every strategy trains once, which gives its accuracy after each
epoch; then it trains a little on each line (``--link``), which gives its examples per second
there. A line changes how long an epoch takes, not what is learned in it: the pictures put the two
together. What has run in DIR is not run again: after a break, give the same command.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.common import announce, machine, positive
from benchmarks.launching import run_quietly
from benchmarks.slow_networks_results import write_docs, write_results
from spartito.comparison.report.results import read_result
from spartito.names import ENV_RUN_DIR

RATES = ("10gbit", "1gbit", "100mbit", "10mbit")
EPOCHS = {"digits": 10, "photos": 5}
FULL = {"digits": 20, "photos": 30}
STEPS = {"10gbit": 60, "1gbit": 60, "100mbit": 20, "10mbit": 6}
"""Of an epoch by which a line is measured, where gradients are sent at each; one epoch warms up."""
LIMIT = 900.0


@dataclass(frozen=True, slots=True)
class Side:
    """A strategy with its options."""

    strategy: str
    options: Mapping[str, Any] = field(default_factory=dict)
    ps: int = 0
    every: int | None = None
    """Updates from one meeting of groups to the next."""

    @property
    def name(self) -> str:
        """As its folder is called."""
        said = [key if value is True else str(value) for key, value in self.options.items()]
        return "-".join([self.strategy, *["groups"] * bool(self.ps and self.every), *said])

    @property
    def meets(self) -> bool:
        """Whether it sends now and then, so that whole epochs are measured."""
        return self.every is not None or self.strategy == "one_device"

    def line(self, rate: str) -> list[str]:
        """The words that put its tasks on a line."""
        return [] if self.strategy == "one_device" else [f"--link={rate}"]

    def command(self, *words: str) -> list[str]:
        """What runs it."""
        workers = 1 if self.strategy == "one_device" else 2
        own = ["-m", "spartito", "run", f"--strategy={self.strategy}", f"--workers={workers}"]
        own += [f"--ps={self.ps}"] if self.ps else []
        meets = {} if self.every is None else {"groups": 2, "every": self.every}
        return [*own, f"--strategy-options={json.dumps(meets | dict(self.options))}", *words]


SIDES = (
    Side("one_device"),
    Side("multi_worker_mirrored"),
    Side("multi_worker_mirrored", {"compress": "bf16"}),
    Side("multi_worker_mirrored", {"compress": "powersgd"}),
    Side("parameter_server", ps=1),
    Side("parameter_server", ps=1, every=20),
    Side("local_sgd", every=20),
    Side("local_sgd", {"compress": "8bit"}, every=20),
    Side("local_sgd", {"compress": "4bit"}, every=20),
    Side("local_sgd", {"compress": "4bit", "overlap": True}, every=20),
)


def main() -> None:
    """Run what has not run, and write table and pictures."""
    assert __doc__ is not None
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--out", type=Path, required=True, help="a folder for runs and results")
    options.add_argument("--data", type=Path, help="photos, a folder per class; none: digits only")
    options.add_argument("--epochs", type=positive, help="of each training; few by default")
    options.add_argument("--full", action="store_true", help="as many epochs as they take to learn")
    options.add_argument("--docs", action="store_true", help="put the results into docs")
    given = options.parse_args()
    announce(__doc__.splitlines()[0])
    models = ("digits", "photos") if given.data else ("digits",)
    for model in models:
        epochs = given.epochs or (FULL if given.full else EPOCHS)[model]
        job = ["-m", "benchmarks.jobs.slow_networks", model]
        job += [f"--data={given.data.resolve()}"] if given.data else []
        job += [f"--cache={given.out.resolve() / 'cache'}"] if given.data else []
        for side in SIDES:
            learn(side, job, given.out / model / side.name, epochs)
            for rate in RATES:
                measure(side, job, given.out / model / side.name, rate)
    print(write_results(given.out, models, [side.name for side in SIDES], RATES))
    if given.docs:
        write_docs(given.out, models)


def learn(side: Side, job: Sequence[str], folder: Path, epochs: int) -> None:
    """The accuracy after each epoch, on the fastest line: on one machine nothing is compressed."""
    file = folder / "learned.json"
    if is_there(file):
        return
    history = train(side.command(*side.line(RATES[0]), *job, f"--epochs={epochs}"))
    found = {
        "accuracy": [epoch["val_accuracy"] for epoch in history],
        "step": [epoch["step"] for epoch in history],
        "machine": machine(),
    }
    keep(file, found)


def measure(side: Side, job: Sequence[str], folder: Path, rate: str) -> None:
    """Examples per second on a line of that rate, without the first epoch."""
    file = folder / f"{rate}.json"
    if is_there(file):
        return
    if side.strategy == "one_device" and rate != RATES[0]:
        keep(file, json.loads((folder / f"{RATES[0]}.json").read_text()))  # no line, no difference
        return
    steps = [] if side.meets else [f"--steps={STEPS[rate]}"]
    words = ["--epochs=2", *(steps or ["--steps=125" if job[2] == "digits" else "--steps=62"])]
    words += ["--thin"] if side.options.get("compress") == "powersgd" else []
    history = train(side.command(*side.line(rate), *job, *words))
    keep(file, {"rate": history[-1]["examples_per_second"]})


def train(command: Sequence[str]) -> list[dict[str, Any]]:
    """The history of a run."""
    with tempfile.TemporaryDirectory() as folder:
        run_quietly(command, env={ENV_RUN_DIR: folder}, limit=LIMIT)
        found: list[dict[str, Any]] = read_result(Path(folder))["history"]
    return found


def is_there(file: Path) -> bool:
    """Whether that was run already; says what runs now."""
    if not file.exists():
        print(f"{file.parent.parent.name}: {file.parent.name}, {file.stem}", file=sys.stderr)
    return file.exists()


def keep(file: Path, found: Mapping[str, Any]) -> None:
    """Write a result whole or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(".part")
    part.write_text(json.dumps(found))
    os.replace(part, file)


if __name__ == "__main__":
    main()
