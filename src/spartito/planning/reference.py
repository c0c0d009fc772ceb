"""A plain model that is trained under each strategy: what the strategy's own code takes in a step.

It has about as many tensors and bytes as the user's model, and few examples, so that it hardly
computes. What its steps take beyond the closed form of their strategy is the strategy's overhead on
this machine.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from spartito.declared import parse
from spartito.errors import UserError
from spartito.launch.lines.line import MOST, Link
from spartito.planning.cluster import Cluster, Kind
from spartito.planning.costs.parts import Situation
from spartito.planning.profile import Line, Overhead, Profile
from spartito.planning.search import predict

BETWEEN = (
    "multi_worker_mirrored",
    "sharded(zero=1)",
    "sharded",
    "mesh",
    "pipeline",
    "local_sgd",
    "parameter_server",
)
"""What may have several machines, each with its other options as they are by default, ..."""
TRIED = ("one_device", "mirrored", "central_storage", *BETWEEN)
"""... and all that one machine may have."""
WORKERS, SERVERS = 2, 1
BATCH = 8
STEPS = (40, 120)
"""Of a short epoch and a long one: groups meet twice in the one, six times in the other. What an
epoch takes at its beginning and end is the same in both."""
SLOWER = 4
"""Times as few, where a step takes longer: groups meet once and twice. And under pipelines, of many
small messages."""
SMALL = 1 << 20
"""Bytes of a model whose steps are short."""
EPOCHS = 3
"""Of each, of which the quickest counts."""
SECONDS = 1.0
"""Of the profile of its steps on one device."""
NARROW, MOST_LAYERS, MOST_BYTES = 16, 64, 4 << 20


@dataclass(frozen=True, slots=True)
class Shape:
    """Linear layers that are as wide as they are high."""

    layers: int
    width: int

    @classmethod
    def like(cls, tensors: int, nbytes: int) -> Self:
        """The shape of a model with about so many tensors and bytes of parameters.

        Args:
            tensors: Of the user's model; of some hundred the first ones count.
            nbytes: Of them; up to 4 MiB.
        """
        layers = min(MOST_LAYERS, max(WORKERS, tensors // 2))
        width = math.isqrt(min(nbytes, MOST_BYTES) // 4 // layers)
        return cls(layers, max(NARROW, width // NARROW * NARROW))

    def steps(self, name: str) -> tuple[int, int]:
        """The steps of a short epoch and of a long one.

        Args:
            name: Of the strategy.
        """
        is_slow = self.layers * self.width**2 * 4 > SMALL or name == "pipeline"
        few, many = (steps // SLOWER if is_slow else steps for steps in STEPS)
        return few, many


SOCKETS: Mapping[str, Any] = {"communication": "sockets"}
SERVERS_BY_SOCKETS: Mapping[str, Any] = {"servers": {"shared_memory": False}}


def tasks_of(text: str) -> tuple[int, int]:
    """How many workers and servers try a strategy.

    Args:
        text: One of `TRIED`.
    """
    name = parse(text).name
    workers = 1 if name == "one_device" else WORKERS
    return workers, SERVERS if name == "parameter_server" else 0


def trained(text: str, shape: Shape, by_sockets: bool = False) -> list[tuple[int, float]] | None:
    """Train in a task of a job.

    Args:
        text: The strategy.
        shape: Of the model.
        by_sockets: Whether tasks exchange as those of several machines do.

    Returns:
        Steps and seconds of a short epoch and of a long one; None from a task that sees none.
    """
    import spartito as sp

    name = parse(text).name
    options = SERVERS_BY_SOCKETS if name == "parameter_server" else SOCKETS
    strategy = sp.strategy(text, **options) if by_sockets else sp.strategy(text)
    trainer, rates = _trainer(strategy, shape), list[float]()
    noted = sp.callbacks.LambdaCallback(
        on_epoch_end=lambda _, logs: rates.append(logs["examples_per_second"])
    )
    chain, found = _data(shape).batch(BATCH), list[tuple[int, float]]()
    few, many = shape.steps(name)
    for steps, epochs in ((few, 1), (few, EPOCHS), (many, EPOCHS)):  # the first ones warm up
        trainer.fit(chain, epochs=epochs, steps_per_epoch=steps, callbacks=noted, verbose=False)
        found.append((steps, steps * BATCH / max(rates[-epochs:], default=math.inf)))
    trainer.strategy.close()
    return found[1:] if rates else None


def profiled(shape: Shape) -> dict[str, Any]:
    """Profile it in a process of its own.

    Args:
        shape: Of the model.

    Returns:
        As `spartito.training.trials.step_profile` records it.
    """
    import spartito as sp
    from spartito.data.dataset import as_dataset
    from spartito.training.trials.step_profile import Profiler

    trainer = _trainer(sp.OneDeviceStrategy(), shape)
    return Profiler(trainer, as_dataset(_data(shape).batch(BATCH)), SECONDS).record()


def overheads(
    reference: Profile, epochs: Mapping[str, Sequence[tuple[int, float]]], machines: int = 1
) -> dict[str, Overhead]:
    """What each strategy takes beyond its closed form.

    Args:
        reference: The plain model's profile, with this machine's exchanges.
        epochs: Of it, with their steps and seconds, by what was tried.
        machines: On which its tasks seemed to be.

    Returns:
        Seconds by strategy, 0 or more; those that no closed form knows are left out.
    """
    machine = reference.machine
    kind = Kind("this machine", machines, machine.cores, machine.memory)
    line = Link(MOST) if machines > 1 else None
    here = Cluster((kind,), WORKERS // machines, line, SERVERS, shared=machines > 1)
    reference = replace(reference, steps_per_epoch=None)  # what groups do at its end is not a step
    situation = Situation(reference, here, BATCH)
    found = {}
    for text, points in epochs.items():
        try:
            predicted = predict(parse(text), situation).cost
        except UserError:
            continue
        measured = Line.through(points)
        meeting = max(0.0, measured.each - predicted.step) * predicted.rhythm.every
        found[text] = Overhead(meeting, measured.start)
    return found


def _trainer(strategy: Any, shape: Shape) -> Any:
    import torch
    from torch import nn

    import spartito as sp

    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(shape.width, shape.width) for _ in range(shape.layers)))
    return sp.Trainer(net, optimizer=torch.optim.Adam, loss=nn.MSELoss(), strategy=strategy)


def _data(shape: Shape) -> Any:
    import torch

    import spartito as sp

    examples = STEPS[-1] * BATCH
    return sp.data.arrays(torch.randn(examples, shape.width), torch.randn(examples, shape.width))
