from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest

from spartito.errors import UserError
from spartito.training.callbacks import CSVLogger

EPOCHS = [{"loss": 0.5, "accuracy": 0.75}, {"loss": 0.25, "accuracy": 1.0}]


def rows(path: Path) -> list[list[str]]:
    with path.open(newline="") as file:
        return list(csv.reader(file))


def test_a_row_per_epoch_under_a_header(trainer: Any, tmp_path: Path) -> None:
    trainer.fit(CSVLogger(tmp_path / "new" / "log.csv"), epochs=EPOCHS)
    assert rows(tmp_path / "new" / "log.csv") == [
        ["epoch", "loss", "accuracy"],
        ["1", "0.5", "0.75"],
        ["2", "0.25", "1.0"],
    ]


def test_a_fit_starts_anew_or_appends(trainer: Any, tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    trainer.fit(CSVLogger(path), epochs=EPOCHS)
    trainer.fit(CSVLogger(path), epochs=EPOCHS[:1])
    assert len(rows(path)) == 2
    assert len(rows(tmp_path / "log.csv.1")) == 3  # the older one is kept
    trainer.fit(CSVLogger(path, append=True), epochs=[{"accuracy": 0.5, "new": 1.0, "loss": 2.0}])
    assert rows(path)[2:] == [["1", "2.0", "0.5"]]


def test_appending_to_nothing_writes_the_header(trainer: Any, tmp_path: Path) -> None:
    trainer.fit(CSVLogger(tmp_path / "log.csv", append=True), epochs=EPOCHS)
    assert rows(tmp_path / "log.csv")[0] == ["epoch", "loss", "accuracy"]


def test_a_figure_that_is_missing_leaves_its_cell_empty(trainer: Any, tmp_path: Path) -> None:
    trainer.fit(CSVLogger(tmp_path / "log.csv"), epochs=[*EPOCHS, {"loss": 0.125}])
    assert rows(tmp_path / "log.csv")[-1] == ["3", "0.125", ""]


def test_other_replicas_write_nothing(trainer: Any, tmp_path: Path) -> None:
    trainer.strategy.is_chief = False
    trainer.fit(CSVLogger(tmp_path / "log.csv"), epochs=EPOCHS)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_written_is_named(trainer: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"{tmp_path} cannot be written: Is a directory"):
        trainer.fit(CSVLogger(tmp_path), epochs=EPOCHS)
    assert trainer.step == 0
