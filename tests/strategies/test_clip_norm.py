"""``clip_norm`` is torch's ``clip_grad_norm_`` in every exchange: what is below it stays."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import spartito as sp
from tests.replicas import Replicas, warns
from tests.strategies.jobs import make_strategy
from tests.strategies.test_contracts import close

EXAMPLES, BATCH = 22, 8
NEVER, SOMETIMES, ALWAYS = 1000.0, 1.0, 0.05

WAYS: list[tuple[str, int, dict[str, Any]]] = [
    ("one_device", 1, {}),
    ("mirrored", 2, {}),
    ("mirrored", 2, {"communication": "ddp"}),
    ("multi_worker_mirrored", 3, {"communication": "sockets"}),
    ("central_storage", 2, {}),
    ("sharded", 2, {}),
    ("sharded", 2, {"zero": 2}),
    ("mesh", 2, {"mesh": {"model": 2}}),
    ("mesh", 4, {"mesh": {"data": 2, "model": 2}}),
    ("pipeline", 2, {"stages": 2, "microbatches": 2, "split": ["2"]}),
    ("parameter_server", 2, {"max_staleness": 0, "servers": {"min_shard_bytes": 16}}),
    ("local_sgd", 2, {"groups": 1, "every": 1, "outer": {"lr": 1.0, "momentum": 0.0}}),
]


def made() -> tuple[nn.Module, torch.optim.Optimizer, Tensor, Tensor]:
    """Gradients that grow from batch to batch."""
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()
    x = torch.randn(EXAMPLES, 6).double() * torch.linspace(0.1, 3, EXAMPLES)[:, None]
    return net, torch.optim.SGD(net.parameters(), 0.1), x.double(), x[:, :4].double() * 2


def by_torch(norm: float) -> tuple[dict[str, Tensor], list[bool]]:
    """The values of a plain loop, and which of its gradients were clipped."""
    net, optimizer, x, y = made()
    clipped = []
    for rows, target in zip(x.split(BATCH), y.split(BATCH), strict=True):
        optimizer.zero_grad()
        nn.functional.mse_loss(net(rows), target).backward()
        clipped.append(bool(nn.utils.clip_grad_norm_(net.parameters(), norm) > norm))
        optimizer.step()
    return net.state_dict(), clipped


@warns(r"\d+ tensors stay whole", "no tensor of the model is cut")
def by_strategy(name: str, options: dict[str, Any], norm: float) -> dict[str, Tensor]:
    """The same by a trainer."""
    net, optimizer, x, y = made()
    with make_strategy(name, **options) as strategy:
        trainer = sp.Trainer(
            net, optimizer=optimizer, loss=nn.MSELoss(), strategy=strategy, clip_norm=norm
        )
        trainer.fit(sp.data.arrays(x, y).batch(BATCH), epochs=1, verbose=0)
        return {name: value.clone() for name, value in strategy.state_dict()["model"].items()}


def test_the_norms_are_chosen_well() -> None:
    assert [by_torch(norm)[1] for norm in (NEVER, SOMETIMES, ALWAYS)] == [
        [False, False, False],
        [False, True, True],
        [True, True, True],
    ]


@pytest.mark.parametrize("norm", [NEVER, SOMETIMES, ALWAYS])
@pytest.mark.parametrize(("name", "count", "options"), WAYS, ids=lambda value: str(value)[:28])
def test_gradients_are_clipped_as_by_torch(
    replicas: Replicas, name: str, count: int, options: dict[str, Any], norm: float
) -> None:
    expected, _ = by_torch(norm)
    servers = int(name == "parameter_server")
    for found in replicas(by_strategy, count, name, options, norm, servers=servers):
        close(found, dict(expected))
