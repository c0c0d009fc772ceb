"""Gradients that a user clips by hand, with torch's functions: as on one device, or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, clip_grads_with_norm_

import spartito as sp
from tests.replicas import Replicas

CLIPS: dict[str, Callable[[list[nn.Parameter]], Any]] = {
    "norm": lambda parameters: clip_grad_norm_(parameters, 0.05),
    "value": lambda parameters: clip_grad_value_(iter(parameters), 0.01),
    "given norm": lambda parameters: clip_grads_with_norm_(parameters, 0.05, torch.tensor(0.2)),
}
Found = tuple[str, list[Tensor]]


def made() -> tuple[nn.Module, torch.optim.Optimizer, Tensor, Tensor]:
    """A model in fp64, and examples that are not alike on all replicas."""
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    x = torch.randn(24, 4, dtype=torch.float64) * torch.arange(1, 25)[:, None] / 8
    return net, torch.optim.AdamW(net.parameters(), 0.05), x, torch.arange(24) % 3


def void(_: object) -> None:
    """What torch lets a hook return."""


def by_torch(clip: str) -> list[Tensor]:
    """The parameters that a loop of plain torch ends with, on one device."""
    net, optimizer, x, y = made()
    for start in range(0, 24, 8):
        optimizer.zero_grad()
        F.cross_entropy(net(x[start : start + 8]), y[start : start + 8]).backward()
        CLIPS[clip](list(net.parameters()))
        optimizer.step()
    return [parameter.detach() for parameter in net.parameters()]


def by_hand(clip: str, where: str, strategy: str, options: dict[str, Any]) -> Found:
    """What clipping in a loop, or in a hook of the optimizer, ends with."""
    net, optimizer, x, y = made()
    parameters = list(net.parameters())
    with sp.strategy(strategy, **options) as chosen:
        model, _ = chosen.prepare(net, optimizer)
        if where == "hook":
            optimizer.register_step_pre_hook(lambda *_: void(CLIPS[clip](parameters)))
        try:
            for batch in chosen.distribute(sp.data.arrays(x, y).batch(8)):
                chosen.backward(F.cross_entropy(model(batch.x), batch.y, reduction="none"), batch)
                if where == "loop":
                    CLIPS[clip](parameters)
                chosen.update(optimizer)
        except sp.UserError as error:
            return str(error), []
    ended = [parameter.detach().clone() for parameter in parameters]
    net(x).sum().backward()  # of the user's own: nothing of the strategy's waits
    CLIPS[clip](parameters)
    return "", ended


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("strategy", ["mirrored", "multi_worker_mirrored", "central_storage"])
def test_clipping_before_the_sum_is_refused(replicas: Replicas, strategy: str, clip: str) -> None:
    for refused, _ in replicas(by_hand, 2, clip, "loop", strategy, {}):
        assert "before the gradients of all replicas are summed" in refused
        assert "clip_norm=" in refused


@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        ("sharded", {"copies": 2}),
        ("mesh", {"mesh": {"data": 2}}),
        ("mirrored", {"communication": "ddp"}),
    ],
)
def test_and_by_other_ways_to_sum(
    replicas: Replicas, strategy: str, options: dict[str, Any]
) -> None:
    for refused, _ in replicas(by_hand, 2, "value", "loop", strategy, options):
        assert "before the gradients of all replicas are summed" in refused


@pytest.mark.parametrize(("options", "text"), [({"max_staleness": 0}, "are summed"), ({}, "")])
def test_a_push_on_its_own_may_be_clipped(
    replicas: Replicas, options: dict[str, Any], text: str
) -> None:
    for refused, _ in replicas(by_hand, 2, "norm", "loop", "parameter_server", options, servers=1):
        assert text in refused
        assert bool(text) == bool(refused)


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize(
    ("strategy", "options"),
    [("mirrored", {}), ("multi_worker_mirrored", {}), ("mirrored", {"communication": "ddp"})],
    ids=["mirrored", "multi_worker_mirrored", "ddp"],
)
def test_a_hook_clips_the_sum_as_plain_torch_does(
    replicas: Replicas, strategy: str, options: dict[str, Any], clip: str
) -> None:
    for refused, parameters in replicas(by_hand, 2, clip, "hook", strategy, options):
        assert not refused
        torch.testing.assert_close(parameters, by_torch(clip), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("strategy", ["one_device", "mirrored", "central_storage"])
def test_one_replica_clips_as_it_likes(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for clip in CLIPS:
        refused, parameters = by_hand(clip, "loop", strategy, {})
        assert not refused
        torch.testing.assert_close(parameters, by_torch(clip), rtol=1e-12, atol=1e-13)


class ClipsInCallback(sp.Callback):
    """Clips after every batch, of which two make an update."""

    def on_train_batch_end(self, batch: int, logs: Any) -> None:
        clip_grad_norm_(self.trainer.model.parameters(), 0.05)


def in_fit(accumulate: int) -> str:
    """What clipping in a callback ends with."""
    net, optimizer, x, y = made()
    with sp.strategy("mirrored") as strategy:
        trainer = sp.Trainer(
            net,
            optimizer=optimizer,
            loss=nn.CrossEntropyLoss(),
            strategy=strategy,
            accumulate=accumulate,
        )
        try:
            trainer.fit(
                sp.data.arrays(x, y).batch(8), epochs=1, verbose=0, callbacks=[ClipsInCallback()]
            )
        except sp.UserError as error:
            return str(error)
    return "nothing to clip"


def test_callbacks_find_gradients_only_between_the_batches_of_an_update(
    replicas: Replicas,
) -> None:
    assert replicas(in_fit, 2, 1) == ["nothing to clip"] * 2
    for refused in replicas(in_fit, 2, 2):
        assert "before the gradients of all replicas are summed" in refused
