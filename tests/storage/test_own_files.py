"""Files of a user that have the name of one of ours."""

from __future__ import annotations

from pathlib import Path

import pytest

from spartito.errors import UserError
from spartito.storage.own_files import begins_with, check_own, contains, has_keys

FILES = {
    "a.json": has_keys("spartito", "torch"),
    "b.jsonl": begins_with('{"epoch": '),
    "c.html": contains("· Spartito<"),
}


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.json", b'{"spartito": 1, "torch": 2, "more": 3}'),
        ("a.json", b""),
        ("b.jsonl", b'{"epoch": 1, "loss": 2}\n{"epo'),
        ("b.jsonl", b'{"ep'),
        ("c.html", "<title>x · Spartito</title>".encode()),
        ("d.txt", b"anything"),
    ],
)
def test_ours_are_known(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    check_own(tmp_path, FILES)
    check_own(tmp_path / "missing", FILES)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.json", b'{"spartito": 1}'),
        ("a.json", b'{"spartito": 1, "torch": 2'),
        ("a.json", b'["spartito", "torch"]'),
        ("a.json", b"\xff\xfe"),
        ("b.jsonl", b'{"loss": 1}'),
        ("c.html", b"<title>mine</title>"),
    ],
)
def test_a_users_own_is_refused(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=f"{name} was not written by Spartito, and would be"):
        check_own(tmp_path, FILES)


def test_a_link_would_be_replaced_too(tmp_path: Path) -> None:
    (tmp_path / "a.json").symlink_to("somewhere")
    with pytest.raises(UserError, match="would be replaced"):
        check_own(tmp_path, FILES)
