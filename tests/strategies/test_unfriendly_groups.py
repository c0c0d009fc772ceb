"""Models and data that groups that train apart are not made for: the numbers are plain torch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import spartito as sp
from tests.replicas import Replicas, warns
from tests.strategies.jobs import CLASSES, FEATURES, blobs, make_strategy, weights
from tests.strategies.local_by_torch import rows_of
from tests.strategies.test_contracts import close

slow = pytest.mark.slow
EPOCHS, EVERY, RATE = 3, 2, 0.02


class Tied(nn.Module):
    """Weights that are used twice under two names, a frozen layer, one that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(FEATURES, 8)
        self.frozen.requires_grad_(False)
        self.block = nn.ModuleDict({"in": nn.Linear(8, 5), "out": nn.Linear(5, 8)})
        self.block["again"] = nn.Linear(8, 5)
        self.block["again"].weight = self.block["in"].weight
        self.unused = nn.Parameter(torch.ones(3))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.head = nn.Linear(5, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.block["in"](torch.tanh(self.frozen(x))))
        hidden = self.block["again"](torch.tanh(self.block["out"](hidden)) * self.scale)
        out: Tensor = self.head(hidden)
        return out


class Sometimes(nn.Module):
    """A part of it sees a batch only if its first example says so: else it has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.main = nn.Linear(FEATURES, CLASSES)
        self.more = nn.Linear(FEATURES, CLASSES, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.main(x)
        return out + self.more(x) if x[0, 0] > 0 else out


MODELS: dict[str, Callable[[], nn.Module]] = {"tied": Tied, "sometimes": Sometimes}
WEIGHTS = torch.tensor([1.0, 2.0, 5.0]).double()


def made(kind: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(5)
    net = MODELS[kind]().double()
    return net, torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], RATE)


@warns("every=")
def trained(
    name: str, options: dict[str, Any], kind: str, batch: int, examples: int
) -> dict[str, Any]:
    strategy = make_strategy(name, **options)
    net, optimizer = made(kind)
    trainer = sp.Trainer(
        net, optimizer=optimizer, loss=nn.CrossEntropyLoss(weight=WEIGHTS), strategy=strategy
    )
    history = trainer.fit(
        sp.data.arrays(*blobs(examples)).batch(batch), epochs=EPOCHS, verbose=0
    ).history
    found = {"loss": history["loss"], "weights": weights(strategy, net)}
    strategy.close()
    return found


def by_torch(
    groups: list[list[int]], kind: str, batch: int, examples: int, outer: str = ""
) -> dict[str, Any]:
    """Groups in one process; each of their updates is one of all rows of its replicas."""
    x, y = blobs(examples)
    start, _ = made(kind)
    pairs = []
    for _ in groups:
        net, optimizer = made(kind)
        pairs.append((net, optimizer))
    learning = [p for p in start.parameters() if p.requires_grad]
    outside = torch.optim.SGD(learning, 0.7, momentum=0.9, nesterov=True)
    losses = []

    def meet() -> None:
        whole = sum(eaten)
        if not whole:
            return
        with torch.no_grad():
            for n, own in enumerate(learning):
                theirs = [[p for p in net.parameters() if p.requires_grad][n] for net, _ in pairs]
                mean = (
                    sum((e * t for e, t in zip(eaten, theirs, strict=True)), torch.zeros_like(own))
                    / whole
                )
                own.grad = own - mean
                if not outer:
                    own.copy_(mean)
        if outer:
            outside.step()
        with torch.no_grad():
            for net, _ in pairs:
                for mine, own in zip(net.parameters(), start.parameters(), strict=True):
                    mine.copy_(own)
        eaten[:] = [0.0] * len(groups)

    for _ in range(EPOCHS):
        total = weighed = 0.0
        eaten = [0.0] * len(groups)
        for step, first in enumerate(range(0, examples, batch), 1):
            rows = range(first, min(examples, first + batch))
            for g, (net, optimizer) in enumerate(pairs):
                part = rows_of(groups, g, rows, batch)
                if not part:
                    continue
                optimizer.zero_grad()
                weight = float(WEIGHTS[y[part]].sum())
                for own in of_replicas(part, len(groups[g]), len(rows) < batch):
                    each = nn.functional.cross_entropy(
                        net(x[own]), y[own], weight=WEIGHTS, reduction="sum"
                    )
                    (each / weight).backward()
                    total += each.item()
                optimizer.step()
                weighed += weight
                eaten[g] += weight
            if step % EVERY == 0:
                meet()
        meet()
        losses.append(total / weighed)
    kept = {name: value.clone() for name, value in start.state_dict().items()}
    return {"loss": losses, "weights": kept}


def of_replicas(part: list[int], count: int, is_rest: bool) -> list[list[int]]:
    """What each replica of a group sees of its rows: the forward passes are several."""
    alone = [[number] for number in range(count)]
    rows = range(part[0], part[-1] + 1)
    found = [rows_of(alone, number, rows, len(part) + is_rest) for number in range(count)]
    return [own for own in found if own]


GROUPS = [[0, 1], [2, 3]]
FORMS: dict[str, tuple[str, int, dict[str, Any], list[list[int]]]] = {
    "replicas": ("local_sgd", 4, {"groups": GROUPS}, GROUPS),
    "uneven": ("local_sgd", 3, {"groups": [[0, 2], [1]], "outer": "diloco"}, [[0, 2], [1]]),
    "shards": ("local_sgd", 4, {"groups": 2, "inside": "sharded"}, GROUPS),
    "whole shards": ("local_sgd", 4, {"groups": 2, "inside": "sharded(zero=1)"}, GROUPS),
    "servers": (
        "parameter_server", 3, {"groups": 3, "quorum": 3, "servers": {"min_shard_bytes": 16}},
        [[0], [1], [2]],
    ),
}  # fmt: skip


QUICK = {("uneven", "tied", 6, 20), ("servers", "sometimes", 4, 3), ("shards", "tied", 4, 5)}
DATA = [("tied", 6, 20), ("sometimes", 8, 30), ("tied", 4, 5), ("sometimes", 4, 3), ("tied", 4, 1)]


@pytest.mark.parametrize(
    ("form", "kind", "batch", "examples"),
    [
        pytest.param(form, *data, marks=() if (form, *data) in QUICK else slow)
        for form in FORMS
        for data in DATA
    ],
)
def test_numbers_are_those_of_plain_torch(
    replicas: Replicas, form: str, kind: str, batch: int, examples: int
) -> None:
    """More workers than examples, too."""
    name, count, options, groups = FORMS[form]
    servers = {"servers": 2} if name == "parameter_server" else {}
    found = replicas(
        trained, count, name, {**options, "every": EVERY}, kind, batch, examples, **servers
    )
    expected = by_torch(groups, kind, batch, examples, str(options.get("outer", "")))
    for each in found:
        close(each, expected)
