"""Ten steps under a strategy, and by plain torch, of an MLP, a CNN and a transformer, in fp64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import spartito as sp
from spartito.models.cats_vs_dogs import SeparableConv2d
from tests.strategies.jobs import blobs, make_strategy

STEPS, BATCH = 10, 6
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda ps: torch.optim.SGD(ps, 0.05, momentum=0.9),
    "Adam": lambda ps: torch.optim.Adam(ps, 1e-3),
}


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
    "frozen": (Frozen, lambda: blobs(16), nn.CrossEntropyLoss()),
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


def by_torch(kind: str, optimizer: str, clip: float | None = None) -> list[float]:
    """The losses of a plain loop."""
    net, (x, y), loss = build(kind), KINDS[kind][1](), KINDS[kind][2]
    made = OPTIMIZERS[optimizer](net.parameters())
    found: list[float] = []
    while len(found) < STEPS:
        for rows, target in zip(x.split(BATCH), y.split(BATCH), strict=True):
            value = loss(net(rows), target)
            value = value[0] / value[1] if isinstance(value, tuple) else value
            made.zero_grad()
            value.backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(net.parameters(), clip)
            made.step()
            found.append(value.item())
    return found[:STEPS]


def by_strategy(
    name: str, options: dict[str, Any], cases: list[tuple[str, str, float | None]]
) -> list[list[float]]:
    """The losses of the same steps, case by case."""
    found = []
    for kind, optimizer, clip in cases:
        strategy = make_strategy(name, **options)
        net, (x, y), loss = build(kind), KINDS[kind][1](), KINDS[kind][2]
        strategy.prepare(net, OPTIMIZERS[optimizer](net.parameters()), clip_norm=clip)
        losses: list[float] = []
        while len(losses) < STEPS:
            for batch in strategy.distribute(sp.data.arrays(x, y).batch(BATCH)):
                result = strategy.step(batch, loss)
                losses.append(float(result.loss / result.weight))
        found.append(losses[:STEPS])
        strategy.close()
    return found


def refusals(name: str, options: dict[str, Any]) -> list[str]:
    """What is refused before the first step."""
    net = build("mlp")

    def with_hook() -> torch.optim.Optimizer:
        made = torch.optim.SGD(net.parameters(), 0.1)
        made.register_step_post_hook(lambda *_: None)
        return made

    given: list[tuple[Any, dict[str, Any]]] = [
        (torch.optim.Adafactor(net.parameters()), {}),
        (lambda ps: torch.optim.Adafactor(ps), {}),
        (with_hook(), {}),
        (torch.optim.SGD(net.parameters(), 0.1), {"precision": "fp16"}),
    ]
    texts = []
    for optimizer, more in given:
        with make_strategy(name, **options) as strategy:
            try:
                strategy.prepare(net, optimizer, **more)
                texts.append("")
            except sp.UserError as error:
                texts.append(str(error))
    return texts


def again(name: str, options: dict[str, Any], chosen: Any) -> list[list[float]]:
    """Losses of a GPT and a CNN with dropout and BatchNorm, whose blocks compute again."""
    nets: list[tuple[nn.Module, Any, Any]] = [
        (sp.models.GPT(11, 8, 2, 2, 16, 0.2).double(), tokens(), of_tokens),
        (Photos().double(), photos(), nn.CrossEntropyLoss()),
    ]
    found = []
    for net, data, loss in nets:
        torch.manual_seed(5)
        for parameter in net.parameters():
            nn.init.normal_(parameter, std=0.1)
        with make_strategy(name, **options) as strategy:
            trainer = sp.Trainer(
                net, optimizer=torch.optim.Adam(net.parameters(), 1e-3), loss=loss,
                strategy=strategy, deterministic=True, checkpoint_activations=chosen,
            )  # fmt: skip
            history = trainer.fit(sp.data.arrays(*data).batch(BATCH), epochs=3, verbose=0).history
            found.append(history["loss"])
            found.append([float(value.sum()) for value in net.buffers()])
    return found


class Photos(nn.Module):
    """Blocks with BatchNorm and dropout."""

    def __init__(self) -> None:
        super().__init__()
        kinds = [
            nn.Sequential(
                nn.Conv2d(i, 8, 3, 2, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.3)
            )
            for i in (3, 8)
        ]
        self.blocks, self.head = nn.ModuleList(kinds), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x.mean((2, 3)))
        return out


def memory(name: str, options: dict[str, Any]) -> tuple[int, int]:
    """Elements of an optimizer's state here, and of the parameters' shards, after one update."""
    strategy = make_strategy(name, **options)
    net = build("gpt")
    _, optimizer = strategy.prepare(net, torch.optim.Adam(net.parameters()))
    for batch in strategy.distribute(sp.data.arrays(*tokens()).batch(BATCH)):
        strategy.step(batch, of_tokens)
        break
    state = sum(values["exp_avg"].numel() for values in optimizer.state.values())
    strategy.close()
    return state, sum(parameter.numel() for parameter in net.parameters())


class Idle(nn.Module):
    """A block that is called a second time, and does not need its parameters then."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.fixed = nn.Linear(6, 6), nn.Linear(6, 6).requires_grad_(False)
        self.block, self.head = Sometimes(), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.block(self.block(self.fixed(self.first(x)), computes=False)))
        return out


