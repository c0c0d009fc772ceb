"""Weights of examples and classes, steps that end a training: as plain torch has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import spartito as sp
from spartito.data.reading.stretch import stretch
from spartito.errors import UserError
from tests.replicas import Replicas
from tests.strategies import weighted_jobs
from tests.strategies.jobs import blobs, mlp
from tests.strategies.test_contracts import Case, close, each_of, run

CASES: list[Case] = [
    ("one_device", 1, {}),
    ("mirrored", 3, {}),
    ("sharded", 2, {"zero": 3, "block_bytes": 100}),
    ("pipeline", 2, {"microbatches": 3}),
    ("parameter_server", 2, {"max_staleness": 0, "servers": {"min_shard_bytes": 16}}),
]
FORMS = [
    ("mean", "third"), ("mean", "argument"), ("mean", "classes"), ("weighted", "third"),
    ("each", "classes"), ("elements", "argument"),
]  # fmt: skip


@each_of(CASES)
def test_weights_are_those_of_plain_torch(replicas: Replicas, case: Case) -> None:
    for loss, given in FORMS if case[0] in ("one_device", "mirrored") else FORMS[2:4]:
        found = run(replicas, case, weighted_jobs.fit, loss=loss, given=given)
        close(found, weighted_jobs.by_torch(loss, given))


@each_of(CASES)
def test_training_ends_with_a_step(replicas: Replicas, case: Case) -> None:
    exact = case[0] != "parameter_server"
    for most, accumulate in ((6, 1), (3, 3), (4, 2)):
        found = run(replicas, case, weighted_jobs.end, most=most, accumulate=accumulate)
        assert most <= found["steps"] <= (most if exact else most + 4)
        assert found["again"] == found["steps"]
        if exact:
            per_epoch = -(-4 // accumulate)
            assert found["epochs"] == [*range(-(-most // per_epoch))]
            assert len(found["val"]) == len(found["epochs"])


@each_of(CASES[:-1])
def test_what_is_left_of_an_epoch_that_was_cut_belongs_to_it(
    replicas: Replicas, case: Case, tmp_path: Path
) -> None:
    cut, whole = (
        run(replicas, case, weighted_jobs.go_on, folder=str(tmp_path / name), most=most)
        for name, most in (("cut", [3, 7, 10, 14]), ("whole", []))
    )
    assert (whole["epoch"], whole["steps"]) == (4, 20)
    close(cut, whole)


def test_no_epoch_is_cut_short_under_servers(replicas: Replicas, tmp_path: Path) -> None:
    """Some batches may come twice: what was pushed of a lease that was not done."""
    given = weighted_jobs.go_on, 1, *(CASES[-1][0], CASES[-1][2], str(tmp_path), [3, 7, 10, 14])
    (found,) = replicas(*given, servers=1)
    assert found["epoch"] == 4
    assert found["steps"] >= 20


def test_steps_go_on_after_an_epoch_that_was_cut(tmp_path: Path) -> None:
    x, y = blobs(20)

    def trainer() -> sp.Trainer:
        return sp.Trainer(
            mlp(), optimizer=lambda p: torch.optim.SGD(p, 0.1), loss=nn.CrossEntropyLoss()
        )

    first, second = trainer(), trainer()
    first.fit((x, y), batch_size=4, max_steps=3, verbose=0)
    first.save(tmp_path / "saved")
    second.load(tmp_path / "saved")
    for each in (first, second):
        each.fit((x, y), batch_size=4, max_steps=12, verbose=0)
        assert each.step == 12


def test_the_last_examples_validate() -> None:
    x, y = blobs(20)
    trainer = sp.Trainer(
        mlp(), optimizer=lambda p: torch.optim.SGD(p, 0.0001), loss=nn.CrossEntropyLoss()
    )
    data = sp.data.arrays(x, y).batch(3, drop_remainder=True)
    history = trainer.fit(data, validation_split=0.25, verbose=0)  # of 5 rows none is left out
    figures = trainer.evaluate((x[15:], y[15:]))
    assert history.history["val_loss"] == [pytest.approx(figures["loss"], abs=1e-12)]
    assert trainer.examples == 15


def test_classes_weigh_where_one_trains_alone() -> None:
    x, y = blobs(20)
    trainer = sp.Trainer(
        mlp(), optimizer=lambda p: torch.optim.SGD(p, 0.1), loss=nn.CrossEntropyLoss()
    )
    of_classes = {0: 0.1, 1: 3.0, 2: 0.7}
    trainer.fit((x, y), validation_split=0.25, class_weight=of_classes, epochs=0, verbose=0)
    net = mlp()
    weights = torch.tensor([*of_classes.values()], dtype=torch.float64)[y[:15]]
    losses = nn.functional.cross_entropy(net(x[:15]), y[:15], reduction="none") * weights
    found = trainer.fit((x, y), validation_split=0.25, class_weight=of_classes, verbose=0).history
    assert found["loss"] == [pytest.approx(losses.mean().item(), abs=1e-12)]
    figures = trainer.evaluate((x[15:], y[15:]))
    assert found["val_loss"] == [pytest.approx(figures["loss"], abs=1e-12)]


class Rows(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 9

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([float(index)]), index


def test_a_stretch_reads_as_its_source_does() -> None:
    for source in (Rows(), sp.data.arrays(torch.arange(9.0)[:, None], torch.arange(9)).source):
        part = stretch(source, 2, 7)  # type: ignore[arg-type]
        assert len(part) == 5
        assert [int(part[i][1]) for i in range(5)] == [2, 3, 4, 5, 6]
    gathered: Any = part
    assert gathered.gather(torch.tensor([4, 0]))[1].tolist() == [6, 2]
    assert gathered.gather(slice(1, 3))[1].tolist() == [3, 4]


BAD: list[tuple[dict[str, Any], str]] = [
    ({"validation_split": 1.5}, "between 0 and 1"),
    ({"validation_split": 20}, "between 0 and 1"),
    ({"validation_split": 0.01}, "without any"),
    ({"validation_split": 0.5, "validation_data": blobs(4)}, "Give one"),
    ({"class_weight": [1, 2]}, "Numbers by class"),
    ({"class_weight": {0: 1.0}}, "nothing for class"),
    ({"class_weight": {}}, "Numbers by class"),
    ({"class_weight": {0: 1.0, 1: 2.0, 2: 1.0, -1: 0.0}}, "Numbers by class"),
    ({"sample_weight": torch.ones(3, 2)}, "one number per example"),
    ({"sample_weight": torch.ones(3)}, "one row per example"),
    ({"max_steps": 0}, "steps 1 or more"),
    ({"max_steps": 1.5}, "whole number"),
]


@pytest.mark.parametrize(("options", "message"), BAD, ids=[str(each[0])[:30] for each in BAD])
def test_what_cannot_be(options: dict[str, Any], message: str) -> None:
    trainer = sp.Trainer(
        mlp(), optimizer=lambda p: torch.optim.SGD(p, 0.1), loss=nn.CrossEntropyLoss()
    )
    with pytest.raises(UserError, match=message):
        trainer.fit(blobs(12), verbose=0, **options)


def test_weights_that_a_loss_cannot_use() -> None:
    x, y = blobs(12)
    trainer = sp.Trainer(
        mlp(), optimizer=lambda p: torch.optim.SGD(p, 0.1),
        loss=lambda out, y: nn.functional.cross_entropy(out, y),
    )  # fmt: skip
    with pytest.raises(UserError, match="one loss per example"):
        trainer.fit((x, y, torch.ones(12)), verbose=0)
    with pytest.raises(UserError, match="a floating number"):
        trainer.fit((x, y, torch.ones(12).long()), verbose=0)
    with pytest.raises(UserError, match="a floating number"):
        trainer.fit((x, y, torch.ones(12), torch.ones(12)), verbose=0)
