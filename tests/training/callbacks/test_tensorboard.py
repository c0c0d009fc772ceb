from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from spartito.errors import UserError
from spartito.training.callbacks import TensorBoard
from spartito.training.callbacks.event_file import crc32c
from tests.commands import LIMIT

EPOCHS = [
    {"loss": 0.5 / n, "accuracy": 0.25 * n, "val_loss": 0.75 / n, "examples_per_second": 100.0}
    for n in (1, 2)
]


def read(directory: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard itself reads in ``directory``, checksums verified."""
    from tensorboard.backend.event_processing.event_accumulator import (  # type: ignore[import-untyped]
        EventAccumulator,
    )
    from tensorboard.util.tensor_util import make_ndarray  # type: ignore[import-untyped]

    events = EventAccumulator(str(directory))
    events.Reload()
    tags = events.Tags()
    found = {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in tags["scalars"]}
    for tag in tags["tensors"]:
        found[tag] = [(e.step, float(make_ndarray(e.tensor_proto))) for e in events.Tensors(tag)]
    return found


def test_the_checksum_is_crc_32c() -> None:
    assert crc32c(b"123456789") == 0xE3069283  # the check value of the standard
    assert crc32c(bytes(32)) == 0x8A9136AA  # RFC 3720, B.4
    assert crc32c(b"") == 0


def test_tensorboard_reads_training_and_validation(trainer: Any) -> None:
    trainer.fit(TensorBoard(), epochs=EPOCHS)
    training = read(trainer.run_dir / "logs" / "train")
    assert training == {
        "epoch_loss": [(1, 0.5), (2, 0.25)],
        "epoch_accuracy": [(1, 0.25), (2, 0.5)],
        "epoch_examples_per_second": [(1, 100.0), (2, 100.0)],
    }
    validation = read(trainer.run_dir / "logs" / "validation")
    assert validation == {"epoch_loss": [(1, 0.75), (2, 0.375)]}


def test_without_validation_there_is_no_such_run(trainer: Any, tmp_path: Path) -> None:
    trainer.fit(TensorBoard(tmp_path / "tb"), epochs=[{"loss": 1.0}])
    assert [path.name for path in (tmp_path / "tb").iterdir()] == ["train"]


def test_an_epoch_is_there_when_it_has_ended(trainer: Any, tmp_path: Path) -> None:
    callback = TensorBoard(tmp_path)
    callback.set_trainer(trainer)
    callback.on_train_begin()
    callback.on_epoch_end(0, {"loss": 1.0})
    assert read(tmp_path / "train") == {"epoch_loss": [(1, 1.0)]}
    callback.on_train_error(RuntimeError())


def test_other_replicas_write_nothing(trainer: Any) -> None:
    trainer.strategy.is_chief = False
    trainer.fit(TensorBoard(), epochs=EPOCHS)
    assert not trainer.run_dir.exists()


def test_a_folder_that_cannot_be_written_is_found_before_training(
    trainer: Any, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"file/train cannot be written"):
        trainer.fit(TensorBoard(tmp_path / "file"), epochs=EPOCHS)
    trainer.run_dir = None
    with pytest.raises(UserError, match="no directory, and this trainer no run folder"):
        trainer.fit(TensorBoard(), epochs=EPOCHS)
    assert trainer.step == 0


def test_writing_does_not_import_tensorflow(tmp_path: Path) -> None:
    (tmp_path / "tensorflow").mkdir()
    (tmp_path / "tensorflow" / "__init__.py").write_text("raise SystemExit('imported')")
    script = (
        "from pathlib import Path\n"
        "from spartito.training.callbacks.event_file import EventFile\n"
        f"EventFile(Path({str(tmp_path / 'events')!r})).scalars(1, {{'loss': 0.5}})\n"
    )
    path = os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]])
    subprocess.run(
        [sys.executable, "-W", "error", "-c", script],
        env=os.environ | {"PYTHONPATH": path},
        timeout=LIMIT,
        check=True,
    )
    assert read(tmp_path / "events") == {"loss": [(1, 0.5)]}
