from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import pytest
import torch
from torch import nn

import spartito as sp
from spartito.errors import UnwritableError, UserError
from spartito.storage.atomic import (
    MANIFEST,
    read_manifest,
    remove_directory,
    sweep,
    verify,
    write_directory,
    write_file_atomically,
)
from tests.skips import skip_if

TOKEN = "0123456789abcdef"
WRITER = """
import os, signal, sys
from spartito.storage.atomic import write_directory
with write_directory(sys.argv[1]) as new:
    (new / "part").write_text("half")
    print("writing", flush=True)
    sys.stdin.read()
"""


def save(path: Path, text: str = "content") -> None:
    with write_directory(path, about={"step": 3}) as new:
        (new / "a.txt").write_text(text)
        (new / "sub").mkdir()
        (new / "sub" / "b.bin").write_bytes(b"\0" * 10)


def hidden(directory: Path) -> list[str]:
    return [p.name for p in directory.iterdir() if p.name.startswith(".")]


def test_a_directory_appears_whole_with_its_manifest(tmp_path: Path) -> None:
    save(tmp_path / "deep" / "one")
    manifest = verify(tmp_path / "deep" / "one")
    assert set(manifest.files) == {"a.txt", "sub/b.bin"}
    assert manifest.files["sub/b.bin"].size == 10
    assert manifest.about == {"step": 3}
    assert hidden(tmp_path / "deep") == []


def test_nothing_shows_before_the_block_ends(tmp_path: Path) -> None:
    with write_directory(tmp_path / "one") as new:
        assert new.parent == tmp_path
        assert not (tmp_path / "one").exists()
    assert (tmp_path / "one" / MANIFEST).exists()


def test_an_error_leaves_nothing_and_keeps_the_older_one(tmp_path: Path) -> None:
    save(tmp_path / "one", "old")

    def fail(new: Path) -> None:
        (new / "a.txt").write_text("new")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), write_directory(tmp_path / "one") as new:
        fail(new)
    verify(tmp_path / "one")
    assert (tmp_path / "one" / "a.txt").read_text() == "old"
    assert hidden(tmp_path) == []


def test_an_older_directory_is_replaced(tmp_path: Path) -> None:
    save(tmp_path / "one", "old")
    with write_directory(tmp_path / "one") as new:
        (new / "c.txt").write_text("new")
    assert set(verify(tmp_path / "one").files) == {"c.txt"}
    assert not (tmp_path / "one" / "a.txt").exists()
    assert hidden(tmp_path) == []


def test_a_folder_of_something_else_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").write_text("x")
    for path, text in ((tmp_path / "mine", "other files in it"), ("", "names no new directory")):
        with pytest.raises(UserError, match=text), write_directory(path):
            pass
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["notes"]
    (tmp_path / "empty").mkdir()
    with write_directory(tmp_path / "empty"):
        pass
    assert verify(tmp_path / "empty").files == {}


def test_a_file_that_nobody_may_write_stays(tmp_path: Path) -> None:
    file = tmp_path / "best.pt"
    file.write_text("mine")
    file.chmod(0o444)
    trainer = sp.Trainer(nn.Linear(2, 2), strategy="one_device")
    for write in (lambda: write_file_atomically(file, "other"), lambda: trainer.save_weights(file)):
        with pytest.raises(UnwritableError, match=r"best\.pt is read-only, and would be replaced"):
            write()
    assert file.read_text() == "mine"
    assert os.listdir(tmp_path) == ["best.pt"]
    file.chmod(0o644)
    trainer.save_weights(file)
    assert len(torch.load(file)) == 2


def test_a_file_in_the_way_is_an_error_and_stays(tmp_path: Path) -> None:
    (tmp_path / "one").write_text("mine")
    with pytest.raises(UserError, match="cannot be written"):
        save(tmp_path / "one")
    assert (tmp_path / "one").read_text() == "mine"
    assert hidden(tmp_path) == []


def test_a_parent_that_is_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"file.* cannot be written: (Not a directory|File exists)"):
        save(tmp_path / "file" / "one")
    with pytest.raises(UserError, match="file"):
        write_file_atomically(tmp_path / "file" / "x.json", "{}")


@skip_if(os.geteuid() == 0, "not-root", "root may write anywhere")
def test_a_folder_without_permission_is_named(tmp_path: Path) -> None:
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o500)
    with pytest.raises(UserError, match="locked cannot be written: Permission denied"):
        save(locked / "one")


def test_a_read_only_file_system_is_named() -> None:
    with pytest.raises(UserError, match="/proc cannot be written: "):
        write_file_atomically("/proc/spartito.json", "{}")


def test_a_directory_without_manifest_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"{tmp_path} has no manifest.json"):
        read_manifest(tmp_path)


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{", '{"files": 3, "about": {}}', '{"files": {"../x": {"size": 1, "sha256": ""}}}'],
)
def test_a_broken_manifest_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / MANIFEST).write_text(text)
    with pytest.raises(UserError, match=r"manifest\.json is not a manifest"):
        read_manifest(tmp_path)


def test_a_manifest_with_paths_outside_of_its_directory_is_refused(tmp_path: Path) -> None:
    save(tmp_path / "one")
    raw = json.loads((tmp_path / "one" / MANIFEST).read_text())
    raw["files"]["../secret"] = raw["files"]["a.txt"]
    (tmp_path / "one" / MANIFEST).write_text(json.dumps(raw))
    with pytest.raises(UserError, match="is outside of"):
        verify(tmp_path / "one")


