"""Compressed sums of gradients beside their algorithms in plain torch, in double precision."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import spartito as sp
from spartito.checkpoint.cuts import Cut
from spartito.training.fitting.nonfinite import SKIP, have_skipped
from tests.replicas import warns
from tests.strategies.jobs import blobs
from tests.strategies.nesting_jobs import (
    ACCUMULATE,
    BATCH,
    CLIP,
    EXAMPLES,
    OPTIMIZERS,
    network,
)

UPDATES = 2
"""Of an epoch."""


@dataclass
class Found:
    """What a task had of a training."""

    weights: dict[str, Tensor]
    rows: list[list[int]]
    """Which examples it computed, batch by batch."""
    cuts: dict[str, Cut]
    """What it had a part of."""
    names: list[str]
    """The parameters that it had, in the order of the optimizer."""
    error: float
    sent: int


def fit(
    text: str,
    optimizer: str,
    epochs: int,
    per_machine: int = 1,
    load: str = "",
    save: str = "",
) -> Found:
    """Train, so many replicas on each machine, from and to a checkpoint."""
    strategy = sp.strategy(text, timeout=20)
    rendezvous = strategy.engine.groups._rendezvous
    rendezvous._host = f"machine {strategy.task.index // per_machine}"
    net = network()
    strategy.prepare(net, OPTIMIZERS[optimizer], accumulate=ACCUMULATE, clip_norm=CLIP)
    x, y = blobs(EXAMPLES)
    data = strategy.distribute(sp.data.arrays(x, y).batch(BATCH))
    if load:
        strategy.load(load)
    rows = []
    for _ in range(epochs):
        for number, batch in enumerate(data):
            offsets = [] if batch.offsets is None else batch.offsets.tolist()
            rows.append([number * BATCH + offset for offset in offsets[: batch.size]])
            strategy.step(batch, nn.CrossEntropyLoss())
        strategy.flush()
    weights = {name: value.clone() for name, value in strategy.state_dict()["model"].items()}
    pair = strategy.engine.team.pairs.only
    cuts = dict(strategy.engine.parts.placement.cuts(pair, "model"))
    names = [name for name, p in net.named_parameters() if not p.is_meta]
    if save:
        if strategy.is_chief:
            Path(save).mkdir(parents=True)
        strategy.save(Path(save))
    traffic = strategy.engine.team.replicas.traffic
    found = Found(weights, rows, cuts, names, traffic.compression_error, traffic.sent)
    strategy.close()
    return found


@warns("compress=")
def alone(text: str) -> Found:
    """A training whose tasks are on one machine, which the chief says."""
    return fit(text, "sgd", 1, 4)


def hurt(text: str, bad: bool) -> dict[str, Tensor]:
    """The weights after some updates, of which one is left out: its gradients are not finite.

    Args:
        text: The strategy.
        bad: Whether there is that batch at all.
    """
    strategy = sp.strategy(text, timeout=20)
    net = network()
    _, optimizer = strategy.prepare(net, OPTIMIZERS["sgd"])
    have_skipped(SKIP, strategy, optimizer)
    x, y = blobs(EXAMPLES)
    x, y = torch.cat([x[:BATCH], x[:BATCH]]), torch.cat([y[:BATCH], y[:BATCH]])
    x[BATCH:] = torch.inf
    if not bad:
        x, y = x[:BATCH], y[:BATCH]
    data = strategy.distribute(sp.data.arrays(x, y).batch(BATCH))
    dropped = 0
    for _ in range(3):
        for batch in data:
            dropped += strategy.step(batch, nn.CrossEntropyLoss()).dropped
    assert dropped == (3 if bad else 0)
    weights = {name: value.clone() for name, value in strategy.state_dict()["model"].items()}
    strategy.close()
    return weights


class Way:
    """How senders add up what each has: a flat row of each, made of ``shapes``."""

    def __init__(self, shapes: Sequence[torch.Size], senders: int) -> None:
        self.shapes, self.senders = shapes, senders

    def sum(self, rows: Sequence[Tensor]) -> Tensor:
        raise NotImplementedError


class Rounded(Way):
    def sum(self, rows: Sequence[Tensor]) -> Tensor:
        total = torch.stack([row.bfloat16().float() for row in rows]).sum(0)
        return total.bfloat16().double()


class Coded(Way):
    """Each sends what its code keeps of what it has and left out before, tensor by tensor."""

    def __init__(self, shapes: Sequence[torch.Size], senders: int) -> None:
        super().__init__(shapes, senders)
        numel = sum(map(math.prod, shapes))
        self.errors = [torch.zeros(numel).double() for _ in range(senders)]

    def sum(self, rows: Sequence[Tensor]) -> Tensor:
        total = torch.zeros_like(rows[0])
        for number, row in enumerate(rows):
            wanted = row + self.errors[number]
            parts = wanted.float().split([math.prod(shape) for shape in self.shapes])
            sent = torch.cat([self.coded(part) for part in parts]).double()
            self.errors[number] = wanted - sent
            total += sent
        return total

    def coded(self, row: Tensor) -> Tensor:
        raise NotImplementedError


class Steps(Coded):
    """Whole multiples of a step; no tensor is more than one block."""

    most = 127

    def coded(self, row: Tensor) -> Tensor:
        step = (row.abs().max() / self.most).bfloat16().float()
        return (row / step).round().clamp(-self.most, self.most) * step if step else row * 0


class FewSteps(Steps):
    most = 7


class Largest(Coded):
    """The 8 largest of each block of 256."""

    def coded(self, row: Tensor) -> Tensor:
        kept = row.abs().sort(descending=True).indices[:8]
        sent = torch.zeros_like(row)
        sent[kept] = row[kept].bfloat16().float()
        return sent


class Products(Way):
    """PowerSGD of rank 1, after a first epoch that is exact (Vogels et al. 2019, algorithm 2)."""

    def __init__(self, shapes: Sequence[torch.Size], senders: int) -> None:
        super().__init__(shapes, senders)
        self.updates = 0
        self.errors = [[torch.zeros(shape).double() for shape in shapes] for _ in range(senders)]
        generator = torch.Generator().manual_seed(0)
        self.rights = []
        for shape in shapes:
            generator.manual_seed(0)
            columns = math.prod(shape[1:]) if len(shape) > 1 else 1
            right = torch.randn(columns, 1, generator=generator, dtype=torch.float64)
            self.rights.append(right)

    def sum(self, rows: Sequence[Tensor]) -> Tensor:
        self.updates += 1
        if self.updates <= UPDATES:
            return torch.stack(list(rows)).sum(0)
        parts = [row.split([math.prod(shape) for shape in self.shapes]) for row in rows]
        total = []
        for number, shape in enumerate(self.shapes):
            own = [part[number].view(shape) for part in parts]
            if len(shape) < 2 or 2 * sum(shape) > math.prod(shape):
                total.append(sum(own).reshape(-1))
                continue
            wanted = [g + e[number] for g, e in zip(own, self.errors, strict=True)]
            left = torch.linalg.qr(sum(each @ self.rights[number] for each in wanted))[0]
            rights = [each.T @ left for each in wanted]
            for each, right, errors in zip(wanted, rights, self.errors, strict=True):
                errors[number] = each - left @ right.T
            self.rights[number] = sum(rights)
            total.append((left @ sum(rights).T).reshape(-1))
        return torch.cat(total)


WAYS: dict[str, type[Way]] = {
    '"bf16"': Rounded,
    '"8bit"': Steps,
    '"4bit"': FewSteps,
    '"topk:0.03"': Largest,
    '"powersgd"': Products,
}


def by_torch(
    found: Sequence[Found],
    compress: str,
    optimizer: str,
    epochs: int,
    senders: Sequence[Sequence[Sequence[int]]],
    every: int = 0,
) -> dict[str, Tensor]:
    """The same training by plain torch.

    Args:
        found: What each task had: which rows, and which part of the model.
        compress: One of `WAYS`.
        optimizer: One of `OPTIMIZERS`.
        epochs: How many.
        senders: For each group that trains apart, by its senders: the tasks whose gradients each
            of them adds up. Tasks with the same data but other parts of the model are not there.
        every: After how many updates groups become their mean; 0: there is one.

    Returns:
        The weights in the end.
    """
    x, y = blobs(EXAMPLES)
    nets = [copy.deepcopy(network()) for _ in senders]
    optimizers = [OPTIMIZERS[optimizer](net.parameters()) for net in nets]
    columns = _columns(found)
    ways: list[list[Way]] = []
    for own_senders in senders:
        shapes = [[_local(p, c.cuts.get(n)).shape for n, p in _of(nets[0], c)] for c in columns]
        ways.append([WAYS[compress](each, len(own_senders)) for each in shapes])
    since, eaten = 0, [0.0] * len(nets)

    def gradients(net: nn.Module, rows: Sequence[int], divisor: int) -> dict[str, Tensor]:
        net.zero_grad()
        loss = nn.functional.cross_entropy(net(x[list(rows)]), y[list(rows)], reduction="sum")
        (loss / divisor).backward()
        return {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}

    def merge() -> None:
        nonlocal since
        for same in zip(*(net.parameters() for net in nets), strict=True):
            mean = sum(p.detach() * e for p, e in zip(same, eaten, strict=True)) / sum(eaten)
            for parameter in same:
                parameter.detach().copy_(mean)
        since = 0
        eaten[:] = [0.0] * len(nets)

    batches = len(range(0, EXAMPLES, BATCH))
    for epoch in range(epochs):
        for first in range(0, batches, ACCUMULATE):
            numbers = [epoch * batches + n for n in range(first, min(first + ACCUMULATE, batches))]
            divisor = min(BATCH, EXAMPLES - first * BATCH)
            for group, (net, own) in enumerate(zip(nets, optimizers, strict=True)):
                rows = [
                    [row for task in tasks for n in numbers for row in found[task].rows[n]]
                    for tasks in senders[group]
                ]
                came = [gradients(net, each, divisor) for each in rows]
                total = {name: torch.zeros_like(p) for name, p in net.named_parameters()}
                for column, way in zip(columns, ways[group], strict=True):
                    names = [name for name, _ in _of(net, column)]
                    flat = [
                        torch.cat([_local(each[n], column.cuts.get(n)).reshape(-1) for n in names])
                        for each in came
                    ]
                    parts = way.sum(flat).split([math.prod(shape) for shape in way.shapes])
                    for name, part, shape in zip(names, parts, way.shapes, strict=True):
                        _put(total[name], column.cuts.get(name), part.view(shape))
                weight = sum(map(len, rows))
                for name, parameter in net.named_parameters():
                    parameter.grad = total[name] * (divisor / weight)
                nn.utils.clip_grad_norm_(net.parameters(), CLIP)
                own.step()
                eaten[group] += weight
            since += 1
            if since == every:
                merge()
        if every and since:
            merge()
    return dict(nets[0].state_dict())


def _columns(found: Sequence[Found]) -> list[Found]:
    """One task of each part of the model."""
    seen: dict[Any, Found] = {}
    for each in found:
        boxes = {n: str(c.parts(torch.empty(c.local))[0][0]) for n, c in each.cuts.items()}
        seen.setdefault((tuple(each.names), str(boxes)), each)
    return list(seen.values())


def _of(net: nn.Module, column: Found) -> list[tuple[str, Tensor]]:
    return [(name, p) for name, p in net.named_parameters() if name in column.names]


def _local(whole: Tensor, cut: Cut | None) -> Tensor:
    """What a task has of a tensor."""
    if cut is None:
        return whole.detach()
    local = whole.new_empty(cut.local)
    for box, view in cut.parts(local):
        view.copy_(whole.detach()[box.within(box.all_of(whole.shape))])
    return local


def _put(whole: Tensor, cut: Cut | None, local: Tensor) -> None:
    if cut is None:
        whole.copy_(local)
        return
    for box, view in cut.parts(local):
        whole[box.within(box.all_of(whole.shape))] = view
