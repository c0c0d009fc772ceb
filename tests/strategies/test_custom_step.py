"""Steps of the user's own inside of `fit`: as plain torch computes them, under any strategy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import spartito as sp
from spartito.errors import UserError
from tests.replicas import ReplicaError, Replicas
from tests.strategies import step_jobs
from tests.strategies.jobs import blobs, mlp
from tests.strategies.test_contracts import Case, close, each_of, run

CASES: list[Case] = [
    ("one_device", 1, {}),
    ("mirrored", 3, {}),
    ("mirrored", 2, {"communication": "ddp"}),
    ("sharded", 2, {"zero": 3, "block_bytes": 100}),
    ("mesh", 4, {"mesh": {"data": 2, "model": 2}}),
    ("local_sgd", 3, {"groups": 1, "every": 3, "outer": {"lr": 1.0, "momentum": 0.0}}),
    ("parameter_server", 2, {"max_staleness": 0, "servers": {"min_shard_bytes": 16}}),
]


@each_of(CASES)
def test_a_penalty_of_gradients(replicas: Replicas, case: Case) -> None:
    found, expected = run(replicas, case, step_jobs.fit), step_jobs.by_torch()
    if case[0] == "parameter_server":
        expected["norm"] = []
    close(found, expected)


def test_servers_know_no_norm(replicas: Replicas) -> None:
    with pytest.raises(ReplicaError, match="whose servers make the updates"):
        replicas(step_jobs.with_norm, 2, "parameter_server", {}, servers=1)


@each_of(CASES)
def test_a_lightning_module(replicas: Replicas, case: Case) -> None:
    found = run(replicas, case, step_jobs.lightning)
    close({name: found[name] for name in step_jobs.lightning_by_torch()},
          step_jobs.lightning_by_torch())  # fmt: skip


@each_of([case for case in CASES if case[0] != "parameter_server"])
def test_a_rate_is_found_and_nothing_is_changed(replicas: Replicas, case: Case) -> None:
    found = run(replicas, case, step_jobs.find_rate)
    assert found["moved"] == 0
    assert found["lr"] == 0.1
    assert found["again"] == pytest.approx(step_jobs.fitted_twice(), abs=1e-12)
    assert found["rates"][0] == pytest.approx(1e-4)
    assert len(found["rates"]) == len(found["losses"]) < 30  # it ended when the loss grew
    assert 1e-3 < found["suggestion"] < 10


def test_a_model_is_called_as_it_is_outside_of_fit() -> None:
    net: Any = mlp()
    trainer = sp.Trainer(net, optimizer=step_jobs.tuned, train_step=step_jobs.penalized)
    x, y = blobs(8)
    trainer.fit((x, y), verbose=0)
    assert torch.equal(trainer.model(x), net(x))
    assert trainer.evaluate((x, y))["loss"] > 0


def test_a_step_gets_a_batch_of_one_part_as_a_loader_gives_it() -> None:
    seen: list[Any] = []

    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        seen.append(batch)
        (x,) = batch
        loss: torch.Tensor = model(x).square().mean()
        return loss

    data = torch.utils.data.TensorDataset(blobs(8)[0])
    trainer = sp.Trainer(mlp(), optimizer=step_jobs.tuned, train_step=step)
    trainer.fit(torch.utils.data.DataLoader(data, batch_size=8), verbose=0)
    trainer.evaluate(torch.utils.data.DataLoader(data, batch_size=8))
    assert len(seen) >= 2
    assert {type(batch) for batch in seen} == {tuple}


class ByHand(step_jobs.Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Several(step_jobs.Classifier):
    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.parameters(), 0.1), torch.optim.SGD(self.parameters(), 0.2)]


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (ByHand, {}, "automatic_optimization"),
        (Several, {}, "2 optimizers"),
        (mlp, {"train_step": step_jobs.penalized, "loss": nn.MSELoss()}, "leave loss= out"),
        (mlp, {"eval_step": step_jobs.penalized}, "without train_step"),
        (mlp, {"train_step": 3}, "no function"),
    ],
)
def test_what_cannot_be(model: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        sp.Trainer(model(), **options)
