from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from spartito.checkpoint import CheckpointManager, read_checkpoint
from spartito.errors import UserError
from spartito.training.callbacks import ModelCheckpoint


def losses(*values: float) -> list[dict[str, float]]:
    return [{"loss": value * 2, "val_loss": value} for value in values]


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_every_epoch_is_saved_in_the_run_folder(trainer: Any) -> None:
    trainer.fit(ModelCheckpoint(), epochs=losses(3, 1, 2))
    folder = trainer.run_dir / "checkpoints"
    assert names(folder) == ["best.json", "step-00000004", "step-00000008", "step-00000012"]
    best = json.loads((folder / "best.json").read_text())
    assert best == {
        "name": "step-00000008", "monitor": "val_loss", "value": 1.0, "sequence": 2
    }  # fmt: skip
    assert CheckpointManager(folder).latest() == folder / "step-00000012"
    state = read_checkpoint(folder / "step-00000008")
    assert state["trainer"] == {
        "step": 8,
        "callbacks": [{"best": 1.0, "of": "val_loss", "seen": 0}],
    }
    assert state["model"]["weight"].tolist() == [[1.0, 1.0]]
    assert list(state["optimizer"]["state"]) == [0]


def test_only_the_best(trainer: Any, tmp_path: Path) -> None:
    callback = ModelCheckpoint(tmp_path / "best", save_best_only=True, keep=1)
    trainer.fit(callback, epochs=losses(3, 1, 2, float("nan")))
    assert names(tmp_path / "best") == ["best.json", "step-00000008"]


def test_keep_two_and_the_best(trainer: Any, tmp_path: Path) -> None:
    trainer.fit(ModelCheckpoint(tmp_path / "c", keep=2), epochs=losses(1, 4, 3, 2))
    assert names(tmp_path / "c")[1:] == ["step-00000004", "step-00000012", "step-00000016"]


def test_an_accuracy_is_best_at_its_most(trainer: Any, tmp_path: Path) -> None:
    epochs = [{"loss": 1.0, "val_accuracy": value} for value in (0.5, 0.9, 0.7)]
    trainer.fit(ModelCheckpoint(tmp_path / "c", monitor="val_accuracy"), epochs=epochs)
    assert json.loads((tmp_path / "c" / "best.json").read_text())["value"] == 0.9


def test_steps_are_saved_too_and_an_epochs_last_once(trainer: Any, tmp_path: Path) -> None:
    trainer.fit(ModelCheckpoint(tmp_path / "c", every_steps=2), epochs=losses(2, 1))
    assert names(tmp_path / "c")[1:] == [f"step-{step:08d}" for step in (2, 4, 6, 8)]
    assert trainer.states == 4


def test_batches_of_one_accumulated_step_are_saved_once(trainer: Any, tmp_path: Path) -> None:
    callback = ModelCheckpoint(tmp_path / "c", every_steps=2)
    callback.set_trainer(trainer)
    callback.on_train_begin()
    for batch, step in enumerate([0, 0, 1, 1, 2, 2, 3]):
        trainer.step, trainer.steps_per_epoch = step, 100
        callback.on_train_batch_end(batch, {"loss": 1.0})
    assert names(tmp_path / "c") == ["step-00000002"]
    assert trainer.states == 1


def test_other_replicas_take_part_and_write_nothing(trainer: Any) -> None:
    trainer.strategy.is_chief = False
    trainer.fit(ModelCheckpoint(every_steps=2), epochs=losses(2, 1))
    assert trainer.states == 4
    assert not trainer.run_dir.exists()


def test_the_best_value_outlives_a_resume(trainer: Any, tmp_path: Path) -> None:
    first = ModelCheckpoint(tmp_path / "c")
    trainer.fit(first, epochs=losses(1))
    second = ModelCheckpoint(tmp_path / "c")
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    trainer.fit(second, epochs=losses(2))
    assert json.loads((tmp_path / "c" / "best.json").read_text())["name"] == "step-00000004"


def test_without_validation_the_default_watches_the_loss(trainer: Any, tmp_path: Path) -> None:
    trainer.fit(ModelCheckpoint(tmp_path / "c"), epochs=[{"loss": 2.0}, {"loss": 1.0}])
    best = json.loads((tmp_path / "c" / "best.json").read_text())
    assert best == {"name": "step-00000008", "monitor": "loss", "value": 1.0, "sequence": 2}


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"monitor": "val_acuracy"}, "val_acuracy.*\n.*Did you mean 'val_accuracy'"),
        ({"save_best_only": True}, "val_loss.*\n.*no validation_data"),
    ],
)
def test_a_monitor_that_nobody_reports_is_named(
    trainer: Any, tmp_path: Path, options: dict[str, Any], why: str
) -> None:
    epochs = [
        {"loss": 1.0, "seconds": 2.0}
        | ({} if "save_best_only" in options else {"val_accuracy": 1.0})
    ]
    with pytest.raises(UserError, match=why) as caught:
        trainer.fit(ModelCheckpoint(tmp_path / "c", **options), epochs=epochs)
    assert "seconds" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"keep": 0}, "keep is 0"),
        ({"mode": "maximum"}, "mode is 'maximum'.*\n.*Did you mean 'max'"),
        ({"every_steps": 0}, "every_steps is 0"),
        ({"every_steps": 5, "save_best_only": True}, "exclude each other"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, Any], why: str) -> None:
    with pytest.raises(UserError, match=why):
        ModelCheckpoint("c", **options)


def test_a_folder_that_cannot_be_written_is_found_before_training(
    trainer: Any, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"file.* cannot be written"):
        trainer.fit(ModelCheckpoint(tmp_path / "file" / "c"), epochs=losses(1))
    trainer.run_dir = None
    with pytest.raises(UserError, match="no directory, and this trainer no run folder"):
        trainer.fit(ModelCheckpoint(), epochs=losses(1))
    assert trainer.step == 0
