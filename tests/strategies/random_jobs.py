"""Models that draw at random in every way that torch has."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.checkpoint import checkpoint

import spartito as sp
from tests.strategies.changing_jobs import weights
from tests.strategies.jobs import make_strategy

STEPS, WIDTH = 6, 8
"""Length of a sequence, and its features."""


class Model(nn.Module):
    """``body`` of a batch ``(rows, STEPS, WIDTH)``, and two classes."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.part, self.body = KINDS[kind]()
        self.head = nn.Linear(WIDTH, 2)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(self.part, self.first(x))
        out: Tensor = self.head(x.mean(1))
        return out


Kind = tuple[nn.Module, Callable[[Any, Tensor], Tensor]]


def images(part: nn.Module) -> Kind:
    """Channels of ``(rows, STEPS, 2, 2, 2)``, of as many dims as the module takes."""
    dims = int(type(part).__name__[-2]) if type(part).__name__[-1] == "d" else 3
    tail = {1: (WIDTH,), 2: (4, 2), 3: (2, 2, 2)}[dims]
    return part, lambda m, x: m(x.unflatten(2, tail)).flatten(2)


def seq_first(part: nn.Module) -> Kind:
    def run(m: Any, x: Tensor) -> Tensor:
        found = m(x.transpose(0, 1))
        found = found[0] if isinstance(found, tuple) else found
        return found.transpose(0, 1)  # type: ignore[no-any-return]

    return part, run


def lstm(part: nn.Module) -> Kind:
    return part, lambda m, x: m(x)[0]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(torch.tanh(self.inner(F.dropout(x, 0.3, self.training))), 0.4)


def blocks(again: bool | None) -> Kind:
    """Three blocks; ``again``: checkpointed, with reentrant autograd or without."""

    def run(m: Any, x: Tensor) -> Tensor:
        for block in m:
            x = block(x) if again is None else checkpoint(block, x, use_reentrant=again)
        return x

    return nn.Sequential(Block(), Block(), Block()), run


def noise(_: Any, x: Tensor) -> Tensor:
    """Of each element, of each row, of the whole batch, a choice of layers, a distribution."""
    x = x + 0.1 * torch.randn_like(x) * torch.rand(len(x), 1, 1, dtype=x.dtype)
    if torch.rand(1).item() < 0.5:
        x = F.dropout(x, 0.3)
    x = x * torch.empty(len(x), STEPS, 1, dtype=x.dtype).bernoulli_(0.9)
    x = x * torch.bernoulli(torch.sigmoid(x.detach()))
    x = x + torch.normal(x.detach(), 0.1) + torch.rand(WIDTH, dtype=x.dtype)
    return x + F.gumbel_softmax(x, dim=-1)


def attention(need: bool) -> Kind:
    part = nn.MultiheadAttention(WIDTH, 2, 0.3)
    return seq_first(part)[0], lambda m, x: m(*[x.transpose(0, 1)] * 3, need_weights=need)[
        0
    ].transpose(0, 1)


class Counting(nn.Module):
    """Draws, and follows what it has counted."""

    def __init__(self) -> None:
        super().__init__()
        self.passes, self.seen, self.own = 0, list[int](), random.Random(3)

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        self.seen.append(self.passes)
        scale = 1 + 0.1 * self.passes + 0.2 * len(self.seen) + 0.1 * self.own.random()
        return F.dropout(x, 0.2) * scale


