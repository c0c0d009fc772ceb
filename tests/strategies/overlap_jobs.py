"""What the tests of sums beside backward run on every replica."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import spartito as sp
from spartito.cluster.spec import ClusterSpec
from spartito.collectives.membership.rendezvous import Rendezvous
from spartito.data.batch import Batch
from spartito.engine.gradients import overlap_trial
from spartito.engine.gradients.gradient_sum import PackedGradients
from spartito.engine.gradients.streamed_gradients import StreamedGradients
from spartito.steps.exchanges.compressed_sums import learning
from spartito.steps.parts import Parts
from spartito.steps.team import Team
from spartito.steps.topology import Connected, OneShardEach
from spartito.strategies import MultiWorkerMirroredStrategy
from tests.collectives.group import spec
from tests.replicas import NO_BF16, warns

SMALL, LARGE = 64, 1 << 30
"""Bytes of a bucket: each parameter in one of its own; all gradients at the end, in one sum."""


@dataclass(frozen=True)
class TwoOnEach(OneShardEach):
    """Two replicas on each machine, by the name that they give it."""

    def connect(self, rendezvous: Rendezvous, cluster: ClusterSpec) -> Connected:
        rendezvous._host = f"machine {cluster.rank // 2}"
        return super().connect(rendezvous, cluster)


@dataclass(frozen=True, eq=False)
class Layered(MultiWorkerMirroredStrategy):
    """Two replicas on each machine."""

    def parts(self, team: Team) -> Parts:
        return replace(super().parts(team), topology=TwoOnEach())


def kept(strategy: sp.Strategy) -> dict[str, Any]:
    """What a compression has left out so far, on all machines."""
    pair = strategy.engine.team.pairs.only
    assert isinstance(pair.gradients, PackedGradients)
    return pair.gradients.compression.state_dict(
        learning(pair.model, pair.optimizer), strategy.engine.team.replicas
    )


def make(way: str, **options: Any) -> MultiWorkerMirroredStrategy:
    if way == "layers":
        return Layered(**options)
    return MultiWorkerMirroredStrategy(communication=way, **options)


class Net(nn.Module):
    """A tied layer, a checkpointed one that comes in two parts, and branches left out at times.

    A frozen layer in the middle, and branches whose gradients come in another order on each rank.
    """

    def __init__(self, rank: int = 0) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.tied, self.twice = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 3)
        self.some, self.later, self.never = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.branches = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.rank, self.passes = rank, 0

    def forward(self, x: Tensor) -> Tensor:
        self.passes += self.training
        x = torch.tanh(self.tied(torch.relu(self.tied(self.first(x)))))
        for _ in range(2):
            x = checkpoint(self.twice, x, use_reentrant=True)
        x = self.frozen(x)
        found = {n: torch.tanh(self.branches[(n + self.rank) % 3](x)) for n in range(3)}
        x = x + found[0] * found[1] * found[2]
        if self.rank == 1:  # of this replica alone
            x = x + self.some(x)
        if self.passes > 3:
            x = x + self.later(x)
        out: Tensor = self.head(self.norm(x))
        return out


def examples(count: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    return torch.randn(count, 6, generator=generator), torch.arange(count) % 3


def streamed(strategy: MultiWorkerMirroredStrategy) -> int:
    """How many buckets left while backward ran."""
    (pair,) = strategy.engine.team.pairs.all
    found = pair.gradients
    return found.overlapped if isinstance(found, StreamedGradients) else 0


@warns("None of the inputs have requires_grad", NO_BF16)
def fit(way: str, options: dict[str, Any], **given: Any) -> tuple[dict[str, Tensor], int]:
    """The weights after an uneven training with validation, and the buckets that left early."""
    strategy = make(way, **options)
    net = Net(strategy.cluster.rank)
    trainer = sp.Trainer(
        net,
        optimizer=torch.optim.AdamW(net.parameters(), 1e-2),
        loss=nn.CrossEntropyLoss(),
        strategy=strategy,
        **given,
    )
    # The last batch of 29 has one row: replicas are without any.
    x, y = examples(29)
    trainer.fit((x, y), epochs=3, batch_size=7, validation_data=(x, y), verbose=0)
    result = {name: value.clone() for name, value in net.state_dict().items()}, streamed(strategy)
    strategy.close()
    assert not lanes()
    return result


@warns("gradients were changed beside")
def loop(way: str, bucket_bytes: int) -> tuple[dict[str, Tensor], int, int]:
    """A loop of one's own that does what it likes between backward and update.

    Each time so late after the last that gradients leave early again. Returns the weights, the
    buckets that left early, and for how many updates none does after the next change.
    """
    strategy = make(way, bucket_bytes=bucket_bytes)
    net = Net(strategy.cluster.rank)
    model, optimizer = strategy.prepare(net, torch.optim.SGD(net.parameters(), 0.1, momentum=0.9))
    batches = iter(strategy.distribute(sp.data.arrays(*examples(110)).batch(5)))
    for step, batch in enumerate(batches):
        if step == 7:
            net.norm.requires_grad_(False)
        backward(strategy, model, batch)
        if step == 2:  # without a trace in its version
            gradient(net.tied).data.neg_()
        if step == 4:  # of no use: nothing comes of it
            optimizer.zero_grad()
            continue
        if step == 9:
            gradient(net.head).mul_(2)
        if step == 17:
            backward(strategy, model, next(batches))
        strategy.update(optimizer)
    found = strategy.engine.team.pairs.only.gradients
    rests = found._rests if isinstance(found, StreamedGradients) else 0
    weights = {name: value.clone() for name, value in net.state_dict().items()}
    result = weights, streamed(strategy), rests
    strategy.close()
    return result


def finding_out(
    way: str, bucket_bytes: int | None, again: int, **options: Any
) -> tuple[dict[str, Tensor], int, bool]:
    """Weights after trials in updates 2 to 17 and after each ``again``, of 3.7 MB of gradients.

    With them how many buckets left early, and whether they do so now.
    """
    overlap_trial.AGAIN = again
    strategy = make(way, bucket_bytes=bucket_bytes, **options)
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(6, 300), *(nn.Linear(300, 300) for _ in range(10)))
    model, optimizer = strategy.prepare(net, torch.optim.SGD(net.parameters(), 0.01, momentum=0.9))
    for step, batch in enumerate(strategy.distribute(sp.data.arrays(*examples(250)).batch(5))):
        if step == 40:
            net[5].requires_grad_(False)  # other sums from now on, and a trial from the beginning
        backward(strategy, model, batch)
        strategy.update(optimizer)
    found = strategy.engine.team.pairs.only.gradients
    trial = found._trial if isinstance(found, StreamedGradients) else None
    weights = {name: value.clone() for name, value in net.state_dict().items()}
    result = weights, streamed(strategy), trial is not None and trial.overlaps
    strategy.close()
    return result


def backward(strategy: MultiWorkerMirroredStrategy, model: nn.Module, batch: Batch) -> None:
    losses = nn.functional.cross_entropy(model(batch.x), batch.y, reduction="none")
    strategy.backward(losses, batch)


def gradient(layer: nn.Linear) -> Tensor:
    assert layer.weight.grad is not None
    return layer.weight.grad


def lanes() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "spartito-lane"]


class Failing(torch.autograd.Function):
    """The identity, whose backward pass does ``act``."""

    act = staticmethod(lambda: None)

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        Failing.act()
        return grad


class LateFailure(nn.Module):
    """What is behind the failure has its gradients already, and they are on their way."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.rest = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)), nn.Linear(8, 3))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.rest(Failing.apply(self.first(x)))  # type: ignore[no-untyped-call]
        return out


