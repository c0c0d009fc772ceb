"""A store is one job's at a time, by a record that he renews."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from spartito.errors import UserError
from spartito.folders import Holder
from spartito.storage import store_lock
from spartito.storage.store_lock import HeldStore
from spartito.storage.stores import FsspecStore
from tests.skips import on_linux

OTHER = "holder-0000000000000007.json"


def records(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "bucket" / store_lock.FOLDER).iterdir())


def store(tmp_path: Path) -> FsspecStore:
    return FsspecStore(f"file://{tmp_path}/bucket/{store_lock.FOLDER}")


def record(tmp_path: Path, text: str = "", **other: object) -> Path:
    """That of a process on another machine."""
    raw = json.loads(Holder.own().encode()) | {"host": "node7", "life": ["another/pid", 7, 7]}
    file = tmp_path / "bucket" / store_lock.FOLDER / OTHER
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(raw | other) + f"\n{text}\n")
    return file


def clock(monkeypatch: pytest.MonkeyPatch, then: Callable[[], object]) -> None:
    """Time that goes by at once; something happens meanwhile."""
    now, pause, here = [0.0], time.sleep, threading.get_ident()

    def sleep(seconds: float) -> None:
        if threading.get_ident() != here:  # what renews a record goes by the real one
            pause(seconds)
        else:
            now[0] += seconds
            then()

    monkeypatch.setattr(time, "sleep", sleep)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])


def test_who_renews_its_record_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record(tmp_path)
    clock(monkeypatch, lambda: record(tmp_path, "later"))
    with pytest.raises(UserError, match=r"bucket is in use by another job: process 7 on node7"):
        HeldStore(store(tmp_path))


@pytest.mark.parametrize("how", ["left", "removed"])
def test_who_is_gone_is_outlasted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    file = record(tmp_path)
    with monkeypatch.context() as patch:
        clock(patch, lambda: file.unlink(missing_ok=True) if how == "removed" else None)
        mine = HeldStore(store(tmp_path))
    assert not file.exists()
    (name,) = records(tmp_path)
    found = Holder.of(file.with_name(name).read_bytes())
    assert found is not None
    assert found.life == Holder.own().life
    mine.let_go()
    assert records(tmp_path) == []


@on_linux
def test_a_process_of_this_machine_that_has_ended_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    namespace, pid, _ = Holder.own().life
    record(tmp_path, life=[namespace, pid, 1])  # the number is another process's now
    clock(monkeypatch, lambda: pytest.fail("it waits"))
    HeldStore(store(tmp_path)).let_go()


def test_one_that_was_frozen_sees_that_another_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_lock, "RENEW_SECONDS", 0.01)
    mine = HeldStore(store(tmp_path))
    mine.check()
    (name,) = records(tmp_path)
    file = tmp_path / "bucket" / store_lock.FOLDER / name
    first = file.read_bytes()
    while file.read_bytes() == first:  # it renews it
        pass
    theirs = record(tmp_path)
    while mine._thread.is_alive():  # it may just have written it anew
        file.unlink(missing_ok=True)
    with pytest.raises(UserError, match="on node7"):
        mine.check()
    mine.let_go()
    assert theirs.exists()


def test_who_was_frozen_is_seen_at_the_next_save_at_the_latest(tmp_path: Path) -> None:
    mine = HeldStore(store(tmp_path))
    (name,) = records(tmp_path)
    (tmp_path / "bucket" / store_lock.FOLDER / name).unlink()
    mine.check()  # nobody else has it
    record(tmp_path)
    with pytest.raises(UserError, match="on node7"):
        mine.check()
    mine.let_go()


def test_a_record_that_is_just_being_written_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record(tmp_path).write_bytes(b"")
    clock(monkeypatch, lambda: record(tmp_path))
    with pytest.raises(UserError, match="process 7 on node7"):
        HeldStore(store(tmp_path))


class Meets(FsspecStore):
    """Another process writes its record when this one has found none, or after that."""

    def __init__(self, folder: Path, then: Callable[[], object]) -> None:
        super().__init__(f"file://{folder}/bucket/{store_lock.FOLDER}")
        self._then = [then]

    def put(self, file: Path, name: str) -> None:
        super().put(file, name)
        while self._then:
            self._then.pop()()


@pytest.mark.parametrize("name", ["holder-0000000000000007.json", "holder-ffffffffffffffff.json"])
def test_of_two_that_come_at_the_same_time_one_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The first by name, unless the other was complete before."""
    monkeypatch.setattr(f"{__name__}.OTHER", name)
    monkeypatch.setattr("secrets.token_hex", lambda _: "8" * 16)
    comes = Meets(tmp_path, lambda: record(tmp_path))
    with monkeypatch.context() as patch:
        if name < "holder-8":
            with pytest.raises(UserError, match="process 7 on node7"):
                HeldStore(comes)
            assert records(tmp_path) == [name]
            return
        file = tmp_path / "bucket" / store_lock.FOLDER / name
        clock(patch, lambda: file.unlink(missing_ok=True))  # the other sees ours, and leaves
        HeldStore(comes).let_go()
    assert records(tmp_path) == []
    with monkeypatch.context() as patch:
        clock(patch, lambda: record(tmp_path, "renewed"))
        with pytest.raises(UserError, match="process 7 on node7"):
            HeldStore(Meets(tmp_path, lambda: record(tmp_path)))
    assert records(tmp_path) == [name]


def test_a_store_that_refuses_is_said_and_hinders_nobody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "bucket").touch()
    HeldStore(store(tmp_path)).let_go()
    assert "another job is not kept off" in caplog.text
