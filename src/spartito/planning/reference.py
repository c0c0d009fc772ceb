"""A small model that is trained under each strategy: what the strategy's own code takes in a step.

It has as many tensors as the user's model, and hardly computes. What its steps take beyond the
closed form of their strategy is the strategy's overhead on this machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
    "sharded(zero=3)",
    "mesh",
    "pipeline",
    "local_sgd",
    "parameter_server",
)
"""Each with its other options as they are by default."""
WORKERS, SERVERS = 2, 1
WIDTH = 16
BATCH = 8
STEPS = 40
"""Of an epoch; the first one is not counted, and of the others the quickest."""
EPOCHS = 5
SECONDS = 1.0
"""Of the profile of its steps on one device."""
MOST_LAYERS = 64


def layers_of(tensors: int) -> int:
    """How many layers have about so many tensors.

    Args:
        tensors: Of the user's model.
    """
    return min(MOST_LAYERS, max(WORKERS, tensors // 2))


def tasks_of(text: str) -> tuple[int, int]:
    """How many workers and servers try a strategy.

    Args:
        text: One of `TRIED`.
    """
    name = parse(text).name
    workers = 1 if name == "one_device" else WORKERS
    return workers, SERVERS if name == "parameter_server" else 0


def trained(text: str, layers: int) -> float | None:
    """Train in a task of a job.

    Args:
        text: The strategy.
        layers: Of the model.

    Returns:
        Seconds of a step; None from a task that sees none.
    """
    import spartito as sp

    trainer = _trainer(sp.strategy(text), layers)
    rates: list[float] = []

    class Rates(sp.Callback):
        """Notes how fast each epoch is."""

        def on_epoch_end(self, epoch: int, logs: Mapping[str, Any]) -> None:
            rates.append(logs["examples_per_second"])

    trainer.fit(_data().batch(BATCH), epochs=EPOCHS, callbacks=Rates(), verbose=False)
    trainer.strategy.close()
    return BATCH / max(rates[1:]) if rates else None


def profiled(layers: int) -> dict[str, Any]:
    """Profile it in a process of its own.

    Args:
        layers: Of the model.

    Returns:
        As `spartito.training.step_profile` records it.
    """
    import spartito as sp
    from spartito.data.dataset import as_dataset
    from spartito.training.step_profile import Profiler

    trainer = _trainer(sp.OneDeviceStrategy(), layers)
    return Profiler(trainer, as_dataset(_data().batch(BATCH)), SECONDS).record()


def overheads(reference: Profile, seconds: Mapping[str, float]) -> dict[str, float]:
    """What each strategy takes beyond its closed form.

    Args:
        reference: The small model's profile, with this machine's exchanges.
        seconds: Of its steps, by what is in `TRIED`.

    Returns:
        Seconds by strategy, 0 or more; those that no closed form knows are left out.
    """
    machine = reference.machine
    kind = Kind("this machine", 1, machine.cores, machine.memory)
    found = {}
    for text, measured in seconds.items():
        situation = Situation(reference, Cluster((kind,), WORKERS, ps=SERVERS), BATCH)
        try:
            predicted = predict(parse(text), situation).cost.step
        except UserError:
            continue
        found[text] = max(0.0, measured - predicted)
    return found


def _trainer(strategy: Any, layers: int) -> Any:
    import torch
    from torch import nn

    import spartito as sp

    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers)))
    return sp.Trainer(net, optimizer=torch.optim.Adam, loss=nn.MSELoss(), strategy=strategy)


def _data() -> Any:
    import torch

    import spartito as sp

    examples = STEPS * BATCH
    return sp.data.arrays(torch.randn(examples, WIDTH), torch.randn(examples, WIDTH))
