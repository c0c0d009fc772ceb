"""A plain model that is trained under each strategy: what the strategy's own code takes in a step.

It has about as many tensors and bytes as the user's model, and few examples, so that it hardly
computes. What its steps take beyond the closed form of their strategy is the strategy's overhead on
this machine.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from spartito.declared import parse
from spartito.errors import UserError
from spartito.planning.cluster import Cluster, Kind
from spartito.planning.costs.parts import Situation
from spartito.planning.profile import Profile
from spartito.planning.search import predict

TRIED = (
    "one_device",
    "mirrored",
    "multi_worker_mirrored",
    "central_storage",
    "sharded(zero=1)",
    "sharded(zero=2)",
    "sharded",
    "mesh",
    "pipeline",
    "local_sgd",
    "parameter_server",
)
"""Each with its other options as they are by default."""
WORKERS, SERVERS = 2, 1
BATCH = 8
STEPS = 60
"""Of an epoch: groups meet three times in it."""
EPOCHS = 3
"""The first one is not counted, and of the others the quickest."""
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


def tasks_of(text: str) -> tuple[int, int]:
    """How many workers and servers try a strategy.

    Args:
        text: One of `TRIED`.
    """
    name = parse(text).name
    workers = 1 if name == "one_device" else WORKERS
    return workers, SERVERS if name == "parameter_server" else 0


def trained(text: str, shape: Shape) -> float | None:
    """Train in a task of a job.

    Args:
        text: The strategy.
        shape: Of the model.

    Returns:
        Seconds of a step; None from a task that sees none.
    """
    import spartito as sp

    trainer, rates = _trainer(sp.strategy(text), shape), list[float]()
    noted = sp.callbacks.LambdaCallback(
        on_epoch_end=lambda _, logs: rates.append(logs["examples_per_second"])
    )
    trainer.fit(_data(shape).batch(BATCH), epochs=EPOCHS, callbacks=noted, verbose=False)
    trainer.strategy.close()
    return BATCH / max(rates[1:]) if rates else None


def profiled(shape: Shape) -> dict[str, Any]:
    """Profile it in a process of its own.

    Args:
        shape: Of the model.

    Returns:
        As `spartito.training.step_profile` records it.
    """
    import spartito as sp
    from spartito.data.dataset import as_dataset
    from spartito.training.step_profile import Profiler

    trainer = _trainer(sp.OneDeviceStrategy(), shape)
    return Profiler(trainer, as_dataset(_data(shape).batch(BATCH)), SECONDS).record()


def overheads(reference: Profile, seconds: Mapping[str, float]) -> dict[str, float]:
    """What each strategy takes beyond its closed form.

    Args:
        reference: The plain model's profile, with this machine's exchanges.
        seconds: Of its steps, by what is in `TRIED`.

    Returns:
        Seconds for each meeting by strategy, 0 or more; those that no closed form knows are left
        out.
    """
    machine = reference.machine
    kind = Kind("this machine", 1, machine.cores, machine.memory)
    situation = Situation(reference, Cluster((kind,), WORKERS, ps=SERVERS), BATCH)
    found = {}
    for text, measured in seconds.items():
        try:
            predicted = predict(parse(text), situation).cost
        except UserError:
            continue
        found[text] = max(0.0, measured - predicted.step) * predicted.rhythm.every
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

    examples = STEPS * BATCH
    return sp.data.arrays(torch.randn(examples, shape.width), torch.randn(examples, shape.width))
