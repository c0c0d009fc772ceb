"""Steps of the user's own inside of `fit`: as plain torch computes them, under any strategy."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
import torchmetrics
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


def test_an_error_of_the_function_is_its_own() -> None:
    def wrong(model: nn.Module, batch: Any) -> Any:
        return model(batch[0]) + "three"

    trainer = sp.Trainer(mlp(), optimizer=step_jobs.tuned, train_step=wrong)
    with pytest.raises(TypeError, match=r"must be Tensor|unsupported operand"):
        trainer.fit(blobs(8), verbose=0)


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


class Frequent(step_jobs.Classifier):
    def configure_optimizers(self) -> Any:
        made = torch.optim.SGD(self.parameters(), 0.1)
        schedule = torch.optim.lr_scheduler.StepLR(made, 1)
        return {"optimizer": made, "lr_scheduler": {"scheduler": schedule, "frequency": 2}}


class Pair(step_jobs.Classifier):
    def configure_optimizers(self) -> Any:
        made = torch.optim.SGD(self.parameters(), 0.1)
        return made, torch.optim.lr_scheduler.StepLR(made, 1)


class Planned(step_jobs.Classifier):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 1 / self.trainer.estimated_stepping_batches)


class Listed(step_jobs.Classifier):
    """Returns predictions of a validation; its schedule is in a list of dicts."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, int, int]] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.seen.append((self.current_epoch, self.global_step, batch_idx))
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("val/loss", nn.functional.cross_entropy(self(batch[0]), batch[1]))
        self.log("val/one", 1.0)
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        made = torch.optim.SGD(self.parameters(), 0.1)
        schedule = torch.optim.lr_scheduler.StepLR(made, 1, 0.5)
        return [{"optimizer": made, "lr_scheduler": {"scheduler": schedule, "monitor": "none"}}]


def test_a_lightning_module_knows_where_it_is() -> None:
    x, y = blobs(step_jobs.EXAMPLES)
    module = Listed()
    trainer = sp.Trainer(module, strategy="one_device")
    data = sp.data.arrays(x, y).batch(21)
    found = trainer.fit(data, epochs=2, validation_data=(x[:9], y[:9]), verbose=0).history
    assert module.seen == [(0, 0, 0), (0, 1, 1), (1, 2, 0), (1, 3, 1)]
    with torch.no_grad():
        expected = nn.functional.cross_entropy(module(x[:9]), y[:9]).item()
    assert found["val_loss"][-1] == pytest.approx(expected, abs=1e-12)
    assert found["val_one"] == [1.0, 1.0]
    assert trainer.optimizer.param_groups[0]["lr"] == 0.025
    assert deepcopy(module)._trainer is None


class Logs(step_jobs.Classifier):
    """Logs what is no mean of numbers, or returns what is no loss.

    Args:
        given: The options of ``self.log``.
    """

    def __init__(self, **given: Any) -> None:
        super().__init__()
        self.given = given

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        if self.given:
            self.log("a", **self.given)
        return self(batch[0])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"value": torchmetrics.MeanMetric()}, "metric with a state"),
        ({"value": 1.0, "reduce_fx": "sum"}, "mean over all examples"),
        ({"value": None}, "no number"),
        ({}, "returns no loss"),
    ],
)
def test_what_lightning_logs_and_cannot_be(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        sp.Trainer(Logs(**given), strategy="one_device").evaluate(blobs(4))


class Several(step_jobs.Classifier):
    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.parameters(), 0.1), torch.optim.SGD(self.parameters(), 0.2)]


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (ByHand, {}, "automatic_optimization"),
        (Several, {}, "2 optimizers"),
        (Frequent, {}, "frequency=2"),
        (Pair, {}, "StepLR where an optimizer is wanted"),
        (Planned, {}, "estimated_stepping_batches"),
        (mlp, {"train_step": step_jobs.penalized, "loss": nn.MSELoss()}, "leave loss= out"),
        (mlp, {"eval_step": step_jobs.penalized}, "without train_step"),
        (mlp, {"train_step": 3}, "no function"),
    ],
)
def test_what_cannot_be(model: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        sp.Trainer(model(), **options)
