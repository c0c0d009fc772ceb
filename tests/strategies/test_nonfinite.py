"""Updates that are not finite: left out on all tasks, as if they had never been computed."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import spartito as sp
from spartito.training.nonfinite import IN_A_ROW
from tests.replicas import ReplicaError, Replicas
from tests.strategies.jobs import make_strategy, weights

BAD = {3: math.nan, 4: math.inf}
"""The global steps of which one example is so, each in another task's part."""
STEPS, ROWS = 8, 6


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    return net, torch.optim.AdamW(net.parameters(), 0.05)


def examples(bad: bool) -> tuple[Tensor, Tensor]:
    torch.manual_seed(2)
    x, y = torch.randn(STEPS * ROWS, 4, dtype=torch.float64), torch.arange(STEPS * ROWS) % 3
    for step, value in BAD.items() if bad else ():
        x[step * ROWS + (0 if step % 2 else ROWS - 1), 1] = value
    return x, y


def by_torch() -> dict[str, Tensor]:
    """Plain torch on one device, which passes over these batches."""
    net, optimizer = made()
    x, y = examples(bad=True)
    for step in range(STEPS):
        if step not in BAD:
            part = slice(step * ROWS, (step + 1) * ROWS)
            optimizer.zero_grad()
            F.cross_entropy(net(x[part]), y[part]).backward()
            optimizer.step()
    return net.state_dict()


def trained(
    strategy: str, choice: str, options: dict[str, Any], clip_norm: float | None = None
) -> tuple[dict[str, Tensor], list[float], int, int]:
    """The weights, the losses of the epoch, the updates left out, and the last step."""
    net, optimizer = made()
    with make_strategy(strategy, **options) as chosen:
        trainer = sp.Trainer(
            net, optimizer=optimizer, loss=nn.CrossEntropyLoss(), strategy=chosen,
            on_nonfinite=choice, clip_norm=clip_norm,
        )  # fmt: skip
        data = sp.data.arrays(*examples(bad=True)).batch(ROWS)
        history = trainer.fit(data, epochs=1, verbose=False)
        losses, skipped = history.history.get("loss", []), chosen.coordination.skipped
        return weights(chosen, net), losses, skipped, trainer.step


@pytest.mark.parametrize(
    ("strategy", "world_size", "options"),
    [
        ("one_device", 1, {}),
        ("mirrored", 2, {}),
        ("multi_worker_mirrored", 2, {"communication": "sockets"}),
        ("mirrored", 2, {"communication": "ddp"}),
        ("sharded", 2, {}),
        ("central_storage", 2, {}),
        ("mesh", 2, {"model": 2}),
        ("pipeline", 2, {"microbatches": 3}),
    ],
)
def test_what_is_not_finite_changes_nothing_anywhere(
    replicas: Replicas, strategy: str, world_size: int, options: dict[str, Any]
) -> None:
    found = replicas(trained, world_size, strategy, "skip", options)
    wanted = by_torch()
    for values, losses, _, _ in found:
        for name, value in wanted.items():
            assert torch.allclose(values[name], value, rtol=0, atol=1e-12), name
        assert all(map(math.isfinite, losses))
    assert found[0][2:] == (len(BAD), STEPS)


def test_with_clipping_too_and_without_it_all_is_lost(replicas: Replicas) -> None:
    for clip_norm in (None, 1e9):
        for choice, finite in (("skip", True), ("ignore", False)):
            for values, *_ in replicas(trained, 2, "mirrored", choice, {}, clip_norm=clip_norm):
                assert all(value.isfinite().all() for value in values.values()) == finite


def test_training_stops_where_that_is_asked_for(replicas: Replicas) -> None:
    for values, _, skipped, step in replicas(trained, 2, "mirrored", "stop", {}):
        assert (skipped, step) == (2, 5)  # the step after the first one is the last
        assert all(value.isfinite().all() for value in values.values())


def statistics() -> list[Tensor]:
    """The running statistics of BatchNorm after a batch that is not finite."""
    net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    with make_strategy("mirrored") as chosen:
        trainer = sp.Trainer(
            net, optimizer=torch.optim.SGD(net.parameters(), 0.1), loss=nn.CrossEntropyLoss(),
            strategy=chosen, on_nonfinite="skip",
        )  # fmt: skip
        x, y = examples(bad=True)
        trainer.fit((x.float(), y), batch_size=ROWS, verbose=False)
        return [buffer.clone() for buffer in net.buffers()]


def test_statistics_stay_finite_too(replicas: Replicas) -> None:
    for buffers in replicas(statistics, 2):
        assert all(buffer.isfinite().all() for buffer in buffers)
        assert buffers[-1] == STEPS - len(BAD)


def hopeless() -> None:
    net, optimizer = made()
    x = torch.full((ROWS, 4), math.nan, dtype=torch.float64)
    with make_strategy("mirrored") as chosen:
        trainer = sp.Trainer(
            net, optimizer=optimizer, loss=nn.CrossEntropyLoss(), strategy=chosen,
            on_nonfinite="skip",
        )  # fmt: skip
        trainer.fit(
            (x, torch.arange(ROWS) % 3), batch_size=ROWS, epochs=2 * IN_A_ROW, verbose=False
        )


def test_training_that_makes_no_progress_ends(replicas: Replicas) -> None:
    with pytest.raises(ReplicaError, match=f"no update of the last {IN_A_ROW} had a finite loss"):
        replicas(hopeless, 2)


def test_a_choice_that_is_unknown_is_refused() -> None:
    with pytest.raises(sp.UserError, match="on_nonfinite='skipp'") as refused:
        sp.Trainer(nn.Linear(1, 1), on_nonfinite="skipp")
    assert "'skip'" in str(refused.value)
