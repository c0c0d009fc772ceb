"""Groups over servers that wait for nobody: what each did, and the same by plain torch."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

import spartito as sp
from tests.replicas import warns
from tests.strategies.decoupled_jobs import normalized
from tests.strategies.jobs import blobs, make_strategy, weights
from tests.strategies.local_jobs import INNER, OUTER

EXAMPLES, EPOCHS = 48, 3
Stretch = tuple[int, int, int, int, int, int]
"""Merges before it began, and with it; its slice, its pass, its first and its last step."""


def network(inner: str) -> nn.Module:
    """With BatchNorm, but for AdamW: it makes steps of what rounding leaves of a bias before it."""
    return normalized(norm=inner == "sgd")


@warns("BatchNorm in groups that are merged")
def recorded(
    name: str, options: dict[str, Any], batch: int, inner: str, pipe: str
) -> tuple[int, list[Stretch], dict[str, Tensor]]:
    """What this group trained on from which values, and the weights in the end.

    The second group stands in its first batch until the first one is in its second stretch.
    """
    strategy = make_strategy(name, **options)
    net, calls = network(inner), 0
    index, every = strategy.task.index, options["every"]

    def loss(output: Tensor, target: Tensor) -> Tensor:
        nonlocal calls
        trains = output.grad_fn is not None  # else it is asked about a part of a batch
        calls += trains
        if trains and (index, calls) == (0, every + 1):
            Path(pipe).write_text("go")
        if trains and (index, calls) == (1, 1):
            Path(pipe).read_text()
        return nn.functional.cross_entropy(output, target, reduction="none")

    trainer = sp.Trainer(net, optimizer=INNER[inner], loss=loss, strategy=strategy)
    coordination: Any = strategy.coordination
    pusher = coordination.pusher
    begin, meet = pusher._begin_alike, pusher._meet
    began, stretches = [0], list[Stretch]()

    def note_begin() -> None:
        begin()
        began[0] = pusher.servers.progress.version

    def note_meeting(current: Any) -> None:
        at = current.lease.data_shard, current.lease.pass_, current.first, current.step
        meet(current)
        stretches.append((began[0], pusher.servers.progress.version, *at))

    pusher._begin_alike, pusher._meet = note_begin, note_meeting
    x, y = blobs(EXAMPLES)
    trainer.fit(sp.data.arrays(x, y).batch(batch), epochs=EPOCHS, verbose=0)
    found = weights(strategy, net)
    strategy.close()
    return index, stretches, found


def replayed(
    groups: Sequence[Sequence[Stretch]], batch: int, outer: str, inner: str
) -> dict[str, Tensor]:
    """The weights of plain torch: each difference counts for one of so many groups."""
    x, y = blobs(EXAMPLES)
    start, count = network(inner), len(groups)
    nets = [copy.deepcopy(start) for _ in groups]
    optimizers = [INNER[inner](net.parameters()) for net in nets]
    outside = OUTER[outer](start.parameters())
    rate = outside.param_groups[0]["lr"]
    versions = [copy.deepcopy(start.state_dict())]
    order = sorted((s[1], g, s) for g, stretches in enumerate(groups) for s in stretches)
    for _, g, (begun, _, part, _, first, last) in order:
        net = nets[g]
        net.load_state_dict(versions[begun])
        for step in range(first, last + 1):
            size = min(batch, EXAMPLES - step * batch)
            rows = slice(
                step * batch + size * part // count, step * batch + size * (part + 1) // count
            )
            optimizers[g].zero_grad()
            nn.functional.cross_entropy(net(x[rows]), y[rows]).backward()
            optimizers[g].step()
        own, before = net.state_dict(), versions[begun]
        for name, parameter in start.named_parameters():
            parameter.grad = before[name] - own[name]
        outside.param_groups[0]["lr"] = rate / count
        outside.step()
        for name, value in start.named_buffers():
            if value.is_floating_point():
                value.lerp_(own[name], 1 / count)
            else:
                value.add_(own[name] - before[name])
        versions.append(copy.deepcopy(start.state_dict()))
    return versions[-1]
