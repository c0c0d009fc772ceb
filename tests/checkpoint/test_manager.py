from __future__ import annotations

import json
import logging
import math
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from spartito.checkpoint import Best, CheckpointManager, read_checkpoint, write_checkpoint
from spartito.errors import UserError
from spartito.storage import verify

KILLED_WRITER = """
import os, signal, sys
from pathlib import Path
from spartito.storage import write_directory

with write_directory(Path(sys.argv[1]) / "step-00000002") as new:
    (new / "model.safetensors").write_bytes(b"half")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def state(value: float = 1.0) -> dict[str, Any]:
    net = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    optimizer = torch.optim.Adam(net.parameters(), value)
    net(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    return {
        "model": net.state_dict(),
        "optimizer": optimizer.state_dict(),
        "trainer": {"step": 3, "epoch": 1, "best": math.inf, "callbacks": [{"wait": 2}]},
    }


def names(manager: CheckpointManager) -> list[str]:
    return [path.name for path in manager.all()]


def damage(path: Path) -> None:
    file = path / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def test_a_state_comes_back(tmp_path: Path) -> None:
    saved = state(0.5)
    path = CheckpointManager(tmp_path / "c").save(saved, "step-00000003", metrics={"loss": 0.25})
    assert {p.name for p in path.iterdir()} == {
        "model.safetensors",
        "optimizer.safetensors",
        "state.json",
        "manifest.json",
    }
    back = CheckpointManager(tmp_path / "c").load("step-00000003")
    assert back["trainer"] == saved["trainer"]
    assert list(back["model"]) == list(saved["model"])
    torch.testing.assert_close(back["model"], dict(saved["model"]), rtol=0, atol=0)
    assert back["optimizer"]["param_groups"] == saved["optimizer"]["param_groups"]
    torch.testing.assert_close(
        back["optimizer"]["state"], saved["optimizer"]["state"], rtol=0, atol=0
    )


def test_the_model_file_holds_the_users_own_names(tmp_path: Path) -> None:
    path = CheckpointManager(tmp_path).save(state(), "one")
    assert {"0.weight", "0.bias", "1.running_mean", "1.num_batches_tracked"} <= set(
        load_file(path / "model.safetensors")
    )


def test_a_section_without_tensors_has_no_file(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "one", {"model": {"w": torch.ones(1)}, "trainer": {"step": 1}})
    assert not (tmp_path / "one" / "trainer.safetensors").exists()
    assert read_checkpoint(tmp_path / "one")["trainer"] == {"step": 1}


def test_what_cannot_be_saved_is_named_and_writes_nothing(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"trainer\.callbacks\.0 is a PosixPath"):
        CheckpointManager(tmp_path).save({"trainer": {"callbacks": [Path("x")]}}, "one")
    assert list(tmp_path.iterdir()) == []


def test_latest_is_the_one_written_last_whatever_its_name(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    assert manager.latest() is None
    for name in ("step-00000800", "step-00000400"):
        manager.save(state(), name)
    assert manager.latest() == tmp_path / "step-00000400"
    manager.save(state(), "step-00000800")
    assert CheckpointManager(tmp_path).latest() == tmp_path / "step-00000800"
    assert names(manager) == ["step-00000400", "step-00000800"]


def test_a_damaged_newest_is_reported_and_passed_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manager = CheckpointManager(tmp_path)
    for name in ("a", "b", "c"):
        manager.save(state(), name)
    damage(tmp_path / "c")
    (tmp_path / "b" / "manifest.json").unlink()
    with caplog.at_level(logging.WARNING, logger="spartito"):
        assert manager.latest() == tmp_path / "a"
    assert "c is passed over" in caplog.text
    assert "model.safetensors has changed" in caplog.text
    assert "b has no manifest.json" in caplog.text
    with pytest.raises(UserError, match=r"model\.safetensors has changed"):
        manager.load("c")


def test_keep_removes_the_oldest_and_never_the_best(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, keep=2)
    for step, value in enumerate([0.5, 0.9, 0.7, 0.6, 0.8]):
        best = ("val_accuracy", value) if value in (0.5, 0.9) else None
        manager.save(state(), f"step-{step}", best=best)
        assert manager.latest() == tmp_path / f"step-{step}"
    assert names(manager) == ["step-1", "step-3", "step-4"]
    assert manager.best == tmp_path / "step-1"
    assert manager.best_so_far == Best("step-1", "val_accuracy", 0.9)
    pointer = json.loads((tmp_path / "best.json").read_text())
    facts = {"name": "step-1", "monitor": "val_accuracy", "value": 0.9}
    assert pointer == {**facts, "sequence": 2}


def test_keep_one_with_a_new_best_leaves_one(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, keep=1)
    for step in range(3):
        manager.save(state(), f"step-{step}", best=("loss", -step))
    assert names(manager) == ["step-2"]


def test_a_damaged_one_does_not_push_out_a_good_one(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, keep=2)
    for name in ("a", "b"):
        manager.save(state(), name)
    file = tmp_path / "b" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    manager.save(state(), "c")
    assert names(manager) == ["a", "b", "c"]
    manager.save(state(), "d")
    assert names(manager) == ["c", "d"]


def test_what_it_did_not_write_is_never_removed(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, keep=1)
    theirs = {
        "bert-base/model.safetensors": "a download",
        "exp/manifest.json": "{}",
        "app/manifest.json": '{"name": "my app"}',
        "game/state.json": "a score",
        "lost/manifest.json": "{",
    }
    for name, text in theirs.items():
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(text)
    manager.save(state(), "a")
    manager.save(state(), "b")
    write_checkpoint(tmp_path / "by-name", state())
    write_checkpoint(tmp_path / "step-00000001", state(), {"step": 1})
    shutil.copytree(tmp_path / "b", tmp_path / "a copy")
    (tmp_path / "a link").symlink_to("b")
    CheckpointManager(tmp_path / "other").save(state(), "c")
    (tmp_path / "other" / "c").rename(tmp_path / "c")
    (tmp_path / "b" / "notes.txt").write_text("the good one")
    manager.save(state(), "d")
    manager.save(state(), "e")
    for name, text in theirs.items():
        assert (tmp_path / name).read_text() == text
    for name in ("by-name", "step-00000001", "a copy", "c"):
        verify(tmp_path / name)
    assert [path.name for path in (tmp_path / "b").iterdir()] == ["notes.txt"]
    assert not (tmp_path / "a").exists()
    assert not (tmp_path / "d").exists()
    assert manager.latest() == tmp_path / "e"


def test_one_saved_by_name_is_the_newest_only_where_no_other_is(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    write_checkpoint(tmp_path / "step-9", state(), {"step": 9})
    write_checkpoint(tmp_path / "step-10", state(), {"step": 10})
    assert manager.latest() == tmp_path / "step-10"
    manager.save(state(), "step-00000001")
    assert manager.latest() == tmp_path / "step-00000001"


def test_a_folder_for_them_alone_may_have_moved(tmp_path: Path) -> None:
    CheckpointManager(tmp_path / "before").save(state(), "a")
    (tmp_path / "before").rename(tmp_path / "now")
    (tmp_path / "now" / "mine").mkdir()
    write_checkpoint(tmp_path / "now" / "by-name", state())
    manager = CheckpointManager(tmp_path / "now", keep=1, alone=True)
    manager.save(state(), "b")
    assert {path.name for path in (tmp_path / "now").iterdir()} == {"b", "by-name", "mine"}
    manager.remove_all()
    assert {path.name for path in (tmp_path / "now").iterdir()} == {"by-name", "mine"}


def test_a_users_own_best_json_is_refused_and_stays(tmp_path: Path) -> None:
    (tmp_path / "best.json").write_text('{"score": 3}')
    manager = CheckpointManager(tmp_path)
    with pytest.raises(UserError, match=r"best\.json is not what says which checkpoint"):
        manager.prepare()
    with pytest.raises(UserError, match=r"best\.json is not what says which checkpoint"):
        manager.save(state(), "a", best=("loss", 1.0))
    assert (tmp_path / "best.json").read_text() == '{"score": 3}'


def test_other_files_in_the_directory_stay(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    manager = CheckpointManager(tmp_path, keep=1)
    manager.save(state(), "a")
    manager.save(state(), "b")
    assert names(manager) == ["b"]
    assert (tmp_path / "notes").is_dir()


def test_a_killed_writer_costs_nothing_but_its_own(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    manager.save(state(), "step-00000001")
    command = [sys.executable, "-c", KILLED_WRITER, str(tmp_path)]
    done = subprocess.run(command, timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL
    assert len([p for p in tmp_path.iterdir() if p.name.startswith(".")]) == 1
    assert manager.latest() == tmp_path / "step-00000001"
    manager.prepare()
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001"]


def test_metrics_that_are_not_finite_are_kept(tmp_path: Path) -> None:
    path = CheckpointManager(tmp_path).save(state(), "one", metrics={"loss": math.nan})
    text = (path / "manifest.json").read_text()
    assert json.loads(text)["about"]["metrics"] == {"loss": {"$float": "nan"}}


@pytest.mark.parametrize("name", ["", "..", "a/b", ".hidden", "/abs"])
def test_a_name_that_is_no_file_name_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match="cannot name a checkpoint"):
        CheckpointManager(tmp_path).save({}, name)


def test_keep_must_leave_one(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="keep is 0"):
        CheckpointManager(tmp_path, keep=0)


def test_a_directory_that_cannot_be_written_is_found_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"file.* cannot be written"):
        CheckpointManager(tmp_path / "file" / "checkpoints").prepare()
    CheckpointManager(tmp_path / "new" / "checkpoints").prepare()
    assert list((tmp_path / "new" / "checkpoints").iterdir()) == []


def test_a_best_pointer_without_its_checkpoint_is_none(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    assert manager.best is None
    (tmp_path / "best.json").write_text('{"name": "gone", "monitor": "loss", "value": 1.0}')
    assert manager.best is None
    (tmp_path / "best.json").write_text("{")
    with pytest.raises(UserError, match=r"best\.json is not what says"):
        _ = manager.best


def test_a_directory_that_is_no_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"{tmp_path} has no manifest.json"):
        read_checkpoint(tmp_path)


def test_a_writer_killed_before_it_names_the_best_has_named_it(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, keep=1)
    pointer = tmp_path / "best.json"
    manager.save(state(), "step-1", best=("loss", 2.0))
    pointer.unlink()
    assert manager.best_so_far == Best("step-1", "loss", 2.0)
    manager.name_best(Best("step-1", "loss", 2.0))
    before = pointer.read_bytes()
    manager.save(state(), "step-2", best=("loss", -math.inf))
    pointer.write_bytes(before)  # as the kill leaves it
    assert manager.best_so_far == Best("step-2", "loss", -math.inf)
    manager.save(state(), "step-3")
    assert names(manager) == ["step-2", "step-3"]
    manager.name_best(Best("step-3", "val_loss", 1.0))  # as an evaluator does, later
    assert manager.best_so_far == Best("step-3", "val_loss", 1.0)
    manager.save(state(), "step-4")
    assert names(manager) == ["step-3", "step-4"]


def test_a_checkpoint_of_a_later_version_is_refused_and_not_passed_over(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    manager.save({"model": {"w": torch.ones(1)}}, "old")
    newest = manager.save({"model": {"w": torch.ones(1)}}, "new")
    manifest = json.loads((newest / "manifest.json").read_text())
    (newest / "manifest.json").write_text(json.dumps(manifest | {"format": manifest["format"] + 1}))
    for read in (lambda: manager.load("new"), manager.latest):
        with pytest.raises(UserError, match=r"new has format 2, and this version .* up to 1\n"):
            read()
