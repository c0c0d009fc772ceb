"""Ten steps under a strategy, and by plain torch, of an MLP, a CNN and a transformer, in fp64."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import checkpoint

import spartito as sp
from spartito.system import shared
from tests.strategies.jobs import blobs, make_strategy
from tests.strategies.sharded_models import KINDS, build, of_tokens, photos, tokens

STEPS, BATCH = 7, 6


class Signs(torch.optim.Optimizer):
    """Lion (Chen et al. 2023): the signs of what it has averaged; it says what it looks at."""

    elementwise = True

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-3, "weight_decay": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                average = state.setdefault("average", torch.zeros_like(p))
                state["step"] = state.get("step", 0) + 1
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_((0.9 * average + 0.1 * p.grad).sign(), alpha=-group["lr"])
                average.lerp_(p.grad, 0.01)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda ps: torch.optim.SGD(ps, 0.05, momentum=0.9),
    "Adam": lambda ps: torch.optim.Adam(ps, 1e-3),
    "AdamW": lambda ps: torch.optim.AdamW(ps, 1e-2, weight_decay=0.1),
    "NAdam": lambda ps: torch.optim.NAdam(ps, 1e-2, decoupled_weight_decay=True, weight_decay=0.1),
    "RMSprop": lambda ps: torch.optim.RMSprop(ps, 1e-3, centered=True, momentum=0.5),
    "Adagrad": lambda ps: torch.optim.Adagrad(ps, 1e-2, initial_accumulator_value=0.1),
    "Signs": Signs,
    "ASGD": lambda ps: torch.optim.ASGD(ps, 1e-2, t0=4),
    "amsgrad": lambda ps: torch.optim.Adam(ps, 1e-2, amsgrad=True),
    "maximize": lambda ps: torch.optim.SGD(ps, 1e-3, maximize=True, nesterov=True, momentum=0.5),
    "groups": lambda ps: torch.optim.AdamW(
        [{"params": [p], "lr": 0.01 / n, "weight_decay": 0.1 * n} for n, p in enumerate(ps, 1)]
    ),
}


Between = Callable[[nn.Module, int], None]
"""What a loop does to a model after a step, by the step's number."""


@cache
def by_torch(
    kind: str, optimizer: str, clip: float | None = None, between: Between | None = None
) -> list[float]:
    """The losses of a plain loop; the same for all replicas and stages."""
    net, (x, y), loss = build(kind), KINDS[kind][1](), KINDS[kind][2]
    made = OPTIMIZERS[optimizer](net.parameters())
    found: list[float] = []
    while len(found) < STEPS:
        for rows, target in zip(x.split(BATCH), y.split(BATCH), strict=True):
            value = loss(net(rows), target)
            value = value[0] / value[1] if isinstance(value, tuple) else value.mean()
            made.zero_grad()
            value.backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(net.parameters(), clip)
            made.step()
            found.append(value.item())
            if between is not None:
                between(net, len(found))
    return found[:STEPS]


