"""The table of docs/explanation/concepts.md, strategy by API, is what the strategies do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import spartito as sp
from spartito.errors import UserError
from spartito.registry import strategy_names
from spartito.strategies import strategy as make_strategy
from tests.replicas import ReplicaError, Replicas, warns
from tests.strategies.jobs import blobs, mlp

PAGE = Path(__file__).parents[2] / "docs" / "explanation" / "concepts.md"
REPLICAS = {"one_device": 1}
SERVERS = {"parameter_server": 1}
ELSEWHERE: dict[str, dict[str, Any]] = {"tpu": {"device": "cpu"}}
"""Options of those that are for a kind of devices, on others."""
CONDITIONS: dict[str, dict[str, Any]] = {"max_staleness=0 without BatchNorm": {"max_staleness": 0}}


def table() -> dict[str, dict[str, str]]:
    """The cells by strategy and column."""
    lines = PAGE.read_text().split("## Strategy and API")[1].split("\n## ")[0].splitlines()
    rows = [[cell.strip(" `") for cell in line.split("|")[1:-1]] for line in lines if "|" in line]
    (_, *columns), _, *body = rows
    return {name: dict(zip(columns, cells, strict=True)) for name, *cells in body}


def cells() -> Iterator[Any]:
    for name, row in table().items():
        for column, cell in row.items():
            yield pytest.param(name, column, cell, id=f"{name}-{column}")


@warns("every=", "torch.compile is left out on a mesh")
def use(name: str, options: dict[str, Any], column: str, batchnorm: bool = False) -> float:
    """Use a strategy so; returns a figure that says that something was learned or found."""
    strategy = make_strategy(name, **options)
    try:
        return _use(strategy, column, batchnorm)
    finally:
        strategy.close()


def _use(strategy: sp.Strategy, column: str, batchnorm: bool) -> float:
    net = nn.Sequential(nn.BatchNorm1d(6).double(), mlp()) if batchnorm else mlp()
    x, y = blobs(48)
    model = torch.compile(net, backend="eager") if column == "torch.compile" else net
    if column == "custom loop":
        model, optimizer = strategy.prepare(net, torch.optim.SGD(net.parameters(), 0.3))
        before = nn.functional.cross_entropy(model(x), y).item()
        batches = strategy.distribute(sp.data.arrays(x, y).batch(8))
        for _ in range(3):
            for batch in batches:
                losses = nn.functional.cross_entropy(model(batch.x), batch.y, reduction="none")
                strategy.backward(losses, batch)
                strategy.update(optimizer)
        strategy.synchronize()
        return before - nn.functional.cross_entropy(model(x), y).item()
    trainer = sp.Trainer(
        model,  # type: ignore[arg-type]
        optimizer=torch.optim.SGD(net.parameters(), 0.3),
        loss=nn.CrossEntropyLoss(),
        metrics=["accuracy"],
        strategy=strategy,
        deterministic=column == "deterministic",
    )
    if column == "evaluate":
        return float(trainer.evaluate((x, y))["loss"])
    if column == "predict":
        return float(trainer.predict(x).shape == (48, 3))
    curve = trainer.fit((x, y), epochs=3, batch_size=8, verbose=0).history["loss"]
    return float(curve[0] - curve[-1])


def test_every_strategy_has_its_row() -> None:
    assert sorted(table()) == sorted(strategy_names())


@pytest.mark.parametrize(("name", "column", "cell"), list(cells()))
def test_a_cell(replicas: Replicas, name: str, column: str, cell: str) -> None:
    result, _, condition = cell.partition(", ")
    world, servers = REPLICAS.get(name, 2), SERVERS.get(name, 0)
    if result == "no":
        with pytest.raises(ReplicaError, match=f"under {name}, which owns the whole step"):
            replicas(use, world, name, {}, column, servers=servers)
        return
    assert result == "yes" or (result, column) == ("left out", "torch.compile")
    options = CONDITIONS.get(condition, {}) | ELSEWHERE.get(name, {})
    found = replicas(use, world, name, options, column, servers=servers)
    assert all(value > 0 for value in found)


def test_without_its_condition_deterministic_is_refused(replicas: Replicas) -> None:
    for options, batchnorm, rule in [
        ({}, False, "max_staleness=None"),
        ({"max_staleness": 0}, True, "BatchNorm"),
    ]:
        with pytest.raises(ReplicaError, match=rule):
            replicas(
                use, 2, "parameter_server", options, "deterministic", batchnorm, servers=1
            )  # fmt: skip


def second(name: str) -> str:
    """What a strategy says to a second model and optimizer."""
    strategy = make_strategy(name)
    try:
        for net in (mlp(), mlp()):
            strategy.prepare(net, torch.optim.SGD(net.parameters(), 0.1))
        return "two"
    except UserError as error:
        return str(error)
    finally:
        strategy.close()


def test_parameter_server_has_one_optimizer(replicas: Replicas) -> None:
    assert replicas(second, 2, "mirrored") == ["two", "two"]
    for result in replicas(second, 2, "parameter_server", servers=1):
        assert "a second model under parameter_server" in result
