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


def test_a_figure_that_begins_later_gets_a_column(trainer: Any, tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    (tmp_path / "link.csv").symlink_to(path)
    late = [{"loss": 0.125, 'of, "quotes"': 1.5}, {"loss": 0.0, "last": 2.0}]
    trainer.fit(CSVLogger(tmp_path / "link.csv"), epochs=[*EPOCHS, *late])
    assert rows(path) == [
        ["epoch", "loss", "accuracy", 'of, "quotes"', "last"],
        ["1", "0.5", "0.75", "", ""],
        ["2", "0.25", "1.0", "", ""],
        ["3", "0.125", "", "1.5", ""],
        ["4", "0.0", "", "", "2.0"],
    ]
    assert (tmp_path / "link.csv").is_symlink()
    assert {each.name for each in tmp_path.iterdir()} == {"log.csv", "link.csv"}


def test_rows_that_are_done_again_go_whatever_columns_came(trainer: Any, tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    first = CSVLogger(path)
    trainer.fit(first, epochs=EPOCHS[:1])
    state = first.state_dict()
    goes_on = CSVLogger(path)
    goes_on.load_state_dict(state)
    trainer.fit(goes_on, epochs=[{"loss": 1.0, "new": 3.0}])
    again = CSVLogger(path)
    again.load_state_dict(state)
    trainer.fit(again, epochs=[{"loss": 2.0, "newer": 4.0}])
    assert rows(path) == [
        ["epoch", "loss", "accuracy", "new", "newer"],
        ["1", "0.5", "0.75", "", ""],
        ["1", "2.0", "", "", "4.0"],
    ]
    assert again.state_dict() == {"rows": 2, "last": ["1", "2.0", "", "", "4.0"]}


@pytest.mark.parametrize("append", [True, False])
def test_rows_of_another_training_stay(trainer: Any, tmp_path: Path, append: bool) -> None:
    """One was killed in its third epoch, and goes on once another one has used the file."""
    path = tmp_path / "log.csv"
    first = CSVLogger(path, append=append)
    trainer.fit(first, epochs=EPOCHS)
    state = first.state_dict()
    with path.open("a") as file:
        file.write("3,0.125,1.0\r\n")  # after its last backup
    trainer.fit(CSVLogger(path, append=append), epochs=[{"loss": 9.0, "accuracy": 0.0}] * 4)
    again = CSVLogger(path, append=append)
    again.load_state_dict(state)
    trainer.fit(again, epochs=[{"loss": 2.0, "accuracy": 0.0}])
    kept = {each.name: [row[0] for row in rows(each)[1:]] for each in tmp_path.iterdir()}
    others = ["1", "2", "3", "4"]
    if append:
        assert kept == {"log.csv": ["1", "2", *others, "1"]}
    else:
        assert kept == {"log.csv.1": ["1", "2", "3"], "log.csv.2": others, "log.csv": ["1"]}


@pytest.mark.parametrize("append", [True, False])
def test_who_goes_on_in_place_of_a_lost_chief_has_its_rows(
    trainer: Any, tmp_path: Path, append: bool
) -> None:
    path = tmp_path / "log.csv"
    trainer.fit(CSVLogger(path, append=append), epochs=EPOCHS)
    with path.open("a") as file:
        file.write("3,0.1")  # it was killed here
    trainer.strategy.is_chief = False
    another = CSVLogger(path, append=append)
    trainer.fit(another, epochs=EPOCHS)
    trainer.strategy.is_chief = trainer.went_on = True
    another.load_state_dict(another.state_dict())
    another.on_train_begin()
    another.on_epoch_end(1, EPOCHS[1])  # which may be called again
    another.on_epoch_end(2, {"loss": 2.0, "accuracy": 0.5})
    assert rows(path)[1:] == [["1", "0.5", "0.75"], ["2", "0.25", "1.0"], ["3", "2.0", "0.5"]]


def test_a_header_that_is_appended_to_stays(
    trainer: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "log.csv"
    path.write_text("epoch,loss\n")
    trainer.fit(CSVLogger(path, append=True), epochs=EPOCHS)
    assert rows(path) == [["epoch", "loss"], ["1", "0.5"], ["2", "0.25"]]
    told = [record.message for record in caplog.records]
    assert told == [f"{path} has no column for accuracy"]


def test_other_replicas_write_nothing(trainer: Any, tmp_path: Path) -> None:
    trainer.strategy.is_chief = False
    trainer.fit(CSVLogger(tmp_path / "log.csv"), epochs=EPOCHS)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_written_is_named(trainer: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"{tmp_path} cannot be written: Is a directory"):
        trainer.fit(CSVLogger(tmp_path), epochs=EPOCHS)
    assert trainer.step == 0
