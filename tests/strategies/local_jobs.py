"""What the tests of local_sgd run on every replica, and the same by plain torch."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import spartito as sp
from spartito.data.order import shard_rows
from tests.strategies.jobs import blobs, make_strategy, mlp, weights

EXAMPLES, BATCH, EPOCHS = 46, 8, 3  # the last batch of an epoch has six examples
OUTER: dict[str, Callable[[Iterable[nn.Parameter]], Optimizer]] = {
    "average": lambda p: torch.optim.SGD(p, 1.0),
    "diloco": lambda p: torch.optim.SGD(p, 0.7, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, 0.01),
}
INNER: dict[str, Callable[[Iterable[nn.Parameter]], Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1),
    "adamw": lambda p: torch.optim.AdamW(p, 0.02),
}


def trained(
    name: str,
    options: dict[str, Any],
    inner: str = "adamw",
    epochs: int = EPOCHS,
    batch: int = BATCH,
    examples: int = EXAMPLES,
    **more: Any,
) -> dict[str, Any]:
    """History and weights of a network trained in the order of the data."""
    if options.get("outer") == "adam":
        options = {**options, "outer": OUTER["adam"]}
    strategy = make_strategy(name, **options)
    net = mlp()
    trainer = sp.Trainer(
        net,
        optimizer=INNER[inner],
        loss=nn.CrossEntropyLoss(),
        metrics=["accuracy"],
        strategy=strategy,
        **more,
    )
    x, y = blobs(examples)
    history = trainer.fit(
        sp.data.arrays(x, y).batch(batch), epochs=epochs, validation_data=(x, y), verbose=0
    )
    found = {
        "history": history.history,
        "weights": weights(strategy, net),
        "here": {name: value.clone() for name, value in net.state_dict().items()},
    }
    strategy.close()
    return found


def rows_of(members: Sequence[int], rows: range, replicas: int, batch: int) -> list[int]:
    """What a group has of a global batch: two rows at least to each of the rest of an epoch."""
    least = 2 if len(rows) < batch else 1
    return [rows[i] for r in members for i in shard_rows(len(rows), (r, replicas), least)]


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
    replicas = sum(map(len, groups))
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
            for g, members in enumerate(groups):
                rows_here = rows_of(members, rows, replicas, batch)
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
    replicas = sum(map(len, groups))
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
            for g, members in enumerate(groups):
                rows_here = rows_of(members, rows, replicas, batch)
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


def looked_at(
    name: str, options: dict[str, Any], at: Sequence[int], folder: str = ""
) -> dict[str, Any]:
    """A training that is evaluated, and saved in ``folder``, after some of its steps."""
    strategy = make_strategy(name, **options)
    net = mlp()
    x, y = blobs(EXAMPLES)
    seen: list[float] = []

    class Look(sp.Callback):
        def on_train_batch_end(self, batch: int, logs: Any) -> None:
            if trainer.step in at:
                seen.append(trainer.evaluate((x, y))["loss"])
                trainer.save(f"{folder}/{trainer.step}")

    trainer = sp.Trainer(
        net, optimizer=INNER["adamw"], loss=nn.CrossEntropyLoss(), strategy=strategy
    )
    data = sp.data.arrays(x, y).batch(BATCH)
    history = trainer.fit(data, epochs=1, callbacks=[Look()], verbose=0)
    found = {"history": history.history, "weights": weights(strategy, net), "seen": seen}
    strategy.close()
    return found


def glanced(name: str, options: dict[str, Any], looks: bool) -> dict[str, Any]:
    """A training with BatchNorm whose chief looks at the merged model after each of its steps."""
    strategy = make_strategy(name, **options)
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)).double()

    class Look(sp.Callback):
        def on_train_batch_end(self, batch: int, logs: Any) -> None:
            if looks:
                strategy.coordination.synchronize()

    trainer = sp.Trainer(
        net, optimizer=INNER["adamw"], loss=nn.CrossEntropyLoss(), strategy=strategy
    )
    x, y = blobs(EXAMPLES)
    trainer.fit(sp.data.arrays(x[:, :4], y).batch(BATCH), epochs=2, callbacks=[Look()], verbose=0)
    found = weights(strategy, net)
    strategy.close()
    return found


def written_amid(name: str, options: dict[str, Any], how: str) -> dict[str, Any] | str:
    """A training in which somebody writes into the merged model that was shown.

    ``how``: to stay ("in place", "set", on the "chief" alone), or puts it "back".
    """
    strategy = make_strategy(name, **options)
    net = mlp()

    @torch.no_grad()
    def write() -> None:
        _, bias, *_, last = net.parameters()
        before = bias.clone(), last.clone()
        if how == "set":
            last.data = torch.ones_like(last)
        elif how != "chief" or strategy.is_chief:
            last.neg_()
            bias.data.mul_(0.5)
        if how == "back":
            bias.copy_(before[0])
            last.copy_(before[1])

    class Write(sp.Callback):
        batches = 0

        def on_train_batch_end(self, batch: int, logs: Any) -> None:
            self.batches += 1
            if self.batches == 2:
                strategy.coordination.synchronize()
                write()

    trainer = sp.Trainer(
        net, optimizer=INNER["adamw"], loss=nn.CrossEntropyLoss(), strategy=strategy
    )
    data = sp.data.arrays(*blobs(EXAMPLES)).batch(BATCH)
    try:
        trainer.fit(data, epochs=1, callbacks=[Write()], verbose=0)
        return weights(strategy, net)
    except (sp.UserError, sp.TaskLostError) as error:
        return str(error)
    finally:
        strategy.close()


def halved(name: str, options: dict[str, Any]) -> dict[str, Tensor]:
    """The weights of a training in which a callback writes after the last batch of each epoch."""
    strategy = make_strategy(name, **options)
    net = mlp()

    class Halve(sp.Callback):
        def on_train_batch_end(self, batch: int, logs: Any) -> None:
            if trainer.step % -(-EXAMPLES // BATCH) == 0:
                with torch.no_grad():
                    for parameter in net.parameters():
                        parameter.mul_(0.5)

    trainer = sp.Trainer(
        net, optimizer=INNER["adamw"], loss=nn.CrossEntropyLoss(), strategy=strategy
    )
    data = sp.data.arrays(*blobs(EXAMPLES)).batch(BATCH)
    trainer.fit(data, epochs=2, callbacks=[Halve()], verbose=0)
    found = weights(strategy, net)
    strategy.close()
    return found


def loaded(name: str, options: dict[str, Any], path: str) -> dict[str, Any]:
    """The model of a checkpoint, and whether training goes on from it."""
    strategy = make_strategy(name, **options)
    net = mlp()
    trainer = sp.Trainer(
        net, optimizer=INNER["adamw"], loss=nn.CrossEntropyLoss(), strategy=strategy
    )
    trainer.load(path)
    before = weights(strategy, net)
    trainer.fit(sp.data.arrays(*blobs(EXAMPLES)).batch(BATCH), epochs=1, verbose=0)
    found = {"before": before, "steps": trainer.step}
    strategy.close()
    return found


def clipped(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """As `trained`, of all that looks at a whole update: norms, accumulation, weights."""
    strategy = make_strategy(name, **options)
    net = mlp(0.3)
    trainer = sp.Trainer(
        net,
        optimizer=INNER["adamw"],
        loss=nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 5.0]).double()),
        strategy=strategy,
        scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 3, 0.7),
        accumulate=2,
        clip_norm=0.1,
        deterministic=True,
    )
    x, y = blobs(EXAMPLES)
    data = sp.data.arrays(x, y).shuffle().batch(BATCH)
    history = trainer.fit(data, epochs=2, validation_data=(x, y), verbose=0)
    found = {"history": history.history, "weights": weights(strategy, net)}
    strategy.close()
    return found


def halves(parameters: Iterable[nn.Parameter]) -> Optimizer:
    first, *rest = parameters
    return torch.optim.Rprop([{"params": [first]}, {"params": rest}])


def refusal(name: str, options: dict[str, Any], kind: str = "") -> str:
    """What is said to a training that cannot be."""
    outers = {"outer": lambda p: torch.optim.LBFGS(p), "halves": halves}
    given = {"outer": outers[kind]} if kind in outers else {}
    try:
        strategy = make_strategy(name, **options, **given)
    except sp.UserError as error:
        return str(error)
    net = mlp()
    if kind == "model" and strategy.cluster.rank == 1:
        net = nn.Linear(2, 2)
    try:
        sp.Trainer(net, optimizer=INNER["sgd"], strategy=strategy)
        return ""
    except sp.UserError as error:
        return str(error)
    finally:
        strategy.close()


def killed(name: str, options: dict[str, Any], rank: int) -> str:
    """A training in which one replica ends without a word: what the others say."""
    strategy = make_strategy(name, **options)

    class End(sp.Callback):
        def on_train_batch_end(self, batch: int, logs: Any) -> None:
            if strategy.cluster.rank == rank and trainer.step == 4:
                os._exit(3)

    trainer = sp.Trainer(
        mlp(), optimizer=INNER["sgd"], loss=nn.CrossEntropyLoss(), strategy=strategy
    )
    try:
        trainer.fit(blobs(96), epochs=2, batch_size=8, callbacks=[End()], verbose=0)
    except sp.TaskLostError as error:
        return str(error)
    finally:
        strategy.close()
    return ""


def held(name: str, options: dict[str, Any]) -> dict[str, int]:
    """How many elements of each kind this task has after an update and a meeting."""
    strategy = make_strategy(name, **options)
    net = nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 3)).double()
    _, optimizer = strategy.prepare(net, torch.optim.Adam(net.parameters()))
    for batch in strategy.distribute(sp.data.arrays(*blobs(8)).batch(8)):
        strategy.step(batch, nn.CrossEntropyLoss())
    coupling = strategy._couplings[id(optimizer)]._parts[0]  # type: ignore[attr-defined]
    outer = coupling._outer.state.values()
    found = {
        "model": sum(parameter.numel() for parameter in net.parameters()),
        "state": sum(values["exp_avg"].numel() for values in optimizer.state.values()),
        "start": coupling._start.numel(),
        "outer": sum(values["momentum_buffer"].numel() for values in outer),
        "own": sum(home.own.numel() for home in set(strategy._homes.values())),  # type: ignore[attr-defined]
    }
    strategy.close()
    return found


class Few(nn.Module):
    """Four parameters, one of them a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.shift = nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x[:, :3] * self.scale + self.shift
        return out


def few(name: str, options: dict[str, Any], folder: str) -> dict[str, Tensor]:
    """The weights of a small model that was saved and loaded on its way."""
    strategy = make_strategy(name, **options)
    net = Few().double()
    trainer = sp.Trainer(
        net, optimizer=INNER["adamw"], loss=nn.CrossEntropyLoss(), strategy=strategy
    )
    trainer.fit(blobs(32), batch_size=8, epochs=2, verbose=0)
    trainer.save(folder)
    trainer.load(folder)
    trainer.fit(blobs(32), batch_size=8, epochs=3, verbose=0)
    found = weights(strategy, net)
    strategy.close()
    return found
