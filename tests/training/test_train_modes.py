"""Train mode and eval mode are as the user has set them, in fit and after evaluations."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import spartito as sp
from spartito.training.fitting.train_modes import Modes, evaluating, without_dropout
from tests.replicas import Replicas

DATA = torch.randn(22, 4, generator=torch.Generator().manual_seed(2)).double()
TARGETS = torch.arange(22) % 3


class Net(nn.Module):
    """A backbone with BatchNorm and dropout, and a head that learns."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.backbone = nn.Sequential(
            nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Tanh()
        )
        self.head = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.backbone(x))
        return out


class Freezing(Net):
    """What many write: its own ``train()`` keeps the backbone's statistics."""

    def train(self, mode: bool = True) -> Freezing:
        super().train(mode)
        self.backbone.eval()
        return self


def frozen() -> Net:
    net = Net()
    net.backbone.requires_grad_(False).eval()
    return net


def by_torch() -> dict[str, Tensor]:
    net = frozen()
    optimizer = torch.optim.SGD(net.head.parameters(), 0.1)
    for _ in range(2):
        for x, y in zip(DATA.split(8), TARGETS.split(8), strict=True):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x), y).backward()
            optimizer.step()
    return net.state_dict()


def trained(whole_eval: bool = False) -> dict[str, Any]:
    net = frozen()
    if whole_eval:  # only the head is put back: the root is not in train mode
        net.eval()
        net.head.train()
    strategy = sp.strategy()
    trainer = sp.Trainer(
        net,
        optimizer=lambda _: torch.optim.SGD(net.head.parameters(), 0.1),
        loss=nn.CrossEntropyLoss(),
        strategy=strategy,
        deterministic=True,
    )
    data = sp.data.arrays(DATA, TARGETS).batch(8)
    trainer.fit(data, epochs=1, validation_data=data, verbose=0)
    trainer.predict(data)
    trainer.fit(data, epochs=1, validation_data=data, verbose=0)
    strategy.close()
    found = {name: value.clone() for name, value in net.state_dict().items()}
    return {"state": found, "modes": [part.training for part in (net, net.backbone, net.head)]}


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("whole_eval", [False, True])
def test_a_frozen_backbone_stays_in_eval_mode(
    replicas: Replicas, workers: int, whole_eval: bool
) -> None:
    expected = by_torch()
    for found in replicas(trained, workers, whole_eval):
        assert found["modes"] == [not whole_eval, False, True]
        for name, value in found["state"].items():
            torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-12)


def modes(model: nn.Module) -> list[bool]:
    return [module.training for module in model.modules()]


def test_a_model_that_is_all_in_eval_mode_trains() -> None:
    kept, net = Modes(), Net()
    net.eval()
    kept.begin(net, False)
    assert all(modes(net))
    net.backbone.eval()
    kept.begin(net, False)
    chosen = modes(net)
    assert not all(chosen)
    net.eval()  # as a callback may leave it
    kept.begin(net, False)
    assert modes(net) == chosen
    net.backbone.train()
    kept.begin(net, False)
    assert all(modes(net))


def test_a_models_own_train_decides_too() -> None:
    kept, net = Modes(), Freezing()
    assert all(modes(net))
    kept.begin(net, False)
    assert not net.backbone.training
    assert net.head.training
    net.head[1].eval()
    kept.begin(net, False)
    assert [part.training for part in net.head] == [True, False, True]
    assert not net.backbone.training


def test_an_evaluation_gives_each_module_its_mode_back() -> None:
    net = frozen()
    before = modes(net)
    with evaluating(net):
        assert not any(modes(net))
        assert not torch.is_grad_enabled()
    assert modes(net) == before


def test_dropout_that_stays_off_in_a_part_that_learns_is_told_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert without_dropout(frozen()) == ""
    net, kept = Net(), Modes()
    net.backbone.eval()
    with caplog.at_level(logging.WARNING, "spartito"):
        kept.begin(net, True)
        kept.begin(net, True)
    (record,) = caplog.records
    assert record.getMessage().startswith("backbone learns in eval mode")
    net.backbone.train()[1].eval()  # BatchNorm alone
    assert without_dropout(net) == ""
