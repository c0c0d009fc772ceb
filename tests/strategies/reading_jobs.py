"""How often a training reads the value of a tensor, which waits for the device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import spartito as sp
from tests import simulated
from tests.replicas import NO_BF16, warns
from tests.strategies.jobs import make_strategy

aten = torch.ops.aten
WIDE = 64
READS = (aten._local_scalar_dense, aten.item, aten.is_nonzero, aten.equal)


class Reads(TorchDispatchMode):
    """Counts what brings a value of a tensor to the host."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        to_host = func.overloadpacket is aten._to_copy and (
            str(kwargs.get("device")) == "cpu" and args[0].device.type != "cpu"
        )
        self.count += to_host or func.overloadpacket in READS
        return func(*args, **kwargs)


class Looks(sp.Callback):
    """Looks at the loss after every step."""

    def on_train_batch_end(self, batch: int, logs: Mapping[str, float]) -> None:
        assert logs["loss"] > 0


def make(name: str, options: dict[str, Any], settings: dict[str, Any]) -> sp.Trainer:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
    weight = torch.tensor([1.0, 2.0, 0.5]) if settings.pop("classes", False) else None
    return sp.Trainer(
        net,
        optimizer=torch.optim.SGD(net.parameters(), 0.1, momentum=0.9),
        loss=nn.CrossEntropyLoss(weight),
        metrics=["accuracy"],
        strategy=sp.strategy(name, **options),
        **settings,
    )


@warns(NO_BF16)
def reads_per_step(
    name: str, options: dict[str, Any], settings: dict[str, Any], looks: bool = False
) -> float:
    """Reads in an epoch of 14 steps more than in one of 6, by step, after a first epoch."""
    trainer = make(name, options, dict(settings))
    x = torch.randn(56, 6, generator=torch.Generator().manual_seed(1))
    data = sp.data.arrays(x, torch.arange(56) % 3).batch(4).repeat()
    callbacks = [Looks()] if looks else []
    counts = []
    for steps in (6, 6, 14):
        with _reads() as found:
            trainer.fit(data, epochs=1, steps_per_epoch=steps, verbose=0, callbacks=callbacks)
        counts.append(sum(found.values()))
    trainer.strategy.close()
    return float(counts[2] - counts[1]) / 8


@contextmanager
def _reads() -> Iterator[dict[str, int]]:
    """What is read of a simulated accelerator, or else of any tensor."""
    found: dict[str, int] = {}
    if simulated.is_here():
        with simulated.counting() as counts:
            yield found
        found |= {kind: counts[kind] for kind in (simulated.READS, simulated.TO_HOST)}
    else:
        with Reads() as reads:
            yield found
        found["reads"] = reads.count


def counted(values: Tensor) -> int:
    """Reads of five kinds."""
    with Reads() as reads:
        assert values.max().item() > 0
        assert float(values[0]) > 0
        assert values[0]
        assert torch.equal(values, values)
        assert int(values.min()) >= 0
        assert [values[1], 3][int(values[2])]
    return int(reads.count)


@warns("every=")
def costs_per_step(name: str, options: dict[str, Any]) -> dict[str, float]:
    """What a step asks of a simulated accelerator; how many bytes the parameters have.

    Beside them how often an evaluation of three batches waits for the device, and for each further
    batch.
    """
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(WIDE, WIDE), nn.ReLU(), nn.Linear(WIDE, 3))
    trainer = sp.Trainer(
        net,
        optimizer=torch.optim.SGD(net.parameters(), 0.1, momentum=0.9),
        loss=nn.CrossEntropyLoss(),
        metrics=["accuracy"],
        strategy=make_strategy(name, **options),
    )
    x = torch.randn(12, WIDE, generator=torch.Generator().manual_seed(1))
    data = sp.data.arrays(x, torch.arange(12) % 3).batch(12).repeat()
    counts = []
    for steps in (6, 6, 12):
        with simulated.counting() as found:
            trainer.fit(data, epochs=1, steps_per_epoch=steps, verbose=0)
        counts.append(found)
    short, long = counts[1:]
    per_step = {kind: (long[kind] - short[kind]) / 6 for kind in long}
    passes = []
    for rows in (12, 24):
        with simulated.counting() as found:
            trainer.evaluate((x.repeat(2, 1)[:rows], torch.arange(rows) % 3), batch_size=4)
        passes.append(found[simulated.READS] + found[simulated.TO_HOST])
    trainer.strategy.close()
    return {
        **per_step,
        "parameters": (WIDE * WIDE + WIDE * 4 + 3) * 4,
        "waits of an evaluation": (passes[1] - passes[0]) / 3,
        "waits of a pass": passes[0],
    }
