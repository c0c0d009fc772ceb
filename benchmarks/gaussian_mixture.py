"""Asynchronous local SGD on a mixture of Gaussians: four workers of uneven speed, time simulated.

The experiment of Liu et al. 2024 (arXiv:2401.09135) with a narrower network: 32 Gaussians in 512
dimensions make 4 classes; 20 steps of AdamW (2e-4, cosine) from the server's values make one
difference, which our outer optimizers apply. This is a simulation of time in one process: no
parameter server, no network. Computing is real, and results are equal in every run.
"""

from __future__ import annotations

import copy
import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.common import Figure, announce, conclude, flush_denormals, parser, positive, show
from spartito.outer.optimizer import DiLoCo, OuterFactory, make_outer

SPEEDS = (0.58, 0.75, 1.51, 3.33)
"""Seconds of a step on each worker."""
WORKERS, EVERY, BATCH = len(SPEEDS), 20, 32
DIMENSIONS, CLASSES, CLUSTERS, NOISE = 512, 4, 8, 0.5
EXAMPLES, HELD_OUT = 128_000, 4_096
RATE, LEAST, DECAY = 2e-4, 1e-6, 1e-3
GRACE = 0.5
"""Seconds within which differences are merged before anybody trains on."""
PICTURES = Path(__file__).parents[1] / "docs" / "pictures"


class DelayedNesterov(torch.optim.Optimizer):
    """Every difference counts at once; momentum takes their mean, after each ``every``-th.

    Args:
        parameters: As of any optimizer.
        lr: The rate of the mean of ``every`` differences.
        momentum: Of Nesterov.
        every: How many differences are one step of the momentum.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], lr: float, momentum: float, every: int
    ) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "every": every})
        self._count = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Apply the gradients as one worker's difference."""
        self._count += 1
        for group in self.param_groups:
            due = self._count % group["every"] == 0
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(parameter)
                    state["sum"] = torch.zeros_like(parameter)
                part = parameter.grad / group["every"]
                state["sum"].add_(part)
                parameter.sub_(part, alpha=group["lr"])
                if due:
                    state["momentum"].mul_(group["momentum"]).add_(state["sum"])
                    state["sum"].zero_()
                    parameter.sub_(state["momentum"], alpha=group["lr"] * group["momentum"])


@dataclass(frozen=True, slots=True)
class Method:
    """Whether workers wait for each other, and what is done with their differences."""

    waits: bool
    outer: OuterFactory
    weight: float = 1.0


def methods() -> dict[str, Method]:
    """By name; the rates are the published ones."""
    alone = WORKERS**-0.5
    """What the difference of one worker counts for, as published."""

    def delayed(parameters: Iterable[nn.Parameter]) -> DelayedNesterov:
        return DelayedNesterov(parameters, 0.7, 0.9, WORKERS)

    return {
        "synchronous, Nesterov 0.7": Method(True, DiLoCo(0.7, 0.9)),
        "asynchronous, Nesterov 0.07": Method(False, DiLoCo(0.07, 0.9), alone),
        "asynchronous, delayed Nesterov": Method(False, delayed),
        "synchronous, no momentum": Method(True, DiLoCo(0.7, 0.0)),
        "asynchronous, no momentum": Method(False, DiLoCo(0.7, 0.0), alone),
    }


@dataclass(frozen=True, slots=True)
class Look:
    """An evaluation: after so many steps of all workers together, at so many simulated seconds."""

    steps: int
    seconds: float
    loss: float


def main() -> None:
    """Print each method's loss at equal steps and the simulated time, and draw the curves."""
    assert __doc__ is not None
    options = parser(__doc__, rounds=2)
    options.add_argument("--phases", type=positive, default=100, help="differences of each worker")
    options.add_argument("--width", type=positive, default=256, help="of the hidden layer")
    options.add_argument("--pictures", type=Path, help="a folder for drawings, as docs/pictures")
    given = options.parse_args()
    torch.set_num_threads(1)
    flush_denormals()
    here = announce(__doc__.splitlines()[0])
    curves: dict[str, list[list[Look]]] = {name: [] for name in methods()}
    for seed in range(given.rounds):
        data = mixture(seed)
        for name, method in methods().items():
            began = time.perf_counter()
            looks = Simulation(method, data, given.width, given.phases, seed).run()
            curves[name].append(looks)
            end = looks[-1]
            print(
                f"seed {seed + 1}/{given.rounds}  {name:<31} loss {end.loss:.4f} after "
                f"{end.steps:,} steps, {end.seconds:,.0f} simulated s "
                f"({time.perf_counter() - began:.0f} s)",
                flush=True,
            )
    figures = [
        Figure(f"{name}: {what}", value, measure=measure)
        for name, runs in curves.items()
        for what, value, measure in (
            ("loss", statistics.mean(run[-1].loss for run in runs), "nats"),
            ("simulated s", statistics.mean(run[-1].seconds for run in runs), "s"),
        )
    ]
    losses = {figure.name.partition(":")[0]: figure.value for figure in figures[::2]}
    order = sorted(losses, key=lambda name: losses[name])
    print("\nbest first: " + "  <  ".join(f"{name} ({show(losses[name])})" for name in order))
    if given.pictures:
        picture(given.pictures, curves)
    runs = {name: [[look.loss for look in run] for run in found] for name, found in curves.items()}
    conclude(here, figures, given.json, phases=given.phases, width=given.width, runs=runs)


Data = tuple[Tensor, Tensor, Tensor, Tensor]
"""Examples to train on and their classes, and those that are held out."""