def fail(pipe: Connection, rank: int, port: int, how: str) -> Any:
    """Train; rank 1 fails in the middle of its third backward pass, after it sent buckets."""
    strategy = MultiWorkerMirroredStrategy(
        cluster=spec(rank, 2, port), communication="sockets", bucket_bytes=SMALL, timeout=60.0
    )
    model, optimizer = strategy.prepare(LateFailure(), lambda p: torch.optim.SGD(p, 0.1))

    def batches() -> Iterator[Batch]:
        return iter(strategy.distribute(sp.data.arrays(*examples(40)).batch(8)))

    def act() -> None:
        if how == "error":
            raise ValueError("in backward")
        os.kill(os.getpid(), 9)

    for step, batch in enumerate(batches()):
        if rank == 1 and step == 2:
            Failing.act = staticmethod(act)
        try:
            backward(strategy, model, batch)
            strategy.update(optimizer)
        except (sp.SpartitoError, ValueError) as error:
            strategy.close()
            return type(error).__name__, str(error), streamed(strategy), len(lanes())
    return "trained"


class Wide(nn.Module):
    """Three matrices that are sent as products of rank 2, one that is not, and vectors."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first, self.second = nn.Linear(6, 48), nn.Linear(48, 40)
        self.filters, self.head = nn.Conv1d(1, 32, 30), nn.Linear(32, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.second(torch.relu(self.first(x))))
        out: Tensor = self.head(self.filters(x[:, None]).amax(2))
        return out


def compressed(
    way: str, compress: Any, folder: str = "", phase: str = "", bucket_bytes: int = 2048
) -> dict[str, Any]:
    """Weights after 20 steps of training, with a rest in a folder after the tenth."""
    strategy = make(way, compress=compress, bucket_bytes=bucket_bytes)
    net = Wide()
    trainer = sp.Trainer(
        net,
        optimizer=torch.optim.SGD(net.parameters(), 0.05, momentum=0.9),
        loss=nn.CrossEntropyLoss(),
        strategy=strategy,
    )
    if phase == "again":  # what this training has left out is none of the one that follows
        trainer.fit(examples(80), epochs=2, batch_size=8, verbose=0)
    if phase in ("resume", "again"):
        trainer.load(folder)
    trainer.fit(examples(80), epochs=1 if phase == "save" else 2, batch_size=8, verbose=0)
    if phase == "save":
        trainer.save(folder)
    traffic = strategy.engine.groups.world.traffic
    result = {
        "weights": {name: value.clone() for name, value in net.state_dict().items()},
        "sent": traffic.sent,
        "error": traffic.compression_error,
        "early": streamed(strategy),
    }
    strategy.close()
    return result


def uneven(way: str, compress: Any, accumulate: int) -> tuple[dict[str, Tensor], float]:
    """Weights after batches of 7 and 1 rows: replicas have more, fewer, or none."""
    strategy = make(way, compress=compress)
    net = Wide().double()
    trainer = sp.Trainer(
        net,
        optimizer=torch.optim.SGD(net.parameters(), 0.05, momentum=0.9),
        loss=nn.CrossEntropyLoss(),
        strategy=strategy,
        accumulate=accumulate,
    )
    x, y = examples(29)
    trainer.fit((x.double(), y), epochs=4, batch_size=7, verbose=0)
    weights = {name: value.clone() for name, value in net.state_dict().items()}
    error = strategy.engine.groups.world.traffic.compression_error
    strategy.close()
    return weights, error


def left_out(way: str, folder: str) -> list[Tensor]:
    """The sum over all machines of what a checkpoint's steps have left out, once loaded here."""
    strategy = make(way, compress=sp.PowerSGD(2, 0))
    net = Wide()
    strategy.prepare(net, torch.optim.SGD(net.parameters(), 0.05, momentum=0.9))
    strategy.load(Path(folder))
    sums = [errors.sum(0) for errors in kept(strategy)["errors"].values()]
    strategy.close()
    return sums