class Following(nn.Module):
    """Has weights that follow others in the forward pass, as a target network does."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.target = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.target.requires_grad_(False)

    def forward(self, x: Tensor) -> Any:
        with torch.no_grad():
            self.target.weight.mul_(0.9).add_(self.own.weight, alpha=0.1)
        return self.own(x) + F.dropout(self.target(x), 0.2)


def packed(m: Any, x: Tensor) -> Tensor:
    lengths = torch.full((len(x),), STEPS)
    found, _ = m(pack_padded_sequence(x, lengths, batch_first=True))
    return 0 * found.data.sum() + x  # type: ignore[no-any-return]


KINDS: dict[str, Callable[[], Kind]] = {
    "Dropout": lambda: (nn.Dropout(0.4), lambda m, x: m(m(x))),
    "F.dropout": lambda: (nn.Identity(), lambda m, x: F.dropout(F.dropout(x, 0.2), 0.3)),
    "Dropout1d": lambda: images(nn.Dropout1d(0.4)),
    "Dropout2d": lambda: images(nn.Dropout2d(0.4)),
    "Dropout3d": lambda: images(nn.Dropout3d(0.4)),
    "AlphaDropout": lambda: (nn.AlphaDropout(0.4), lambda m, x: m(x)),
    "FeatureAlphaDropout": lambda: images(nn.FeatureAlphaDropout(0.4)),
    "RReLU": lambda: (nn.RReLU(), lambda m, x: m(x)),
    "encoder": lambda: seq_first(nn.TransformerEncoderLayer(WIDTH, 2, 16, 0.3)),
    "encoder, rows first": lambda: (
        nn.TransformerEncoderLayer(WIDTH, 2, 16, 0.3, batch_first=True),
        lambda m, x: m(x),
    ),
    "attention": lambda: attention(True),
    "attention, fused": lambda: attention(False),
    "LSTM": lambda: seq_first(nn.LSTM(WIDTH, WIDTH, 3, dropout=0.4)),
    "GRU": lambda: lstm(nn.GRU(WIDTH, WIDTH, 2, dropout=0.4, batch_first=True)),
    "blocks": lambda: blocks(None),
    "blocks again": lambda: blocks(False),
    "blocks again, reentrant": lambda: blocks(True),
    "noise": lambda: (nn.Identity(), noise),
    "counting": lambda: (Counting(), lambda m, x: m(x)),
    "following": lambda: (Following(), lambda m, x: m(x)),
    "packed": lambda: lstm(nn.LSTM(WIDTH, WIDTH, 2, dropout=0.4, batch_first=True)),
    "order": lambda: (nn.Identity(), lambda m, x: x[torch.randperm(len(x))]),
    "own generator": lambda: (
        nn.Identity(),
        lambda m, x: x + torch.rand(x.shape, generator=torch.Generator()),
    ),
    "multinomial": lambda: (
        nn.Identity(),
        lambda m, x: x + torch.multinomial(torch.softmax(x.detach()[:, 0], 1), 1)[..., None],
    ),
}
KINDS["some rows only"] = lambda: (
    nn.Identity(),
    lambda m, x: F.dropout(x, 0.5) if x[0, 0, 0] > x[1, 0, 0] else x,
)
KINDS["together"] = lambda: (nn.Identity(), lambda m, x: x + x.mean(0))
KINDS["loss"] = lambda: (nn.Identity(), lambda m, x: m(x))  # see `noisy`
KINDS["packed"] = lambda: (nn.LSTM(WIDTH, WIDTH, 2, dropout=0.4, batch_first=True), packed)
REFUSED = {
    "packed": "packed sequences",
    "some rows only": "random operations here, another number on other replicas",
    "order": "an order of the examples",
    "own generator": "a generator of your own",
    "multinomial": "torch's multinomial .* not among the operations",
    "together": "the examples of a batch see each other in Model's forward pass",
    "loss": "torch's randn_like .* in the loss: draw in the model's forward pass",
}


def data() -> tuple[Tensor, Tensor]:
    x = torch.randn(22, STEPS, WIDTH, generator=torch.Generator().manual_seed(2)).double()
    return x, (x.mean((1, 2)) > 0).long()


def noisy(output: Tensor, target: Tensor) -> Tensor:
    """A loss that draws at random."""
    return F.cross_entropy(output + torch.randn_like(output), target)


def train(
    name: str, options: dict[str, Any], kinds: list[str], compiled: bool = False
) -> dict[str, dict[str, Tensor]]:
    """Weights after an epoch of batches of 6, the last of 4 rows; for each of the kinds."""
    strategy = make_strategy(name, **options)
    found = {}
    try:
        for kind in kinds:
            net: Any = Model(kind)
            model: Any = torch.compile(net, backend="eager") if compiled else net
            torch.manual_seed(strategy.cluster.rank)  # what the user draws elsewhere
            strategy.prepare(
                model, torch.optim.SGD(model.parameters(), 0.1), deterministic=True, seed=5
            )
            for batch in strategy.distribute(sp.data.arrays(*data()).batch(6)):
                strategy.step(batch, noisy if kind == "loss" else nn.CrossEntropyLoss())
            found[kind] = weights(net)
            strategy.engine.team.pairs.all.clear()
        return found
    finally:
        strategy.close()
