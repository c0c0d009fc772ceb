"""Updates that are not finite: left out on all tasks, as if they had never been computed."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import ExponentialLR

import spartito as sp
from spartito.training.fitting.nonfinite import GOES_BACK, IN_A_ROW
from tests.replicas import ReplicaError, Replicas, warns
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


@warns("loss or gradients", "the loss of this epoch is nan")
def trained(
    strategy: str, choice: str, options: dict[str, Any], clip_norm: float | None = None
) -> tuple[dict[str, Tensor], dict[str, list[Any]], int, int]:
    """The weights, the figures of the epoch, the updates left out, and the last step."""
    net, optimizer = made()
    with make_strategy(strategy, **options) as chosen:
        trainer = sp.Trainer(
            net, optimizer=optimizer, loss=nn.CrossEntropyLoss(), strategy=chosen,
            on_nonfinite=choice, clip_norm=clip_norm,
        )  # fmt: skip
        data = sp.data.arrays(*examples(bad=True)).batch(ROWS)
        history = trainer.fit(data, epochs=1, verbose=False)
        return weights(chosen, net), history.history, trainer.skips.total, trainer.step


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
    for values, figures, skipped, step in found:
        assert (skipped, step) == (len(BAD), STEPS)
        assert figures["skipped"] == [len(BAD)]
        for name, value in wanted.items():
            assert torch.allclose(values[name], value, rtol=0, atol=1e-12), name
        assert all(map(math.isfinite, figures["loss"]))


def test_with_clipping_too_and_without_it_all_is_lost(replicas: Replicas) -> None:
    for clip_norm in (None, 1e9):
        for choice, finite in (("skip", True), ("ignore", False)):
            came = replicas(trained, 2, "mirrored", choice, {}, clip_norm=clip_norm)
            for values, figures, *_ in came:
                assert ("skipped" in figures) == (choice == "skip")
                assert all(value.isfinite().all() for value in values.values()) == finite


def test_training_stops_where_that_is_asked_for(replicas: Replicas) -> None:
    for values, _, skipped, step in replicas(trained, 2, "mirrored", "stop", {}):
        assert (skipped, step) == (2, 5)  # the step after the first one is the last
        assert all(value.isfinite().all() for value in values.values())


@warns("loss or gradients")
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


@warns("loss or gradients")
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


@warns("loss or gradients")
def goes_on(folder: str) -> tuple[list[Any], list[Any], dict[str, int]]:
    """The updates left out, of a training and of one that goes on in the middle of its epochs."""

    class Save(sp.Callback):
        def on_train_batch_end(self, batch: int, logs: Any) -> None:
            self.trainer.save(f"{folder}/{self.trainer.step}")

    figures = []
    with make_strategy("mirrored") as chosen:
        net, optimizer = made()
        trainer = sp.Trainer(
            net, optimizer=optimizer, loss=nn.CrossEntropyLoss(), strategy=chosen,
            on_nonfinite="skip",
        )  # fmt: skip
        data = sp.data.arrays(*examples(bad=True)).batch(ROWS)
        figures.append(trainer.fit(data, epochs=2, callbacks=[Save()], verbose=False))
        for step in (4, 12):
            trainer.load(f"{folder}/{step}")
            figures.append(trainer.fit(data, epochs=2, verbose=False))
        whole, *parts = (history.history["skipped"] for history in figures)
        return whole, parts, trainer.skips.state_dict()


def test_the_count_goes_on_with_a_checkpoint(replicas: Replicas, tmp_path: Path) -> None:
    count = len(BAD)
    for whole, parts, state in replicas(goes_on, 2, str(tmp_path)):
        assert whole == [count, count]
        assert parts == [[count, count], [count]]
        assert state == {"epoch": 0, "row": 0, "total": 2 * count, "went_back": 0}


GOOD, EPOCHS, RATE = 4, 16, 0.99


class Drive(sp.Callback):
    """Takes the model to where its loss is not finite, once."""

    trainer: sp.Trainer

    def on_train_batch_end(self, batch: int, logs: Any) -> None:
        if self.trainer.step <= GOOD:
            self.trainer.wait()  # for the backup before, so that the next comes when it is due
        if self.trainer.step == GOOD + 1:
            with torch.no_grad():
                for value in self.trainer.model.parameters():
                    value.fill_(1e308)


@warns("loss or gradients", "no update of the last")
def goes_back(strategy: str, folder: str) -> tuple[dict[str, Tensor], list[int], int]:
    """The weights of a training that goes back once, and the updates left out in each epoch."""
    with make_strategy(strategy) as chosen:
        net, optimizer = made()
        trainer = sp.Trainer(
            net, optimizer=optimizer, loss=nn.CrossEntropyLoss(), strategy=chosen,
            on_nonfinite="skip", scheduler=lambda o: ExponentialLR(o, RATE),
        )  # fmt: skip
        history = trainer.fit(
            sp.data.arrays(*examples(bad=False)).batch(ROWS), epochs=EPOCHS, verbose=False,
            callbacks=[Drive(), sp.callbacks.BackupAndRestore(folder, every=2, share=None)],
        )  # fmt: skip
        return weights(chosen, net), history.history["skipped"], trainer.skips.went_back


@pytest.mark.parametrize("strategy", ["mirrored", "sharded"])
def test_a_model_that_is_lost_goes_back_to_its_backup(
    replicas: Replicas, tmp_path: Path, strategy: str
) -> None:
    net, optimizer = made()
    x, y = examples(bad=False)
    lost = range(GOOD, GOOD + 1 + IN_A_ROW)  # one update more, of which the backup knows nothing
    for step in range(EPOCHS * STEPS):
        if step not in lost:
            optimizer.param_groups[0]["lr"] = 0.05 * RATE**step
            start = step % STEPS * ROWS
            optimizer.zero_grad()
            F.cross_entropy(net(x[start : start + ROWS]), y[start : start + ROWS]).backward()
            optimizer.step()
    for values, skipped, went_back in replicas(goes_back, 2, strategy, str(tmp_path)):
        assert (sum(skipped), went_back) == (IN_A_ROW, 1)
        for name, value in net.state_dict().items():
            assert torch.allclose(values[name], value, rtol=0, atol=1e-12), name


@warns("loss or gradients", "no update of the last")
def in_vain(folder: str) -> tuple[int, int, str]:
    """How often a training goes back whose data are not finite, and where it ends."""
    x = torch.zeros((GOES_BACK + 2) * IN_A_ROW * ROWS, 4, dtype=torch.float64)
    x[GOOD * ROWS :] = math.nan
    with make_strategy("mirrored") as chosen:
        net, optimizer = made()
        trainer = sp.Trainer(
            net, optimizer=optimizer, loss=nn.CrossEntropyLoss(), strategy=chosen,
            on_nonfinite="skip",
        )  # fmt: skip
        try:
            trainer.fit(
                (x, torch.arange(len(x)) % 3), batch_size=ROWS, verbose=False,
                callbacks=sp.callbacks.BackupAndRestore(folder, every=2, share=None),
            )  # fmt: skip
        except sp.UserError as error:
            return trainer.skips.went_back, trainer.step, str(error)
        return 0, 0, ""


def test_training_goes_back_a_few_times_and_then_ends(replicas: Replicas, tmp_path: Path) -> None:
    for went_back, step, why in replicas(in_vain, 2, str(tmp_path)):
        assert (went_back, step) == (GOES_BACK, GOOD + (GOES_BACK + 1) * IN_A_ROW)
        assert f"no update of the last {IN_A_ROW}" in why


def test_a_choice_that_is_unknown_is_refused() -> None:
    with pytest.raises(sp.UserError, match="on_nonfinite='skipp'") as refused:
        sp.Trainer(nn.Linear(1, 1), on_nonfinite="skipp")
    assert "'skip'" in str(refused.value)
