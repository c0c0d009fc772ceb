"""A run folder with an earlier run is refused, gone on with, or moved aside."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from spartito.cli.app import main
from spartito.errors import UserError
from spartito.folders import LOCK
from spartito.launch.earlier_run import holds_run, vacate
from tests.commands import SPARTITO, commands_in

LEFT = ["checkpoints/step-00000007/manifest.json", "backup/fit-1/step-00000007/manifest.json"]


def write(out: Path, name: str, text: str = "{}\n") -> Path:
    (out / name).parent.mkdir(parents=True, exist_ok=True)
    (out / name).write_text(text)
    return out


@pytest.mark.parametrize("name", [*LEFT, "history.jsonl"])
def test_an_earlier_run_is_refused_by_what_it_left(tmp_path: Path, name: str) -> None:
    out = write(tmp_path / "r", name)
    with pytest.raises(UserError, match="has an earlier run") as info:
        vacate(out, False, {})
    assert ("--resume goes on with it" in str(info.value)) == (name != "history.jsonl")
    assert "--overwrite" in str(info.value)
    assert vacate(out, True, {"SLURM_RESTART_COUNT": "1"}) is None
    assert vacate(out, True, {"SPARTITO_RESUME": "1"}) is None
    assert (out / name).exists()


def test_it_is_moved_aside_whole(tmp_path: Path) -> None:
    for number in (1, 2):
        out = write(write(tmp_path / "r", LEFT[0]), "mine.txt", f"{number}")
        assert vacate(out, True, {"SLURM_RESTART_COUNT": "0"}) == tmp_path / f"r.{number}"
        assert not out.exists()
        assert (tmp_path / f"r.{number}" / "mine.txt").read_text() == f"{number}"
        assert (tmp_path / f"r.{number}" / LEFT[0]).exists()


@pytest.mark.parametrize("name", ["logs/worker-0.log", "tasks/worker-0.now", "config.json", LOCK])
def test_what_is_no_run_hinders_nobody(tmp_path: Path, name: str) -> None:
    assert holds_run(write(tmp_path, name)) == ""
    write(tmp_path, "history.jsonl", "")
    assert vacate(tmp_path, False, {}) is None
    assert vacate(tmp_path / "none", True, {}) is None


def test_the_command_says_what_to_type(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = write(tmp_path / "r", LEFT[0])
    assert main(["train", "mnist", "--out", str(out)]) == 2
    assert "r has an earlier run (checkpoints/step-00000007)" in capsys.readouterr().err
    monkeypatch.setenv("SPARTITO_RUN_DIR", str(out))
    assert main(["train", "mnist"]) == 2
    assert "--resume goes on with it" in capsys.readouterr().err
    assert main(["train", "mnist", "--resume", "--overwrite"]) == 2
    assert "exclude each other" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["r"]


@pytest.mark.slow
def test_a_second_run_in_one_folder(tmp_path: Path) -> None:
    with commands_in(tmp_path) as commands:
        words = (*SPARTITO, "train", "mnist", "--epochs=1", "--batch-size=500", "--out", "r")
        assert commands.start(*words).end().code == 0
        best = (tmp_path / "r" / "checkpoints" / "best.json").read_bytes()
        refused = commands.start(*words, "--seed", "3").end()
        assert (refused.code, "--overwrite" in refused.err) == (2, True)
        assert (tmp_path / "r" / "checkpoints" / "best.json").read_bytes() == best
        moved = commands.start(*words, "--overwrite", "--workers", "2").end()
        assert moved.code == 0, moved.text
        assert "the earlier run is in" in moved.err
        assert (tmp_path / "r.1" / "checkpoints" / "best.json").read_bytes() == best
        assert len(os.listdir(tmp_path / "r" / "checkpoints")) == 3  # one, best.json, training.json
        assert commands.start(*words, "--resume", "--epochs=2").end().code == 0
