"""What is not finite in one group stays there: the numbers are those of plain torch."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import spartito as sp
from spartito.training.fitting.nonfinite import IN_A_ROW
from tests.replicas import Replicas, warns
from tests.strategies.jobs import blobs, make_strategy, mlp, weights
from tests.strategies.test_contracts import close

ROWS, STEPS, EPOCHS, EVERY = 8, 5, 2, 2
BAD = {1: ROWS - 1, 2: 0}
"""Rows that are not finite, by the steps of an epoch: in the second group's part, the first's."""
POISONED = 3
"""After so many steps the second group's model is not finite."""

Outcome = dict[str, Any]


def examples() -> tuple[Tensor, Tensor]:
    x, y = blobs(ROWS * STEPS)
    for step, row in BAD.items():
        x[step * ROWS + row, 1] = math.nan if step % 2 else math.inf
    return x, y


def spoil(net: nn.Module) -> None:
    with torch.no_grad():
        next(net.parameters()).view(-1)[0] = math.inf


@warns("loss or gradients")
def trained(
    options: dict[str, Any],
    members: list[int],
    poisons: bool,
    choice: str,
    path: str = "",
    at: int = 0,
) -> Outcome:
    """It is saved after ``at`` steps; 0: goes on from there, if there is a ``path``."""
    strategy = make_strategy("local_sgd", **{"every": EVERY, **options})
    net = mlp()

    class Poison(sp.Callback):
        def on_train_batch_end(self, batch: int, logs: Any) -> None:
            if poisons and trainer.step == POISONED and strategy.cluster.rank in members:
                spoil(net)
            if trainer.step == at:
                trainer.save(path)

    trainer = sp.Trainer(
        net, optimizer=torch.optim.AdamW(net.parameters(), 0.02), loss=nn.CrossEntropyLoss(),
        strategy=strategy, on_nonfinite=choice,
    )  # fmt: skip
    if path and not at:
        trainer.load(path)
    history = trainer.fit(
        sp.data.arrays(*examples()).batch(ROWS), epochs=EPOCHS, callbacks=[Poison()], verbose=0
    )
    found = {
        "loss": history.history["loss"],
        "skipped": history.history["skipped"],
        "weights": weights(strategy, net),
        "step": trainer.step,
    }
    strategy.close()
    return found


