"""Characters of a text, and those that come next."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch

import spartito as sp
from spartito.data.sets.text import Windows, decode, encode
from spartito.errors import UserError

ROOT = Path(__file__).parents[2]


def test_each_character_stands_beside_the_next_one(tmp_path: Path) -> None:
    whole = "".join(chr(97 + number * number % 26) for number in range(400)) + "é€"
    (tmp_path / "text").write_text(whole, encoding="utf-8")
    train = sp.data.characters(tmp_path / "text", "training", 7)
    validation = sp.data.characters(tmp_path / "text", "validation", 7)
    assert train.classes == validation.classes == tuple(sorted(set(whole)))
    for data, part in ((train, whole[:362]), (validation, whole[362:])):
        assert len(data) == (len(part) - 1) // 7
        read = [(decode(x, data.classes), decode(y, data.classes)) for x, y in data]
        wanted = [(part[at : at + 7], part[at + 1 : at + 8]) for at in range(0, len(part) - 7, 7)]
        assert read == wanted


def test_batches_are_the_examples_stacked() -> None:
    windows = Windows(torch.arange(50, dtype=torch.uint8), 6)
    rows = torch.tensor([7, 0, 3])
    x, y = windows.gather(rows)
    assert (x.dtype, y.dtype) == (torch.int64, torch.int64)
    for row, index in enumerate(rows.tolist()):
        assert torch.equal(torch.stack(windows[index]), torch.stack([x[row], y[row]]))


def test_a_text_that_is_read_is_changed_by_nobody() -> None:
    windows = Windows(torch.arange(50, dtype=torch.int32), 6)
    for x, y in (windows[0], windows.gather(slice(0, 2))):
        x.zero_()
        y.zero_()
    assert windows[0][0].tolist() == [0, 1, 2, 3, 4, 5]


def test_the_plays_of_the_package() -> None:
    data = sp.data.characters()
    assert (len(data), len(sp.data.characters(subset="validation"))) == (11_751, 1_305)
    assert len(data.classes) == 72
    whole = "".join(decode(x, data.classes) for x, _ in data)
    assert whole.startswith("ACT I.\n\nScene I. Elsinore.")
    assert hashlib.sha256(whole.encode()).hexdigest() == (
        "a5cc1c4ce92b01677f41e8aec51c13b0d47ddcdb9fcfaa13a98f859f5d3d8dbf"
    )


def test_source_and_licence_lie_beside_the_text() -> None:
    text = (ROOT / "src/spartito/data/files/README.md").read_text()
    for word in ("public\ndomain", "Project Gutenberg", "Globe", "pack_plays.py"):
        assert word in text


def test_what_is_encoded_is_decoded_and_unknown_characters_are_named() -> None:
    assert decode(encode("cab", "abc"), "abc") == "cab"
    with pytest.raises(UserError, match=r"'x' does not occur(.|\n)* It has: abc"):
        encode("cax", "abc")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"ab" * 300, "600 characters, too few for examples of 64(.|\n)*650 or more"),
        (b"caf\xe9" * 900, "no text in UTF-8: byte 3 is 0xe9"),
        (b"", "0 characters"),
        (None, "No such file"),
    ],
)
def test_what_is_no_text_is_refused(tmp_path: Path, content: bytes | None, words: str) -> None:
    if content is not None:
        (tmp_path / "text").write_bytes(content)
    with pytest.raises(UserError, match=words):
        sp.data.characters(tmp_path / "text")


def test_a_folder_is_no_text(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is a directory"):
        sp.data.characters(tmp_path)
