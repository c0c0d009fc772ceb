"""Validation accuracy on the digits at equal pushes and a forced order: what to do with stale ones.

A parameter server's own store in one process, and workers whose batches end in virtual time: the
same order of pushes for all sides, equal in every run. ``none stale`` is one worker alone.
"""

from __future__ import annotations

import heapq
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from benchmarks.common import Figure, announce, conclude, flush_denormals, parser, positive, show

RATES = (0.1, 0.2, 0.3, 0.4)
BATCH = 32
SLOW = 4.0
"""So many times as long as the others needs the last worker for a batch."""


def sides() -> dict[str, dict[str, Any]]:
    """What `Rules` are told on each side."""
    return {
        "none stale": {},
        "plain": {},
        "wait, bound 2": {"max_staleness": 2},
        "scale": {"on_stale": "scale"},
        "compensate": {"on_stale": "compensate"},
        "compensate, 1": {"on_stale": {"compensate": 1.0}},
        "adaptive": {"on_stale": {"compensate": 2.0, "mean_square": 0.95}},
    }


@dataclass(frozen=True, slots=True)
class Trained:
    """How a training ended: a fraction, updates, and seconds if a batch takes about one."""

    accuracy: float
    staleness: float
    seconds: float
    batches: int


def main() -> None:
    """Print the mean accuracy over the seeds by side and learning rate, and each side's best."""
    assert __doc__ is not None
    options = parser(__doc__, rounds=5)
    options.add_argument("--workers", type=positive, default=4, help="that push in turn")
    options.add_argument("--epochs", type=positive, default=2, help="of each training")
    options.add_argument("--momentum", type=float, default=0.0, help="of SGD on the server")
    options.add_argument("--rates", type=float, nargs="+", default=RATES,
                         help="at the beginning; they fall to 0 along a line")  # fmt: skip
    options.add_argument("--only", nargs="+", choices=sides(), default=list(sides()))
    given = options.parse_args()
    asked = {side: rules for side, rules in sides().items() if side in given.only}
    rates: Sequence[float] = given.rates
    flush_denormals()
    here = announce(__doc__.splitlines()[0])
    found: dict[str, dict[float, list[Trained]]] = {s: {r: [] for r in rates} for s in asked}
    for seed in range(given.rounds):
        for side, rules in asked.items():
            for rate in rates:
                workers = 1 if side == "none stale" else given.workers
                one = train(rules, rate, given.momentum, workers, given.epochs, seed)
                found[side][rate].append(one)
            line = "  ".join(f"{100 * found[side][rate][-1].accuracy:5.1f}" for rate in rates)
            print(f"seed {seed + 1}/{given.rounds}  {side:<16} {line}", flush=True)
    table(found, rates)
    best = {side: max(mean(runs, "accuracy") for runs in by.values()) for side, by in found.items()}
    figures = [
        Figure(f"{side}: accuracy (%) at its best rate", 100 * value, measure="%")
        for side, value in best.items()
    ]
    runs = {
        side: {str(rate): [one.accuracy for one in runs] for rate, runs in by.items()}
        for side, by in found.items()
    }
    conclude(here, figures, given.json, epochs=given.epochs, workers=given.workers, runs=runs)


def mean(runs: Sequence[Trained], name: str) -> float:
    """Of the seeds."""
    return float(statistics.mean(getattr(one, name) for one in runs))


def table(found: dict[str, dict[float, list[Trained]]], rates: Sequence[float]) -> None:
    """Print the means."""
    heads = "  ".join(f"{f'rate {rate:g}':>9}" for rate in rates)
    print(f"\n{'validation accuracy (%)':<24} {heads}  staleness  batches  time")
    for side, by in found.items():
        cells = "  ".join(f"{100 * mean(runs, 'accuracy'):9.2f}" for runs in by.values())
        last = by[rates[0]]
        more = [mean(last, name) for name in ("staleness", "batches", "seconds")]
        print(f"{side:<24} {cells}  {more[0]:9.2f}  {more[1]:7,.0f}  {show(more[2])}")


