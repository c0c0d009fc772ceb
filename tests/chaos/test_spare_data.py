"""What a suite spoils is a copy; the user's file is only read."""

from __future__ import annotations

from pathlib import Path

import pytest

from spartito.chaos.inject import Target, inject
from spartito.chaos.spare_data import spare_data
from spartito.errors import UserError


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    folder = tmp_path / "photos"
    (folder / "cat").mkdir(parents=True)
    (folder / "empty").mkdir()
    for name in ("cat/1.png", "cat/2.png", "labels.csv"):
        (folder / name).write_text(f"what is in {name}")
    (folder / "cat" / "3.png").symlink_to("2.png")
    return folder


def contents(folder: Path) -> dict[str, str]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_text() for path in files}


def spoiled(path: Path) -> None:
    inject("corrupt", Target(0, path.parent, path))


@pytest.mark.parametrize("how", ["data", "word", "flag", "relative"])
def test_a_copy_is_spoiled(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.chdir(tmp_path)
    words = {"data": (), "word": (f"{photos}",), "flag": (f"--images={photos}",),
             "relative": ("--in", "photos")}[how]  # fmt: skip
    before, sample = contents(photos), photos / "cat" / "2.png"
    data = str(photos) if how == "data" else None
    with spare_data(("--epochs=3", *words), data, sample, tmp_path / "out") as spare:
        assert spare.sample is not None
        copy = spare.sample.parents[1]
        assert contents(copy) == before
        assert (copy / "empty").is_dir()
        assert not [path for path in copy.rglob("*") if path.is_dir() and path.is_symlink()]
        assert spare.arguments[0] == "--epochs=3"
        if how == "data":
            assert spare.data == str(copy)
        else:
            assert spare.arguments[-1].partition("=")[2] or spare.arguments[-1] == str(copy)
            assert str(copy) in spare.arguments[-1]
        spoiled(spare.sample)
        changed = {name for name, text in contents(copy).items() if before[name] != text}
        assert changed == {"cat/2.png", "cat/3.png"}
        assert contents(photos) == before
    assert contents(photos) == before
    assert not [*(tmp_path / "out").iterdir()]


def test_the_copy_may_lie_inside_of_the_data(photos: Path) -> None:
    before, sample = contents(photos), photos / "cat" / "1.png"
    with spare_data((str(photos),), None, sample, photos / "out") as spare:
        assert contents(Path(spare.arguments[0])) == before
    assert contents(photos) == before


def test_a_program_that_is_given_the_file_alone(photos: Path, tmp_path: Path) -> None:
    sample = photos / "labels.csv"
    with spare_data((f"--table={sample}",), None, sample, tmp_path / "out") as spare:
        assert spare.sample is not None
        assert spare.arguments == (f"--table={spare.sample}",)
        spoiled(spare.sample)
    assert sample.read_text() == "what is in labels.csv"


def test_a_sample_that_no_argument_names_is_refused(photos: Path, tmp_path: Path) -> None:
    sample = photos / "cat" / "1.png"
    for words in ((), ("--epochs=3", "/"), (str(photos / "empty"),)):
        with (
            pytest.raises(UserError, match="it is a copy that is spoiled"),
            spare_data(words, None, sample, tmp_path / "out"),
        ):
            pass
    with spare_data(("x",), "s3://b/x", None, tmp_path / "out") as spare:
        assert (spare.arguments, spare.data, spare.sample) == (("x",), "s3://b/x", None)