class Sometimes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(6))

    def forward(self, x: Tensor, computes: bool = True) -> Tensor:
        return torch.tanh(x @ self.weight) if computes else x.sin()


def reloaded(name: str, options: dict[str, Any]) -> list[list[list[float]]]:
    """A model's values after an update, and outputs once others were loaded into it."""
    torch.manual_seed(5)
    net, other, (x, y) = Idle().double(), Idle().double(), blobs(12)
    with make_strategy(name, **options) as strategy:
        strategy.prepare(net, torch.optim.SGD(net.parameters(), 0.1))
        for batch in strategy.distribute(sp.data.arrays(x, y).batch(12)):
            strategy.step(batch, nn.CrossEntropyLoss())
        values = [value.flatten().tolist() for value in strategy.state_dict()["model"].values()]
        for batch in strategy.distribute(sp.data.arrays(x, y).batch(12)):
            strategy.step(batch, nn.CrossEntropyLoss())
        strategy.load({"model": other.state_dict()})
        with torch.no_grad():
            return [values, net(x).tolist(), other(x).tolist()]


def written(name: str, options: dict[str, Any], how: Callable[[nn.Module], Any]) -> str:
    """What is said of a change of the model between two steps."""
    net, (x, y) = build("mlp"), blobs(12)
    with make_strategy(name, **options) as strategy, torch.no_grad():
        strategy.prepare(net, torch.optim.SGD(net.parameters(), 0.1))
        try:
            how(net)
            for batch in strategy.distribute(sp.data.arrays(x, y).batch(12)):
                with torch.enable_grad():
                    strategy.step(batch, nn.CrossEntropyLoss())
        except sp.UserError as error:
            return str(error)
    return ""


def halve(net: nn.Module) -> None:
    for parameter in net.parameters():
        parameter.mul_(0.5)


def restored(name: str, options: dict[str, Any], folder: str) -> list[list[float]]:
    """A model's values, and the next losses, once it was written into and loaded again."""
    (x, y), net = blobs(12), build("mlp")
    trainer = sp.Trainer(
        net,
        optimizer=torch.optim.SGD(net.parameters(), 0.1),
        loss=nn.CrossEntropyLoss(),
        strategy=make_strategy(name, **options),
    )
    trainer.save(f"{folder}/before")
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.zero_()
        parameter.data = torch.zeros_like(parameter)
    trainer.load(f"{folder}/before")
    trainer.save(f"{folder}/after")
    values = trainer.strategy.state_dict()["model"].values()
    found = [value.flatten().tolist() for value in values]
    found.append(trainer.fit((x, y), batch_size=12, epochs=2, verbose=0).history["loss"])
    trainer.strategy.close()
    return found


def closed(name: str, options: dict[str, Any]) -> list[str]:
    """What is said of a model whose replicas have left each other."""
    net, said = build("mlp"), []
    with make_strategy(name, **options) as strategy:
        strategy.prepare(net, torch.optim.SGD(net.parameters(), 0.1))
    for ask in (net.state_dict, strategy.state_dict, lambda: net(blobs(3)[0])):
        try:
            ask()
        except sp.UserError as error:
            said.append(str(error))
    return said
