"""The same trainings by plain torch, in one process."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tests.replicas import warns
from tests.zoo import doubled
from tests.zoo.models import ANIMALS, BATCH, CLIP, EXAMPLES, LOOPS, Animal, take

Result = dict[str, Any]


def result(weights: dict[str, Tensor], losses: Sequence[Any], final: Any = 0.0) -> Result:
    """What trainings are compared by; of numbers, in fp64."""
    kept = {name: value.detach().double().clone() for name, value in weights.items()}
    return {
        "weights": kept,
        "losses": torch.tensor([float(loss) for loss in losses], dtype=torch.float64),
        "final": torch.tensor(float(final), dtype=torch.float64),
    }


OLD = "`is_gradient_checkpointing` is deprecated"
"""What Transformers says of peft."""


@warns(OLD)
def train(name: str, groups: int = 1, every: int = 1, moved: bool = False) -> Result:
    """Weights after five steps, the loss of each, and that of all examples in the end.

    Args:
        name: Of the architecture.
        groups: Copies that train apart, each on its part of every batch.
        every: After so many updates, and at the end, they take their weighted mean.
        moved: Whether each weight begins a rounding error away, which some networks enlarge.
    """
    with doubled.in_double():
        torch.manual_seed(3)
        if name in LOOPS:
            return _loop(name, groups, every, moved)
        return _fit(ANIMALS[name], groups, every, moved)


def _fit(animal: Animal, groups: int, every: int, moved: bool) -> Result:
    common = animal.build()
    if moved:
        move(common)
    data = animal.data()
    nets = [common] if groups == 1 else [copy.deepcopy(common) for _ in range(groups)]
    optimizers = [animal.optimizer(net.parameters()) for net in nets]
    eaten, losses = [0.0] * groups, []
    for step, rows in enumerate(batches()):
        total = whole = 0.0
        for number, (net, optimizer) in enumerate(zip(nets, optimizers, strict=True)):
            own = parts(rows, groups)[number]
            weight = animal.weigh(take(data, own))
            optimizer.zero_grad()
            loss = cost(animal, net, take(data, own))
            loss.backward()
            total += float(loss.detach()) * weight
            nn.utils.clip_grad_norm_(net.parameters(), CLIP)
            optimizer.step()
            whole += weight
            eaten[number] += weight
        losses.append(total / whole)
        if groups > 1 and ((step + 1) % every == 0 or rows.stop == EXAMPLES):
            meet(nets, eaten)
            eaten = [0.0] * groups
    if groups > 1:
        average(common, nets)
    common.eval()
    with torch.no_grad():
        final = cost(animal, common, data)
    return result(common.state_dict(), losses, final)


def move(net: nn.Module) -> None:
    """Make each weight the next larger number."""
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(parameter.nextafter(torch.full_like(parameter, torch.inf)))


def batches() -> Iterator[range]:
    """The rows of each batch."""
    for first in range(0, EXAMPLES, BATCH):
        yield range(first, min(first + BATCH, EXAMPLES))


def parts(rows: range, count: int) -> list[range]:
    """Neighbouring rows, as equal as can be; the smaller parts first."""
    ends = [rows.start + len(rows) * n // count for n in range(count + 1)]
    return [range(*pair) for pair in pairwise(ends)]


def cost(animal: Animal, net: nn.Module, rows: Any) -> Tensor:
    """The loss of a model for some rows, a scalar."""
    if animal.loss is None:
        made: Tensor = net(**rows).loss
        return made
    if isinstance(rows, dict):
        output = net(**{name: value for name, value in rows.items() if name != "y"})
        found: Tensor = animal.loss()(output, rows["y"])
        return found
    last: Tensor = animal.loss()(net(rows[0]), rows[1])
    return last


def meet(nets: Sequence[nn.Module], weights: Sequence[float]) -> None:
    """Give all models the weighted mean of their parameters."""
    with torch.no_grad():
        for same in zip(*(net.parameters() for net in nets), strict=True):
            mean = sum(w * p for w, p in zip(weights, same, strict=True)) / sum(weights)
            for parameter in same:
                parameter.copy_(mean)


def average(common: nn.Module, nets: Sequence[nn.Module]) -> None:
    """Into ``common`` the parameters, which are equal, and the mean of the running statistics."""
    with torch.no_grad():
        for name, value in common.state_dict().items():
            theirs = torch.stack([net.state_dict()[name].double() for net in nets])
            value.copy_(theirs.mean(0))


def _loop(name: str, groups: int, every: int, moved: bool) -> Result:
    """Each group makes its next update before any of them goes on."""
    loops = [PlainLoop(number, groups, moved) for number in range(groups)]
    running = []
    for own in loops:
        running.append(LOOPS[name](own))
    updates: dict[int, int] = {}
    while True:
        due = []
        for number, loop in enumerate(running):
            if not loops[number].optimizers:
                torch.manual_seed(3)
            due.append(next(loop, None))
        if due[0] is None:
            break
        which = loops[0].optimizers.index(due[0])
        for own in loops:
            own.update(which)
        updates[which] = updates.get(which, 0) + 1
        if groups > 1 and updates[which] % every == 0:
            _meet(loops, which)
    for which in range(len(loops[0].models)):
        if groups > 1:
            _meet(loops, which)
            average(loops[0].models[which], [own.models[which] for own in loops])
    weights = {
        f"{number}.{key}": value
        for number, net in enumerate(loops[0].models)
        for key, value in net.state_dict().items()
    }
    shown = zip(*(own.shown for own in loops), strict=True)
    return result(weights, [torch.cat(each).mean() for each in shown])


def _meet(loops: Sequence[PlainLoop], which: int) -> None:
    meet([own.models[which] for own in loops], [own.rows[which] for own in loops])
    for own in loops:
        own.rows[which] = 0.0


class PlainLoop:
    """The parts of a step as torch has them, in one of several groups."""

    def __init__(self, number: int, groups: int, moved: bool) -> None:
        self._number, self._groups, self._size, self._moved = number, groups, 0, moved
        self.models: list[nn.Module] = []
        self.optimizers: list[Optimizer] = []
        self.rows: list[float] = []  # since models met, for each
        self.shown: list[Tensor] = []

    def prepare(self, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
        if self._moved:
            move(model)
        self.models.append(model)
        self.optimizers.append(optimizer)
        self.rows.append(0.0)
        return model, optimizer

    def batches(self, data: Any) -> Iterator[Any]:
        for whole in batches():
            own = parts(whole, self._groups)[self._number]
            part = take(data, own)
            pair = (None, None) if isinstance(part, dict) else part
            self._size = len(own)
            yield SimpleNamespace(data=part, x=pair[0], y=pair[1])

    def backward(self, losses: Tensor, batch: Any) -> None:
        losses.mean().backward()

    def show(self, losses: Tensor) -> None:
        self.shown.append(losses.detach())

    def update(self, which: int) -> None:
        optimizer = self.optimizers[which]
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        nn.utils.clip_grad_norm_(parameters, CLIP)
        optimizer.step()
        optimizer.zero_grad()
        self.rows[which] += self._size
