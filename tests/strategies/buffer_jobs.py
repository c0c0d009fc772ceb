"""Models whose forward passes change buffers, on every replica."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor, nn

import spartito as sp
from tests.replicas import warns
from tests.strategies.jobs import make_strategy

EXAMPLES, BATCH = 21, 8


class Centred(nn.Module):
    """Follows the mean of its inputs, as DINO's centre or a codebook does."""

    center: Tensor

    def __init__(self, persistent: bool) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(5), persistent=persistent)

    def forward(self, x: Tensor) -> Tensor:
        output = x - self.center
        if self.training:
            self.center = 0.5 * self.center + 0.5 * x.detach().mean(0)
        return output


class CentredLoss(nn.Module):
    """A loss with such a centre."""

    center: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(3).double())

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        losses = nn.functional.cross_entropy(output - self.center, target, reduction="none")
        if torch.is_grad_enabled():
            self.center = 0.5 * self.center + 0.5 * output.detach().mean(0)
        return losses


class Masked(nn.Module):
    """Keeps what belongs to the rows of its last call, of which other replicas have others."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", None, persistent=False)
        self.register_buffer("table", torch.arange(5.0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.mask = x.detach() > 0
        return x * self.mask + self.get_buffer("table")


class OwnNorm(nn.Module):
    """A norm of a user's own: what it takes of a batch is each replica's."""

    running_mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("running_mean", torch.zeros(5))
        self.register_buffer("running_var", torch.ones(5))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.batch_norm(
            x, self.running_mean, self.get_buffer("running_var"), training=self.training
        )


class Counting(nn.Module):
    """Counts its calls, and has a table: equal on all replicas."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("mask", torch.ones(5, dtype=torch.bool))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * self.get_buffer("mask")


KINDS: dict[str, Any] = {
    "centre": lambda: Centred(True),
    "unsaved": lambda: Centred(False),
    "cache": Masked,
    "own norm": OwnNorm,
    "loss": nn.Identity,
    "counter": Counting,
    "norm": lambda: nn.BatchNorm1d(5),
    "cumulative norm": lambda: nn.BatchNorm1d(5, momentum=None),
}


@warns("")  # what is said is returned
def trained(
    name: str,
    options: dict[str, Any],
    kind: str,
    deterministic: bool,
    loop: bool = False,
    examples: int = EXAMPLES,
) -> dict[str, Any]:
    """What a training says, and the model that each replica has in the end."""
    said: list[str] = []

    class Hear(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    handler = Hear()
    logging.getLogger("spartito").addHandler(handler)
    strategy = make_strategy(name, **options)
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(4, 5), nn.Identity(), nn.Linear(5, 3))
    net[1] = KINDS[kind]()
    net.double()
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(examples, 4, dtype=torch.float64, generator=generator)
    values: dict[str, Any] = {}
    data, steps = sp.data.arrays(x, torch.arange(examples) % 3).batch(BATCH), 0
    try:
        if loop:
            _, optimizer = strategy.prepare(
                net, torch.optim.SGD(net.parameters(), 0.1), deterministic=deterministic
            )
            for batch in strategy.distribute(data):
                loss = nn.functional.cross_entropy(net(batch.x), batch.y, reduction="none")
                steps += 1
                strategy.backward(loss, batch)
                strategy.update(optimizer)
        else:
            trainer = sp.Trainer(
                net,
                optimizer=torch.optim.SGD(net.parameters(), 0.1),
                loss=CentredLoss() if kind == "loss" else nn.CrossEntropyLoss(),
                strategy=strategy,
                deterministic=deterministic,
            )
            trainer.fit(data, epochs=2, validation_data=data, verbose=0)
        values = {name: value.clone() for name, value in net.state_dict().items()}
    except sp.UserError as error:
        said.append(str(error))
    except sp.TaskLostError as error:  # the other task may have been refused before this one
        if "UserError" not in str(error):
            raise
        said.append(str(error))
    finally:
        strategy.close()
        logging.getLogger("spartito").removeHandler(handler)
    return {"said": said, "values": values, "steps": steps}
