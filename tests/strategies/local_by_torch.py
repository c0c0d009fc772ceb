"""Groups that train apart, by plain torch in one process."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from tests.strategies.jobs import blobs, mlp
from tests.strategies.local_jobs import BATCH, EPOCHS, EXAMPLES, INNER, OUTER


def rows_of(groups: Sequence[Sequence[int]], group: int, rows: range, batch: int) -> list[int]:
    """What a group has of a global batch, by its replicas: two rows at least of the rest."""
    least = 2 if len(rows) < batch else 1
    for filled in reversed(range(1, len(groups) + 1)):
        sizes = [len(members) for members in groups[:filled]]
        cuts = [len(rows) * sum(sizes[:g]) // sum(sizes) for g in range(filled + 1)]
        if all(stop - start >= least for start, stop in pairwise(cuts)):
            break
    return list(rows[cuts[group] : cuts[group + 1]]) if group < filled else []


def by_torch(
    groups: Sequence[Sequence[int]],
    every: int,
    outer: str = "average",
    inner: str = "adamw",
    equal: bool = False,
    fragments: int = 1,
    delay: int = 0,
    mixing: float = 0.0,
    epochs: int = EPOCHS,
    batch: int = BATCH,
    examples: int = EXAMPLES,
    halved: bool = False,
) -> dict[str, Any]:
    """The same without any of ours: one model and optimizer for each group, in one process.

    ``halved``: all values are, after the last batch of an epoch.
    """
    x, y = blobs(examples)
    start = mlp()
    nets = [copy.deepcopy(start) for _ in groups]
    optimizers = [INNER[inner](net.parameters()) for net in nets]
    here = list(start.parameters())  # those of two layers
    parts_of = [[0, 1], [2, 3]] if fragments == 2 else [[0, 1, 2, 3]]
    outers = [OUTER[outer]([here[n] for n in numbers]) for numbers in parts_of]
    since, consumed = 0, [[0.0] * len(groups) for _ in parts_of]
    apart = [False] * fragments
    under_way: list[tuple[int, list[Tensor], float] | None] = [None] * fragments
    losses, values, meetings, drifts = [], [], [], []
    own: list[list[float]] = [[] for _ in groups]

    def of(net: nn.Module, fragment: int) -> list[Tensor]:
        return [list(net.parameters())[number].detach() for number in parts_of[fragment]]

    def take(fragment: int) -> None:
        eaten = consumed[fragment]
        shares = [float(c > 0) for c in eaten] if equal else eaten
        whole = sum(shares)
        common, theirs = of(start, fragment), [of(net, fragment) for net in nets]
        moved = [
            sum((s * (c - t[n]) for s, t in zip(shares, theirs, strict=True)), 0 * c) / (whole or 1)
            for n, c in enumerate(common)
        ]
        square = 0.0
        for share, values in zip(shares, theirs, strict=True):
            far = (
                (c - m - v).square().sum() for c, m, v in zip(common, moved, values, strict=True)
            )
            square += share / (whole or 1) * float(sum(far))
        consumed[fragment] = [0.0] * len(groups)
        under_way[fragment] = (since + delay, moved if whole else [], square**0.5)

    def merge(fragment: int, mixing: float) -> None:
        found = under_way[fragment]
        assert found is not None
        under_way[fragment] = None
        for number, mean in zip(parts_of[fragment], found[1], strict=False):
            here[number].grad = mean
        if found[1]:
            outers[fragment].step()
            outers[fragment].zero_grad()
        with torch.no_grad():
            for net in nets:
                for mine, merged in zip(of(net, fragment), of(start, fragment), strict=True):
                    mine.copy_(mixing * mine + (1 - mixing) * merged)
        apart[fragment] = mixing > 0
        if not mixing:
            consumed[fragment] = [0.0] * len(groups)
        drifts_here.append(found[2])

    for _ in range(epochs):
        total, of_group = 0.0, [[0.0, 0.0] for _ in groups]
        drifts_here: list[float] = []
        for first in range(0, examples, batch):
            rows = range(first, min(examples, first + batch))
            for g in range(len(groups)):
                rows_here = rows_of(groups, g, rows, batch)
                if rows_here:
                    optimizers[g].zero_grad()
                    loss = nn.functional.cross_entropy(nets[g](x[rows_here]), y[rows_here])
                    loss.backward()
                    optimizers[g].step()
                    total += loss.item() * len(rows_here)
                    of_group[g][0] += loss.item() * len(rows_here)
                    of_group[g][1] += len(rows_here)
                for eaten in consumed:
                    eaten[g] += len(rows_here)
            since += 1
            apart = [True] * fragments
            for fragment in range(fragments):
                now = under_way[fragment]
                if now is not None and now[0] == since:
                    merge(fragment, mixing)
                if (since + delay - every * (fragment + 1) // fragments) % every == 0:
                    take(fragment)
                if not delay and under_way[fragment] is not None:
                    merge(fragment, mixing)
        for parameter in (p for net in nets for p in net.parameters() if halved):
            parameter.data.mul_(0.5)
        waiting = [(now[0], f) for f, now in enumerate(under_way) if now is not None]
        for _, fragment in sorted(waiting):
            merge(fragment, mixing)
        for fragment in range(fragments):
            if apart[fragment]:
                take(fragment)
                merge(fragment, 0.0)
        since = 0
        losses.append(total / examples)
        meetings.append(len(drifts_here))
        drifts.append(sum(drifts_here) / len(drifts_here))
        for g, (loss_sum, weight) in enumerate(of_group):
            own[g].append(loss_sum / weight)
        values.append(nn.functional.cross_entropy(start(x), y).item())
    merged = {name: value.clone() for name, value in start.state_dict().items()}
    curves = {f"loss_of_group_{g}": curve for g, curve in enumerate(own)}
    return {
        "loss": losses,
        "val_loss": values,
        "weights": merged,
        "meetings": meetings,
        "drift": drifts,
        **curves,
    }


def sites_by_torch(
    groups: Sequence[Sequence[int]],
    sites: Sequence[Sequence[int]],
    every: Sequence[int],
    outer: str = "average",
    inner: str = "adamw",
    equal: bool = False,
    epochs: int = EPOCHS,
    batch: int = BATCH,
    examples: int = EXAMPLES,
) -> dict[str, Any]:
    """As `by_torch`, of groups that meet in their sites, and sites that meet."""
    x, y = blobs(examples)
    start = mlp()
    nets = [copy.deepcopy(start) for _ in groups]
    optimizers = [INNER[inner](net.parameters()) for net in nets]
    common = list(start.parameters())
    outside = OUTER[outer](common)
    eaten, of_site = [0.0] * len(groups), [0.0] * len(sites)
    found: dict[str, Any] = {"loss": [], "val_loss": [], "meetings": [], "meetings_of_sites": []}

    def mean(models: Sequence[Sequence[Tensor]], counts: Sequence[float]) -> list[Tensor]:
        shares = [float(c > 0) for c in counts] if equal else counts
        weighed = [[s * p.detach() for p in m] for s, m in zip(shares, models, strict=True)]
        return [sum(each, torch.zeros(())) / sum(shares) for each in zip(*weighed, strict=True)]

    @torch.no_grad()
    def give(values: Sequence[Tensor], to: Sequence[int]) -> None:
        for g in to:
            for parameter, value in zip(nets[g].parameters(), values, strict=True):
                parameter.copy_(value)

    def meet_near() -> None:
        for number, site in enumerate(sites):
            if counts := sum(eaten[g] for g in site):
                here = [list(nets[g].parameters()) for g in site]
                give(mean(here, [eaten[g] for g in site]), site)
                of_site[number] += counts
        eaten[:] = [0.0] * len(groups)

    def meet_far() -> None:
        here = [list(nets[site[0]].parameters()) for site in sites]
        for parameter, value in zip(common, mean(here, of_site), strict=True):
            parameter.grad = parameter.detach() - value
        outside.step()
        give(common, range(len(groups)))
        of_site[:] = [0.0] * len(sites)

    for _ in range(epochs):
        total, updates, near, far = 0.0, 0, 0, 0
        for first in range(0, examples, batch):
            rows = range(first, min(examples, first + batch))
            for g in range(len(groups)):
                rows_here = rows_of(groups, g, rows, batch)
                if rows_here:
                    optimizers[g].zero_grad()
                    loss = nn.functional.cross_entropy(nets[g](x[rows_here]), y[rows_here])
                    loss.backward()
                    optimizers[g].step()
                    total += loss.item() * len(rows_here)
                eaten[g] += len(rows_here)
            updates += 1
            if updates % every[0] == 0:
                meet_near()
                near += 1
            if updates % every[1] == 0:
                meet_far()
                far += 1
        if updates % every[0]:
            meet_near()
            near += 1
        if updates % every[1]:
            meet_far()
            far += 1
        value = nn.functional.cross_entropy(start(x), y).item()
        for name, each in zip(found, (total / examples, value, near, far), strict=True):
            found[name].append(each)
    return {**found, "weights": {name: v.clone() for name, v in start.state_dict().items()}}