def by_torch(poisons: bool) -> Outcome:
    """Two groups, each of which passes over what is not finite."""
    x, y = examples()
    start = mlp()
    nets = [copy.deepcopy(start) for _ in range(2)]
    optimizers = [torch.optim.AdamW(net.parameters(), 0.02) for net in nets]
    found: Outcome = {"loss": [], "skipped": [], "step": EPOCHS * STEPS}

    def meet() -> None:
        shares = [
            count if all(p.isfinite().all() for p in net.parameters()) else 0
            for net, count in zip(nets, eaten, strict=True)
        ]
        with torch.no_grad():
            for own, *theirs in zip(
                start.parameters(), *(n.parameters() for n in nets), strict=True
            ):
                if sum(shares):
                    parts = [s * t for s, t in zip(shares, theirs, strict=True) if s]
                    own.copy_(sum(parts, torch.zeros_like(own)) / sum(shares))
                for value in theirs:
                    value.copy_(own)
        eaten[:] = [0, 0]

    for epoch in range(EPOCHS):
        total, counted, skipped, eaten = 0.0, 0, 0, [0, 0]
        for step in range(STEPS):
            for g, (net, optimizer) in enumerate(zip(nets, optimizers, strict=True)):
                rows = slice(step * ROWS + g * ROWS // 2, step * ROWS + (g + 1) * ROWS // 2)
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(net(x[rows]), y[rows])
                loss.backward()
                if not math.isfinite(loss.item()):
                    skipped += 1
                    continue
                optimizer.step()
                total += loss.item() * (ROWS // 2)
                counted += ROWS // 2
                eaten[g] += ROWS // 2
            if (step + 1) % EVERY == 0:
                meet()
            if poisons and epoch * STEPS + step + 1 == POISONED:
                spoil(nets[1])
        meet()
        found["loss"].append(total / counted)
        found["skipped"].append(skipped)
    return {**found, "weights": {name: value.clone() for name, value in start.state_dict().items()}}


@pytest.mark.parametrize(
    ("options", "members"),
    [
        ({"groups": 2}, [1]),
        pytest.param({"groups": [[0, 1], [2, 3]]}, [2, 3], marks=pytest.mark.slow),
        pytest.param({"groups": 2, "inside": "sharded"}, [2, 3], marks=pytest.mark.slow),
    ],
    ids=str,
)
@pytest.mark.parametrize("poisons", [False, True])
def test_a_group_leaves_out_what_is_its_own(
    replicas: Replicas, options: dict[str, Any], members: list[int], poisons: bool
) -> None:
    count = 2 * len(members)
    found = replicas(trained, count, options, members, poisons, "skip")
    expected = by_torch(poisons)
    for each in found:
        close(each, expected)


@pytest.mark.slow
def test_a_resumed_epoch_has_counted_those_of_all_groups(
    replicas: Replicas, tmp_path: Path
) -> None:
    """Saved after the third step: each group has left one out, between two meetings."""
    given = {"groups": 2}, [1], False, "skip", str(tmp_path / "saved")
    expected = by_torch(False)
    for at in (3, 0):
        for each in replicas(trained, 2, *given, at):
            close(each, expected)


@pytest.mark.slow
def test_groups_of_sites_leave_out_what_is_their_own(replicas: Replicas) -> None:
    """A model that is not finite stays out of its site's meeting; all is finite in the end."""
    options = {"groups": 4, "sites": 2, "every": [1, 2]}
    for each in replicas(trained, 4, options, [2], True, "skip"):
        assert all(value.isfinite().all() for value in each["weights"].values())
        assert each["skipped"] == [3, 2]  # with the one that it could not compute
        assert all(map(math.isfinite, each["loss"]))


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"overlap": 1},
        {"mixing": 0.5},
        {"fragments": 2, "compress": "4bit"},
        {"outer": "diloco", "overlap": 1, "compress": "topk:0.5"},
    ],
    ids=str,
)
def test_a_model_that_is_not_finite_is_so_until_its_meeting(
    replicas: Replicas, options: dict[str, Any]
) -> None:
    for each in replicas(trained, 2, {"groups": 2, **options}, [1], True, "skip"):
        assert all(value.isfinite().all() for value in each["weights"].values())
        assert all(map(math.isfinite, each["loss"]))
        assert each["skipped"][1] == 2  # none but what is not finite in the data


def test_an_end_is_asked_for_at_the_next_meeting(replicas: Replicas) -> None:
    """The second group has a bad row in the second step, after which all meet."""
    for each in replicas(trained, 2, {"groups": 2}, [1], False, "stop"):
        assert each["step"] == 4
        assert all(value.isfinite().all() for value in each["weights"].values())


@warns("loss or gradients", "every=")
def hopeless() -> str:
    x, y = blobs(ROWS)
    x[ROWS // 2 :] = math.nan  # all that the second group has
    net = mlp()
    with make_strategy("local_sgd", groups=2, every=4 * IN_A_ROW) as strategy:
        trainer = sp.Trainer(
            net, optimizer=torch.optim.SGD(net.parameters(), 0.1), loss=nn.CrossEntropyLoss(),
            strategy=strategy, on_nonfinite="skip",
        )  # fmt: skip
        data = sp.data.arrays(x, y).batch(ROWS)
        try:
            trainer.fit(data, epochs=2 * IN_A_ROW, verbose=0)
        except (sp.UserError, sp.TaskLostError) as error:
            return f"{type(error).__name__}: {error}"
    return ""


def test_a_group_that_makes_no_progress_ends_the_training(replicas: Replicas) -> None:
    first, second = replicas(hopeless, 2)
    assert first.startswith("TaskLostError: worker 1")
    assert second.startswith(f"UserError: no update of the last {IN_A_ROW} had a finite loss")