def mixture(seed: int) -> Data:
    """Gaussians around points of length 1; the classes have as many each."""
    dice = torch.Generator().manual_seed(seed)
    centers = F.normalize(torch.randn(CLASSES * CLUSTERS, DIMENSIONS, generator=dice))

    def draw(count: int) -> tuple[Tensor, Tensor]:
        cluster = torch.randint(CLASSES * CLUSTERS, (count,), generator=dice)
        x = torch.randn(count, DIMENSIONS, generator=dice).mul_(NOISE).add_(centers[cluster])
        return x, cluster // CLUSTERS

    return (*draw(EXAMPLES), *draw(HELD_OUT))


@dataclass(slots=True)
class Worker:
    """Who computes: when it is ready, with what difference of which of the server's values."""

    seconds: float
    ready: float = 0.0
    difference: list[Tensor] | None = None


class Simulation:
    """One training: the server's values, and workers whose time is counted, not spent."""

    def __init__(self, method: Method, data: Data, width: int, phases: int, seed: int) -> None:
        torch.manual_seed(seed)
        self._method, self._seed = method, seed
        self._x, self._y, self._vx, self._vy = data
        self._phases = phases
        self._model = nn.Sequential(
            nn.Linear(DIMENSIONS, width), nn.ReLU(), nn.Linear(width, CLASSES)
        )
        self._outer = make_outer(method.outer, list(self._model.parameters()))
        self._workers = [Worker(seconds) for seconds in SPEEDS]
        self._visits = [0] * WORKERS  # of each shard of the data
        self._now, self._steps = 0.0, 0
        self._looks: list[Look] = []

    def run(self) -> list[Look]:
        """Train until all workers together have made their steps."""
        self._look()
        (self._run_together if self._method.waits else self._run_apart)()
        return self._looks

    def _run_together(self) -> None:
        for _ in range(self._phases):
            for worker in self._workers:
                self._train(worker)
            self._now = max(worker.ready for worker in self._workers)
            found = [self._take(worker) for worker in self._workers]
            self._apply([sum(parts) / WORKERS for parts in zip(*found, strict=True)])

    def _run_apart(self) -> None:
        while self._steps < self._phases * WORKERS * EVERY:
            for worker in self._workers:
                if worker.difference is None:
                    self._train(worker)
            self._now = min(worker.ready for worker in self._workers)
            until = self._now + GRACE
            for worker in sorted(self._workers, key=lambda worker: worker.ready):
                if worker.ready <= until:
                    self._now = worker.ready
                    self._apply([self._method.weight * part for part in self._take(worker)])

    def _train(self, worker: Worker) -> None:
        """A difference of EVERY steps from the server's values, of the shard that is due."""
        shard = min(range(WORKERS), key=lambda number: (self._visits[number], number))
        begin, total = self._visits[shard] * EVERY, self._phases * EVERY
        self._visits[shard] += 1
        model = copy.deepcopy(self._model)
        inner = torch.optim.AdamW(model.parameters(), RATE, weight_decay=DECAY, fused=True)
        for step in range(begin, begin + EVERY):
            done = min(1.0, step / total)
            inner.param_groups[0]["lr"] = LEAST + (RATE - LEAST) * 0.5 * (
                1 + math.cos(math.pi * done)
            )
            rows = self._rows(shard, step)
            inner.zero_grad()
            F.cross_entropy(model(self._x[rows]), self._y[rows]).backward()
            inner.step()
        pairs = zip(self._model.parameters(), model.parameters(), strict=True)
        worker.difference = [(before - after).detach() for before, after in pairs]
        worker.ready = self._now + EVERY * worker.seconds

    def _rows(self, shard: int, step: int) -> Tensor:
        """A batch: shards are equal parts of the examples, which lie in random order."""
        size = EXAMPLES // WORKERS
        return shard * size + torch.arange(step * BATCH, (step + 1) * BATCH) % size

    def _take(self, worker: Worker) -> list[Tensor]:
        assert worker.difference is not None
        found, worker.difference = worker.difference, None
        self._steps += EVERY
        return found

    def _apply(self, difference: Sequence[Any]) -> None:
        for parameter, part in zip(self._model.parameters(), difference, strict=True):
            parameter.grad = part
        self._outer.step()
        if self._steps % (10 * WORKERS * EVERY) == 0:
            self._look()

    def _look(self) -> None:
        with torch.no_grad():
            loss = float(F.cross_entropy(self._model(self._vx), self._vy))
        self._looks.append(Look(self._steps, self._now, loss))


def picture(folder: Path, curves: dict[str, list[list[Look]]]) -> None:
    """Draw the first seed's losses over steps, and over the simulated time."""
    from benchmarks.study_results import Curve, draw

    colours = ("#2b6ca3", "#bf5f12", "#37793f", "#7fa9cd", "#e0a878")
    ways: tuple[tuple[str, str, Callable[[Look], float]], ...] = (
        ("steps", "steps of all workers", lambda look: look.steps),
        ("time", "simulated seconds", lambda look: look.seconds),
    )
    for name, label, across in ways:
        lines = [
            Curve(
                method, [across(look) for look in runs[0]], [look.loss for look in runs[0]], paint
            )
            for (method, runs), paint in zip(curves.items(), colours, strict=True)
        ]
        path = folder / f"gaussian-mixture-{name}.svg"
        draw(path, "Mixture of Gaussians: held-out loss", label, "loss", lines)


if __name__ == "__main__":
    main()
