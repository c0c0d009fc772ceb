"""A user's files around, among and inside of what Spartito writes: not one is touched.

`docs/reference/files.md` lists what may be removed, renamed or replaced; here all that writes a
folder does so in one that is full of other files, twice, as a second run clears what the first
one left.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import spartito as sp
from spartito.checkpoint import write_checkpoint
from spartito.checkpoint.convert import average, convert
from spartito.checkpoint.foreign_files import opened
from spartito.errors import UserError
from spartito.report import write_report
from spartito.storage import sweep
from tests.training.jobs import data, trainer

ROOT = Path(sp.__file__).parent
TOKEN = "0123456789abcdef"

PLANTED = {
    # hidden, as editors and people call their older and newer versions
    ".env.old": "a key",
    ".vimrc.new": "a setting",
    ".config.old/app/settings": "settings",
    ".cache.new/x": "cached",
    ".bashrc.0123abcd.old": "as ours were called once",
    ".model.safetensors.new": "as ours were called once",
    ".writable": "mine",
    # models and checkpoints that others wrote
    "bert-base/model.safetensors": "a download",
    "bert-base/config.json": "{}",
    "exp/manifest.json": '{"name": "an app"}',
    "game/state.json": '{"score": 3}',
    "fit-99/notes": "mine",
    "step-00000004.bak/model.safetensors": "a copy",
    "notes.txt": "mine",
    "data/cat/1.png": "a photo",
    "logs/run.txt": "mine",
    "train/mine": "mine",
    f"spartito-new-{TOKEN}-x": "not hidden",
    f".spartito-new-{TOKEN}": "no target",
}
FIXED = {
    "config.json": '{"lr": 0.1}',
    "history.jsonl": '{"loss": 1}\n',
    "evaluations.jsonl": '{"mine": 1}\n',
    "report.html": "<title>My report</title>",
    "best.json": '{"score": 3}',
    "training.json": '{"mine": 1}',
    "worker-0.json": '{"mine": 1}',
    "worker-0.now": "mine",
    "epochs.csv": "x,y\n1,2\n",
}
"""Names that files of ours have: what would write one refuses the folder."""


def fill(folder: Path, planted: dict[str, str]) -> None:
    for name, text in planted.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def check(folder: Path, planted: dict[str, str]) -> None:
    for name, text in planted.items():
        assert (folder / name).is_file(), f"{name} is gone"
        assert (folder / name).read_text() == text, f"{name} has changed"


def fit(*callbacks: sp.Callback, **options: Any) -> sp.Trainer:
    made = trainer(**options)
    made.fit(data(), epochs=3, batch_size=5, callbacks=callbacks, verbose=0)
    return made


def keeps_one(folder: Path) -> None:
    fit(sp.callbacks.ModelCheckpoint(folder, keep=1))


def in_a_run_folder(folder: Path) -> None:
    with SuppressTwice(folder):
        fit(
            sp.callbacks.ModelCheckpoint(keep=1),
            sp.callbacks.BackupAndRestore(every=1, share=None),
            sp.callbacks.TensorBoard(),
            run_dir=folder,
        )
        write_report(folder)


def runs(folder: Path) -> None:
    fit(sp.callbacks.ModelCheckpoint(), run_dir=folder)


def backs_up(folder: Path) -> None:
    fit(sp.callbacks.BackupAndRestore(folder, every=1, share=None))


def backs_up_into_a_store(folder: Path) -> None:
    fit(sp.callbacks.BackupAndRestore(f"file://{folder}", every=1, share=None))


def logs(folder: Path) -> None:
    fit(sp.callbacks.CSVLogger(folder / "epochs.csv"), sp.callbacks.TensorBoard(folder))


def saves(folder: Path) -> None:
    made = fit()
    for _ in range(2):
        made.save(folder / "saved")
    for name in ("exp", "game", "bert-base", "notes.txt"):
        with pytest.raises(UserError, match=r"be replaced|cannot be written"):
            made.save(folder / name)


def converts(folder: Path) -> None:
    shutil.rmtree(folder / "model", ignore_errors=True)
    for name in ("model.safetensors", "mean.pt"):
        (folder / name).unlink(missing_ok=True)
    model = nn.Linear(2, 2)
    write_checkpoint(folder / "model", {"model": model.state_dict()})
    convert(opened(folder / "model"), folder / "model.safetensors")
    average([opened(folder / "model")] * 2, folder / "mean.pt")


def sweeps(folder: Path) -> None:
    (folder / f".spartito-new-{TOKEN}-x").write_text("half")
    assert len(sweep(folder)) == 1


class SuppressTwice(suppress):
    """A second run may be refused, because the first one is there."""

    def __init__(self, folder: Path) -> None:
        again = (folder / "history.jsonl").exists() and (folder / "history.jsonl").stat().st_size
        super().__init__(*((UserError,) if again else ()))


WRITERS: list[Callable[[Path], None]] = [
    keeps_one, in_a_run_folder, backs_up, backs_up_into_a_store, logs, saves, converts, sweeps,
]  # fmt: skip


@pytest.mark.parametrize("write", WRITERS)
def test_files_beside_stay(
    write: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    folder = tmp_path / "folder"
    planted = PLANTED | {f"{inner}/{name}": text for inner in ("fit-1", "checkpoints", "backup")
                         for name, text in PLANTED.items()}  # fmt: skip
    fill(folder, planted)
    for _ in range(2):
        write(folder)
        check(folder, planted)


@pytest.mark.parametrize(
    ("write", "names"),
    [
        (keeps_one, ("best.json", "training.json")),
        (runs, ("config.json", "history.jsonl", "evaluations.jsonl", "report.html",
                           "checkpoints/best.json", "tasks/worker-0.json", "tasks/worker-0.now")),
        (logs, ("epochs.csv",)),
    ],
)  # fmt: skip
def test_a_file_with_a_name_of_ours_is_refused(
    write: Callable[[Path], None], names: tuple[str, ...], tmp_path: Path
) -> None:
    for number, name in enumerate(names):
        planted = {name: FIXED[Path(name).name]}
        fill(tmp_path / f"{number}", planted)
        with pytest.raises(UserError, match=re.escape(Path(name).name)):
            write(tmp_path / f"{number}")
        check(tmp_path / f"{number}", planted)


REMOVES = re.compile(
    r"\.(unlink|rmtree|rmdir|rename)\(|os\.(remove|replace|truncate)\(|shutil\.move\(|"
    r"\b(new|part|_new|aside|fresh)\.replace\("
)


def test_the_page_lists_every_module_that_removes_something() -> None:
    page = (Path(__file__).parents[1] / "docs" / "reference" / "files.md").read_text()
    listed = set(re.findall(r"`([\w/]+\.py)`", page))
    found = {
        path.relative_to(ROOT).as_posix()
        for path in ROOT.rglob("*.py")
        if REMOVES.search(path.read_text())
    }
    assert found <= listed, "not in docs/reference/files.md"
    assert listed <= found, "in docs/reference/files.md, and removes nothing"


def test_a_user_may_look_at_leftovers_of_an_earlier_version(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / ".one.0123abcd.old", {"model": {"w": torch.ones(1)}})
    assert sweep(tmp_path) == []