def products(way: str) -> tuple[Tensor, Tensor, Tensor]:
    """The reduced gradients of one matrix in three updates of which each left out a part."""
    strategy = make(way, compress=sp.PowerSGD(1, 0))
    net = nn.Linear(30, 20, bias=False).double()
    model, optimizer = strategy.prepare(net, torch.optim.SGD(net.parameters(), 1.0))
    before = net.weight.detach().clone()
    generator = torch.Generator().manual_seed(strategy.cluster.rank)
    size = strategy.num_replicas_in_sync
    data = sp.data.arrays(torch.zeros(3 * size, 30).double(), torch.zeros(3 * size))
    given = torch.zeros(20, 30).double()
    for batch in strategy.distribute(data.batch(size)):
        target = torch.randn(20, 30, generator=generator, dtype=torch.float64)
        given += target
        costs = (model(torch.eye(30).double()) * target.T).sum()
        strategy.backward((costs, batch.size), batch)
        strategy.update(optimizer)
    group = strategy.engine.groups.data
    left = kept(strategy)["errors"]["weight"].sum(0)
    applied = before - net.weight.detach()
    everyone = group.all_reduce(given)
    strategy.close()
    return everyone / size, applied, left


@warns("compress=")
def refused(compress: Any, way: str = "sockets", **given: Any) -> str:
    """What is said against a compression."""
    try:
        strategy = make(way, compress=compress)
        strategy.prepare(Wide(), lambda p: torch.optim.SGD(p, 0.1), **given)
    except sp.UserError as error:
        return str(error)
    return ""