def train(
    options: dict[str, Any], rate: float, momentum: float, workers: int, epochs: int, seed: int
) -> Trained:
    """Train with a server's store under these rules; pushes come in the order of virtual time."""
    import torch

    import spartito as sp
    from spartito.data.sets.packaged import split_digits
    from spartito.ps.client.vector import SpanCopies, Vector
    from spartito.ps.protocol.layout import Span
    from spartito.ps.protocol.memory import allocate
    from spartito.ps.protocol.messages import Outcome, Push
    from spartito.ps.protocol.rules import Rules
    from spartito.ps.server.shard import Shard
    from spartito.ps.server.staleness import Gate
    from spartito.ps.server.store import Store

    torch.manual_seed(seed)
    torch.set_num_threads(1)
    (x, y), (vx, vy) = (
        (torch.from_numpy(images).float() / 255, torch.from_numpy(labels))
        for images, labels in split_digits()
    )
    model, twin = sp.models.MnistMLP(), sp.models.MnistMLP()
    model.load_state_dict(twin.state_dict())
    rules = Rules(workers, **options)
    vectors = [Vector(m, torch.optim.SGD(m.parameters(), rate, momentum)) for m in (model, twin)]
    served = torch.optim.SGD(twin.parameters(), rate, momentum)
    span = Span(0, vectors[0].layout.size)
    shard = Shard(vectors[1].layout, span, served, vectors[1].tensors)
    SpanCopies(vectors[0], span, shard.values).store()
    store = Store(shard, rules, gates=False, log=None)
    store.ready = True
    gate = Gate(rules.max_staleness or 0) if rules.waits else None
    inbox = allocate(span)
    outgoing = SpanCopies(vectors[0], span, inbox)
    pulled = [allocate(span) for _ in range(workers)]
    incoming = [SpanCopies(vectors[0], span, memory) for memory in pulled]
    versions, rows, items = [0] * workers, _batches(len(y), epochs, seed), [0] * workers
    dice, pushes = Random(seed), epochs * -(-len(y) // BATCH)
    ends: list[tuple[float, int]] = []
    having: dict[int, tuple[int, Any]] = {}
    computed, now = 0, 0.0

    def begin(worker: int) -> None:
        pulled[worker].copy_(shard.values)
        versions[worker] = store.version
        slow = SLOW if workers > 1 and worker == workers - 1 else 1.0
        heapq.heappush(ends, (now + slow * (0.5 + dice.random()), worker))

    def take(worker: int) -> None:
        batch = next(rows, None)
        if batch is None:
            return
        having[worker] = (items[worker], batch)
        items[worker] += 1
        if gate is None:
            begin(worker)
        else:
            gate.ask(worker)

    def grant() -> None:
        if gate is None:
            return
        for worker in gate.grantable():
            gate.grant(worker, store.version)
            begin(worker)

    for worker in range(workers):
        take(worker)
    grant()
    while ends:
        now, worker = heapq.heappop(ends)
        item, batch = having[worker]
        incoming[worker].load()
        model.zero_grad()
        torch.nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
        computed += 1
        absent = outgoing.store_gradients()
        key = (1, 0, item, worker)
        push = Push([key], versions[worker], float(len(batch)), len(batch), absent)
        shard.set([{"lr": rate * (1 - store.pushes / pushes)}])
        with store.lock:
            outcome, _ = store.push(worker, push, inbox, pulled[worker])
        if gate is not None:
            gate.push(worker)
        if outcome is Outcome.STALE:
            begin(worker)
        else:
            take(worker)
        grant()
    SpanCopies(vectors[0], span, shard.values).load()
    with torch.no_grad():
        right = (model(vx).argmax(1) == vy).float().mean().item()
    return Trained(right, store.staleness.mean, now, computed)


def _batches(count: int, epochs: int, seed: int) -> Iterator[Any]:
    import torch

    dice = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        yield from torch.randperm(count, generator=dice).split(BATCH)


if __name__ == "__main__":
    main()