def by_strategy(
    name: str,
    options: dict[str, Any],
    cases: list[tuple[str, str, float | None]],
    between: Between | None = None,
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
                if between is not None:
                    between(net, len(losses))
        found.append(losses[:STEPS])
        strategy.close()
    return found


class Again(nn.Module):
    """A part with blocks of its own, which computes once more in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Linear(6, 20), nn.Tanh()), nn.Linear(20, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(checkpoint(self.body, x, use_reentrant=False))
        return out


def elsewhere(name: str, options: dict[str, Any]) -> list[float]:
    """Losses where backward passes have a thread of their own, as on devices."""
    torch.manual_seed(5)
    net, (x, y), losses = Again().double(), blobs(12), []
    with make_strategy(name, **options) as strategy, ThreadPoolExecutor(1) as aside:
        _, optimizer = strategy.prepare(net, torch.optim.SGD(net.parameters(), 0.1))
        for _ in range(2):
            for batch in strategy.distribute(sp.data.arrays(x, y).batch(6)):
                loss = nn.functional.cross_entropy(net(batch.data[0]), batch.data[1])
                aside.submit(strategy.backward, loss, batch).result()
                strategy.update(optimizer)
                losses.append(strategy.reduce("mean", loss).item())
    return losses


class Boxed(nn.Module):
    """A block that puts its output into an object of the user's, once it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.boxes = nn.Linear(6, 6), nn.Linear(6, 6), False

    def forward(self, x: Tensor) -> Any:
        out = self.b(self.a(x).tanh())
        return SimpleNamespace(out=out) if self.boxes else out


class Boxing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first, self.block, self.head = nn.Linear(6, 6), Boxed(), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        found = self.block(self.first(x).tanh())
        out: Tensor = self.head(found.out if self.block.boxes else found)
        return out


def boxed(name: str, options: dict[str, Any], begins: int) -> list[float]:
    """Losses of five steps, from one of which on a block's output is out of sight."""
    net, (x, y), losses = Boxing().double(), blobs(12), []
    with make_strategy(name, **options) as strategy:
        strategy.prepare(net, torch.optim.SGD(net.parameters(), 0.1))
        for step in range(5):
            net.block.boxes = step >= begins
            for batch in strategy.distribute(sp.data.arrays(x, y).batch(12)):
                result = strategy.step(batch, nn.CrossEntropyLoss())
                losses.append(float(result.loss / result.weight))
    return losses


class Ends(torch.autograd.Function):
    """Ends the second replica's process in its backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        if os.environ["RANK"] == "1":
            os._exit(3)
        return grad


class Ending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(Ends.apply(self.first(x)))  # type: ignore[no-untyped-call]
        return out


def lost(name: str, options: dict[str, Any]) -> None:
    """A replica is lost while the others are in a backward pass."""
    net = Ending().double()
    with make_strategy(name, **options) as strategy:
        strategy.prepare(net, torch.optim.SGD(net.parameters(), 0.1))
        for batch in strategy.distribute(sp.data.arrays(*blobs(12)).batch(6)):
            strategy.step(batch, nn.CrossEntropyLoss())


def engines(name: str, options: dict[str, Any], kinds: list[str]) -> list[bool]:
    """Whether torch's FSDP2 has a model of each kind."""
    found = []
    for kind in kinds:
        net = build(kind)
        with make_strategy(name, **options) as strategy:
            strategy.prepare(net, torch.optim.SGD(net.parameters(), 0.1))
        found.append(isinstance(net, FSDPModule))
        assert not any(type(each).__name__.startswith("FSDP") for each in net.modules())
    return found


def halves(name: str, options: dict[str, Any]) -> list[float]:
    """A weight in bf16 after a step of one, with gradients of 1, 1/256, 1/256 and 0."""
    net = nn.Linear(1, 1, bias=False).to(torch.bfloat16)
    nn.init.zeros_(net.weight)
    with make_strategy(name, **options) as strategy:
        strategy.prepare(net, torch.optim.SGD(net.parameters(), 1.0))
        rows = torch.tensor([4, 1 / 64, 1 / 64, 0])[:, None].to(torch.bfloat16)
        for batch in strategy.distribute(sp.data.arrays(rows, torch.zeros(4)).batch(4)):
            strategy.step(batch, lambda output, target: output.flatten())
        values = strategy.state_dict()["model"]["weight"]
        return [float(value) for value in values.flatten()]


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
            history = trainer.fit(sp.data.arrays(*data).batch(BATCH), epochs=2, verbose=0).history
            found.append(history["loss"])
            whole, names = strategy.state_dict()["model"], dict(net.named_buffers())
            found.append([float(value.sum()) for name, value in whole.items() if name in names])
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


def untold(name: str, options: dict[str, Any]) -> list[list[float]]:
    """As `by_strategy`, where no kernel tells what was written, and what is there is written."""
    before, shared.PAGEMAP = shared.PAGEMAP, "/proc/self/nothing"
    try:
        return by_strategy(name, options, [("mlp", "Adam", None)], write_the_same)
    finally:
        shared.PAGEMAP = before


def write_the_same(net: nn.Module, step: int) -> None:
    for parameter in net.parameters():
        parameter.data.mul_(1.0)
    if step % 4 == 0:
        next(net.parameters()).data.mul_(0.5)


def change(net: nn.Module, step: int) -> None:
    """What a script does between steps, without a write."""
    net.eval()
    with torch.no_grad():
        net(blobs(3)[0])
    net.train()
    next(net.children()).requires_grad_(step % 5 not in (2, 3))
    if step == 1:  # behind those of the strategy
        for parameter in net.parameters():
            parameter.register_post_accumulate_grad_hook(halve)


def halve(parameter: Tensor) -> None:
    if parameter.grad is not None:
        parameter.grad.mul_(0.5)


kept: list[Tensor] = []


def keep(net: nn.Module, step: int) -> None:
    kept[:] = kept or [next(net.parameters()).detach()]


def broken(name: str, options: dict[str, Any]) -> list[float]:
    """Losses before and after an update whose backward pass did not come to its end."""
    fails, (x, y), net = [False], blobs(12), build("mlp")

    def fail(grad: Tensor) -> None:
        if fails[0]:
            raise ValueError("no gradient")

    next(net.parameters()).register_hook(fail)
    with make_strategy(name, **options) as strategy:
        optimizer, loss = torch.optim.SGD(net.parameters(), 0.1), nn.CrossEntropyLoss()
        trainer = sp.Trainer(net, optimizer=optimizer, loss=loss, strategy=strategy)
        trainer.fit((x, y), batch_size=12, epochs=2, verbose=0)
        fails[0] = True
        with suppress(ValueError):
            trainer.fit((x, y), batch_size=12, epochs=3, verbose=0)
        fails[0] = False
        return trainer.fit((x, y), batch_size=12, epochs=4, verbose=0).history["loss"]


def written(name: str, options: dict[str, Any], how: Between) -> str:
    """What is said of a change of the model between two steps."""
    try:
        by_strategy(name, options, [("mlp", "SGD", None)], how)
    except sp.UserError as error:
        return str(error)
    return ""


def copied(net: nn.Module, step: int) -> None:
    copy.deepcopy(net)


def write(net: nn.Module, step: int) -> None:
    """Each step in another way: what a weight's clipping, an average or an initialization do."""
    rows = list(net.parameters())
    if step % 6 == 0:
        net.load_state_dict({key: value * 0.9 for key, value in net.state_dict().items()})
    elif step % 6 == 1:
        for parameter in rows:
            parameter.data.mul_(0.5)
    elif step % 6 == 2:
        rows[-1].data = rows[-1].data * 2 + 0.01
    elif step % 6 == 3:
        with torch.no_grad():
            rows[0][0, 0] = 0.25
            rows[0].clamp_(-0.1, 0.1)
    elif step % 6 == 4:
        for parameter in rows:
            parameter.detach().view(-1)[:1].zero_()


def write_alone(net: nn.Module, step: int) -> None:
    if os.environ["RANK"] == "0":
        next(net.parameters()).data.mul_(0.5)


def write_unlike(net: nn.Module, step: int) -> None:
    for parameter in net.parameters():
        parameter.data.add_(float(os.environ["RANK"]))


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
