"""Directories in a store without renames are whole, whichever operation was the last one."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spartito.errors import UnwritableError, UserError
from spartito.storage.atomic import (
    FORMAT,
    MANIFEST,
    NewerFormatError,
    read_manifest,
    write_directory,
)
from spartito.storage.remote import (
    PLAN,
    Store,
    UnreadableError,
    download,
    remove_all,
    remove_older,
    upload,
    whole_ones,
)
from spartito.storage.stores import FsspecStore


class Memory(Store):
    """Files in a dict, which fails at an operation, after some of its bytes."""

    url = "memory"

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.left, self.torn = -1, 0.0
        self.gone: set[str] = set()

    def fail_after(self, operations: int, torn: float) -> None:
        self.left, self.torn = operations, torn

    def sizes(self) -> dict[str, int]:
        return {name: len(content) for name, content in self.files.items()}

    def read(self, name: str) -> bytes:
        if name in self.gone:
            raise UnreadableError("503")
        return self.files[name]

    def get(self, name: str, file: Path) -> None:
        file.write_bytes(self.files[name])

    def put(self, file: Path, name: str) -> None:
        assert name not in self.files  # nothing is ever written twice
        content = file.read_bytes()
        if self.left == 0:
            self.files[name] = content[: int(len(content) * self.torn)]
        self._do()
        self.files[name] = content

    def remove(self, name: str) -> None:
        self._do()
        del self.files[name]

    def _do(self) -> None:
        if self.left == 0:
            raise UnwritableError("the store is gone")
        self.left -= 1


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directories by their number."""
    folder = tmp_path_factory.mktemp("written")
    for number in (1, 2, 3, 4, 9):
        with write_directory(folder / f"{number}", {"sequence": number}) as new:
            (new / "a").write_text(f"a of {number}")
            (new / "b").write_text(f"b of {number}" * number)
    return folder


def called(number: int | str) -> str:
    return f"step-{int(number):08d}.{int(number):016x}"


def save(store: Memory, path: Path) -> None:
    """Save one as backups are saved."""
    upload(store, path, called(path.name))
    remove_older(store, [name for name, _ in whole_ones(store)][-2:], 2)


@given(st.integers(0, 20), st.sampled_from([0.0, 0.5, 0.99, 1.0]))
def test_what_is_found_is_whole_and_the_newest(written: Path, operations: int, torn: float) -> None:
    store, done = Memory(), 0
    store.fail_after(operations, torn)
    try:
        for number in range(1, 5):
            save(store, written / f"{number}")
            done = number
    except UnwritableError:
        pass
    found = [name for name, _ in whole_ones(store)]
    uploaded = called(done + 1) in found  # and what went wrong came after it
    newest = done + uploaded
    assert found[-1:] == ([called(newest)] if newest else [])
    assert len(found) >= min(newest, 2)  # should the newest be damaged
    with tempfile.TemporaryDirectory() as folder:
        for name in found:
            download(store, name, Path(folder) / name)
            assert read_manifest(Path(folder) / name) == read_manifest(
                written / str(int(name[5:13]))
            )
    store.fail_after(-1, 0.0)
    save(store, written / "9")
    names = {file.partition("/")[0] for file in store.files}
    if found:  # nothing is left of what was cut off, once there are two
        assert names == {*found[-1:], called(9)}
    assert {*found[-1:], called(9)} <= names
    remove_all(store)
    assert not store.files


THEIRS = ("notes.txt", "best/manifest.json", "best/a", "data.0123abcd/x", "step-1/manifest.json")


@pytest.mark.parametrize("inside", ["notes", MANIFEST + ".bak", "sub/x"])
def test_what_a_user_has_in_the_store_stays(written: Path, inside: str) -> None:
    store = Memory()
    store.files |= dict.fromkeys(THEIRS, b"mine")
    copy = {f"good/{name}": b"mine" for name in ("a", "b", MANIFEST)}
    for number in (1, 2, 3):
        save(store, written / f"{number}")
        store.files |= copy | {f"{called(number)}/{inside}": b"mine"}
    save(store, written / "4")
    assert [name for name, _ in whole_ones(store)] == [called(3), called(4)]
    remove_all(store)
    theirs = {*THEIRS, *copy, *(f"{called(number)}/{inside}" for number in (1, 2, 3))}
    assert store.files == dict.fromkeys(theirs, b"mine")


def test_what_cannot_be_read_for_a_moment_is_not_taken_for_cut_off(written: Path) -> None:
    store = Memory()
    for number in (1, 2):
        save(store, written / f"{number}")
    store.gone = {f"{called(2)}/{MANIFEST}"}
    before = dict(store.files)
    with pytest.raises(UnreadableError, match="503"):
        whole_ones(store)
    with pytest.raises(UnreadableError, match="503"):
        remove_all(store)
    assert {*before} - {*store.files} <= {f"{called(1)}/{n}" for n in ("a", "b", MANIFEST, PLAN)}


def test_what_a_later_version_wrote_is_not_taken_for_cut_off(written: Path) -> None:
    store = Memory()
    upload(store, written / "1", called(1))
    for name in (PLAN, MANIFEST):
        newer = json.loads(store.files[f"{called(1)}/{name}"]) | {"format": FORMAT + 1}
        store.files[f"{called(1)}/{name}"] = json.dumps(newer).encode()
    before = dict(store.files)
    for work in (whole_ones, remove_all):
        with pytest.raises(NewerFormatError):
            work(store)
    assert store.files == before


def test_nothing_goes_while_too_few_are_known(written: Path) -> None:
    store = Memory()
    for number in (1, 2):
        upload(store, written / f"{number}", called(number))
    before = dict(store.files)
    remove_older(store, [called(2)], 2)
    assert store.files == before


def test_a_changed_file_is_not_read(written: Path, tmp_path: Path) -> None:
    store = Memory()
    save(store, written / "1")
    store.files[f"{called(1)}/a"] = b"b of 1"
    with pytest.raises(UserError, match="has changed"):
        download(store, called(1), tmp_path / "read")


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("nope://x", "unknown protocol, 'nope'"),
        ("s4://x", r"unknown protocol, 's4'\n.*'s3'"),
        ("gs://x/y", r"cannot be reached.*\n.*spartito\[gcs\]"),
        ("dropbox://x", r"cannot be reached.*\n.*spartito\[remote\]"),
    ],
)
def test_a_protocol_that_cannot_be_used_is_named(url: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        FsspecStore(url)
