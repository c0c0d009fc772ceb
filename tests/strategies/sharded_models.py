"""Models for the tests of `sharded`: of all kinds of modules, outputs and losses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import spartito as sp
from spartito.models.cats_vs_dogs import SeparableConv2d
from tests.strategies.jobs import blobs


class Frozen(nn.Module):
    """A part that does not learn, a part that nobody uses, and a weight used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.unused = nn.Linear(6, 6), nn.Linear(6, 6)
        self.second = nn.Linear(6, 6, bias=False)
        self.second.weight = self.first.weight
        self.fixed, self.head = nn.Linear(6, 6).requires_grad_(False), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.fixed(self.second(torch.tanh(self.first(x)))))
        return out


@dataclass
class Found:
    """An output of a user's own class."""

    scores: Tensor


class Astray(nn.Module):
    """Uses parameters of modules that it does not call, and gives gradients other ways back."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 6), nn.Tanh())
        self.lent, self.inner, self.head = nn.Linear(6, 6), Inner(), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Found:
        out = self.body[2:](self.body[:2](x))
        out = nn.functional.linear(out, self.lent.weight) + self.inner(out).scores
        return Found(self.head(out) + self.inner.aside.sum())


class Inner(nn.Module):
    """A block whose output nobody can look into, and one that it keeps to itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 30), nn.Linear(30, 6)

    def forward(self, x: Tensor) -> Found:
        hidden = self.first(x).sin()
        self.aside = (hidden @ self.second.weight.t()).cos().mean()
        return Found(self.second(hidden))


class Transposed(torch.autograd.Function):
    """A product that keeps a view of its weight by itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.x, ctx.weight = x, weight.t()
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad @ ctx.weight.t(), grad.t() @ ctx.x


class Token(nn.Module):
    """A block that gives views of its parameter away."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(12, 6))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.weight[:6].t(), self.weight.detach().expand(len(x), -1, -1)


class Views(nn.Module):
    """Computes with views of blocks that are not at work any more."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.own, self.head = Token(), Own(), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        weight, fixed = self.token(x)
        out: Tensor = self.head(torch.tanh(self.own(x) @ weight + fixed.mean(1)))
        return out


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(6, 6))
        self.nothing = nn.Parameter(torch.zeros(0, 2), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = Transposed.apply(x, self.weight)  # type: ignore[no-untyped-call]
        return out


class InPlace(nn.Module):
    """Writes into what a block returned, a view."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 6), nn.Unflatten(1, (2, 3)), nn.Flatten())
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        found = self.body(x)
        found += 1
        out: Tensor = self.head(torch.tanh(found))
        return out


class Follows(nn.Module):
    """Writes averages of a weight into parameters that do not learn, in several ways."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 6), nn.Linear(6, 1)
        zeros = (torch.zeros(6, 6) for _ in range(3))
        self.mean, self.by_data, self.put = (nn.Parameter(z, requires_grad=False) for z in zeros)
        self.inner = nn.Linear(6, 6, bias=False).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.body.weight.detach()
        with torch.no_grad():
            self.mean.mul_(0.9).add_(weight, alpha=0.1)
            self.inner.weight.lerp_(weight, 0.2)
        self.by_data.data.lerp_(weight, 0.3)
        self.put.data = torch.lerp(self.put.data, weight, 0.4)
        found = self.body(x) + self.inner(x) + x @ (self.mean + self.by_data + self.put)
        out: Tensor = self.head(torch.tanh(found)) * torch.tensor([1.0, 2.0, 3.0]).to(x)
        return out


class InTurns(nn.Module):
    """Calls a block twice, and another one in every other pass."""

    def __init__(self) -> None:
        super().__init__()
        self.twice, self.seldom, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.passes = 0

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        found = torch.tanh(self.twice(self.twice(x)))
        out: Tensor = self.head(found + self.seldom(found) if self.passes % 2 else found)
        return out


class Recurrent(nn.Module):
    """Has parameters in a list of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.cells, self.head = nn.LSTM(3, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.cells(x.view(-1, 2, 3))[0][:, -1])
        return out


def of_found(output: Found, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.scores, target, reduction="none")


def tokens() -> tuple[Tensor, Tensor]:
    made = torch.randint(11, (16, 9), generator=torch.Generator().manual_seed(4))
    return made[:, :-1], made[:, 1:]


def photos() -> tuple[Tensor, Tensor]:
    made = torch.rand(10, 3, 24, 24, generator=torch.Generator().manual_seed(4))
    return made.double() * 255, torch.arange(10) % 2


def of_tokens(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    loss = nn.functional.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum")
    return loss, target.numel()


Kind = tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, Tensor]], Any]
KINDS: dict[str, Kind] = {
    "mlp": (
        lambda: nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 3)),
        lambda: blobs(16),
        nn.CrossEntropyLoss(),
    ),
    "views": (Views, lambda: blobs(16), nn.CrossEntropyLoss()),
    "astray": (Astray, lambda: blobs(16), of_found),
    "frozen": (Frozen, lambda: blobs(16), nn.CrossEntropyLoss()),
    "in place": (InPlace, lambda: blobs(16), nn.CrossEntropyLoss()),
    "follows": (Follows, lambda: blobs(16), nn.CrossEntropyLoss()),
    "in turns": (InTurns, lambda: blobs(16), nn.CrossEntropyLoss()),
    "recurrent": (Recurrent, lambda: blobs(16), nn.CrossEntropyLoss()),
    "gpt": (lambda: sp.models.GPT(11, 8, 2, 2, 16, 0.0), tokens, of_tokens),
    "cnn": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 8, 3, stride=2),
            SeparableConv2d(8, 16),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(16 * 11 * 11, 2),
        ),
        photos,
        nn.CrossEntropyLoss(),
    ),
}


def build(kind: str) -> nn.Module:
    torch.manual_seed(5)
    return KINDS[kind][0]().double()