def test_damage_names_the_file(tmp_path: Path) -> None:
    save(tmp_path / "one")
    file = tmp_path / "one" / "a.txt"
    file.write_text("contenT")
    with pytest.raises(UserError, match=r"a\.txt has changed"):
        verify(tmp_path / "one")
    file.write_text("cont")
    with pytest.raises(UserError, match=r"a\.txt has 4 bytes, its manifest says 7"):
        verify(tmp_path / "one")
    file.unlink()
    with pytest.raises(UserError, match=r"a\.txt cannot be read"):
        verify(tmp_path / "one")


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    write_file_atomically(tmp_path / "new" / "x.json", "one")
    write_file_atomically(tmp_path / "new" / "x.json", b"two")
    assert (tmp_path / "new" / "x.json").read_bytes() == b"two"
    assert hidden(tmp_path / "new") == []


def test_a_killed_writer_is_swept_and_a_living_one_is_not(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WRITER, str(tmp_path / "one")]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "writing\n"
            assert sweep(tmp_path) == []
            assert len(hidden(tmp_path)) == 1
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait(timeout=30)
    assert len(sweep(tmp_path)) == 1
    assert list(tmp_path.iterdir()) == []


def test_what_is_written_survives_sweeps_that_come_all_the_time(tmp_path: Path) -> None:
    # An evaluator writes best.json beside a chief that sweeps before each checkpoint.
    done = Event()

    def sweeping() -> None:
        while not done.is_set():
            sweep(tmp_path)

    with ThreadPoolExecutor(1) as pool:
        sweeps = pool.submit(sweeping)
        try:
            for count in range(200):
                write_file_atomically(tmp_path / "best.json", str(count))
                assert (tmp_path / "best.json").read_text() == str(count)
                save(tmp_path / "one", str(count))
                assert (tmp_path / "one" / "a.txt").read_text() == str(count)
        finally:
            done.set()
        sweeps.result()
    assert hidden(tmp_path) == []


def test_what_was_moved_aside_and_never_replaced_comes_back(tmp_path: Path) -> None:
    save(tmp_path / "step.1", "old")
    (tmp_path / "step.1").rename(tmp_path / f".spartito-old-{TOKEN}-step.1")
    sweep(tmp_path)
    verify(tmp_path / "step.1")
    assert hidden(tmp_path) == []


def test_what_was_moved_aside_and_replaced_goes(tmp_path: Path) -> None:
    save(tmp_path / "one", "old")
    (tmp_path / "one").rename(tmp_path / f".spartito-old-{TOKEN}-one")
    save(tmp_path / "one", "new")
    (tmp_path / f".spartito-new-{TOKEN}-best.json").write_text("half")
    sweep(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["one"]
    assert (tmp_path / "one" / "a.txt").read_text() == "new"


def test_other_hidden_things_are_not_swept(tmp_path: Path) -> None:
    folders = (".git", ".config.old", ".venv.0123abcd.new", f".spartito-new-{TOKEN}-")
    files = [".hidden.txt", ".env.old", ".vimrc.new", ".x.0123abcd.old", ".spartito-new-0123-x"]
    files += [f".spartito-old-{TOKEN}", f".spartito-own-{TOKEN}-x", f"spartito-new-{TOKEN}-x"]
    for name in folders:
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("mine")
    for name in files:
        (tmp_path / name).write_text("mine")
    (tmp_path / f".spartito-new-{TOKEN}-link").symlink_to(".git")
    before = sorted(tmp_path.rglob("*"))
    assert sweep(tmp_path) == []
    assert sweep(tmp_path / "absent") == []
    assert sorted(tmp_path.rglob("*")) == before


def test_a_directory_with_a_users_file_in_it_is_not_replaced(tmp_path: Path) -> None:
    save(tmp_path / "one")
    note = tmp_path / "one" / "sub" / "note"
    note.write_text("mine")
    with pytest.raises(UserError, match=r"one cannot be replaced: sub/note in it is not of"):
        save(tmp_path / "one", "new")
    assert note.read_text() == "mine"
    verify(tmp_path / "one")
    note.unlink()
    (tmp_path / "one" / "link").symlink_to(tmp_path)
    with pytest.raises(UserError, match="link in it is not of"):
        save(tmp_path / "one", "new")
    (tmp_path / "other").symlink_to("one")
    with pytest.raises(UserError, match="other is a link to one, which would be replaced"):
        save(tmp_path / "other")
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / MANIFEST).write_text('{"name": "my app"}')
    with pytest.raises(UserError, match="app is a folder with other files"):
        save(tmp_path / "app")
    assert hidden(tmp_path) == []


def test_what_is_removed_is_what_the_manifest_names(tmp_path: Path) -> None:
    for name in ("one", "two", "link"):
        save(tmp_path / name)
    assert remove_directory(tmp_path / "one")
    assert not (tmp_path / "one").exists()
    (tmp_path / "two" / "sub" / "note").write_text("mine")
    assert not remove_directory(tmp_path / "two")
    assert [p for p in (tmp_path / "two").rglob("*") if p.is_file()] == [
        tmp_path / "two" / "sub" / "note"
    ]
    (tmp_path / "to").symlink_to("link")
    for path in (tmp_path / "two", tmp_path / "to"):
        assert not remove_directory(path)
    verify(tmp_path / "link")
