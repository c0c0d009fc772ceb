"""The cache of remote parts: fetched once, proven, and never larger than its limit for long."""

from __future__ import annotations

import multiprocessing
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from spartito.errors import UserError
from spartito.storage.span_cache import Entry, SpanCache, bytes_of, default_cache

ONE = Entry(("s3://bucket", "a", "version", "0", "5"))


def never() -> bytes:
    raise AssertionError("it is there")


def test_what_was_fetched_is_there_for_all(tmp_path: Path) -> None:
    assert SpanCache(tmp_path).get(ONE, lambda: b"12345") == b"12345"
    assert SpanCache(tmp_path).get(ONE, never) == b"12345"
    assert SpanCache(tmp_path).get(Entry((*ONE.words, "")), lambda: b"other") == b"other"


@pytest.mark.parametrize("damage", [b"", b"1", b"12x45", b"12345" * 9])
def test_what_is_damaged_is_fetched_again(tmp_path: Path, damage: bytes) -> None:
    cache = SpanCache(tmp_path)
    cache.get(ONE, lambda: b"12345")
    file = tmp_path / ONE.name
    data = file.read_bytes()
    file.write_bytes(damage + data[len(damage) :] if len(damage) == 5 else damage)
    assert cache.get(ONE, lambda: b"12345") == b"12345"
    assert file.read_bytes() == data


def test_a_fetch_that_fails_leaves_nothing(tmp_path: Path) -> None:
    cache = SpanCache(tmp_path)
    with pytest.raises(AssertionError, match="it is there"):
        cache.get(ONE, never)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    assert cache.get(ONE, lambda: b"12345") == b"12345"


def _fetch(folder: Path, log: Path) -> None:
    cache = SpanCache(folder)
    for number in range(50):

        def fetch(number: int = number) -> bytes:
            with open(log, "a") as file:
                file.write(f"{number}\n")
            return b"%d" % number

        assert cache.get(Entry((str(number),)), fetch) == b"%d" % number


def test_of_several_processes_one_fetches(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    log = tmp_path / "log"
    tasks = [context.Process(target=_fetch, args=(tmp_path / "cache", log)) for _ in range(3)]
    for task in tasks:
        task.start()
    for task in tasks:
        task.join()
    assert [task.exitcode for task in tasks] == [0, 0, 0]
    assert sorted(map(int, log.read_text().split())) == list(range(50))


def test_what_was_not_read_for_the_longest_time_goes(tmp_path: Path) -> None:
    cache = SpanCache(tmp_path, limit=10_000)
    entries = [Entry((str(number),)) for number in range(30)]
    for number, entry in enumerate(entries):
        cache.get(entry, lambda: bytes(1000))
        os.utime(tmp_path / entry.name, (number, number))
        if cache.has(entries[0]):
            assert cache.get(entries[0], never) == bytes(1000)  # which makes it the newest
    used = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    assert used <= 11_000
    assert cache.has(entries[0])
    assert cache.has(entries[29])
    assert not cache.has(entries[1])


def test_what_is_not_its_own_stays(tmp_path: Path) -> None:
    names = ("ab/notes.txt", "ab/0123456789", "my/paper.tex", "ab/.new", "cd/x.claim")
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(bytes(5000))
        os.utime(tmp_path / name, (0, 0))
    (tmp_path / "ef").symlink_to(tmp_path / "my")
    cache = SpanCache(tmp_path, limit=2000)
    for number in range(20):
        cache.get(Entry((str(number),)), lambda: bytes(1000))
    assert all((tmp_path / name).stat().st_size == 5000 for name in names)
    assert cache.has(Entry(("19",)))


@contextmanager
def small_files(size: int) -> Iterator[None]:
    """No file may be longer, as on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_without_space_all_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache = SpanCache(tmp_path)
    with small_files(1000):
        for _ in range(2):
            assert cache.get(ONE, lambda: bytes(2000)) == bytes(2000)
    assert caplog.text.count("takes no more") == 1
    assert not cache.has(ONE)
    assert list(tmp_path.rglob("*.new")) == []


def test_what_the_environment_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARTITO_CACHE", str(tmp_path / "here"))
    monkeypatch.setenv("SPARTITO_CACHE_LIMIT", "1.5 GB")
    assert (default_cache().folder, default_cache().limit) == (tmp_path / "here", 1_500_000_000)
    monkeypatch.delenv("SPARTITO_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache().folder == tmp_path / "spartito"
    assert [bytes_of(text, "x") for text in ("1000", "2k", "3MiB")] == [1000, 2000, 3 << 20]
    for text in ("much", "-1GB", "0"):
        with pytest.raises(UserError, match="not a number of bytes"):
            bytes_of(text, "x")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be made"):
        SpanCache(tmp_path / "file" / "cache")
