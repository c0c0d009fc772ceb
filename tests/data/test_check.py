"""Every kind of bad file gets its verdict, and what is done about it is done to it alone."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import zlib
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from spartito.data.images.check import Finding, check_folder, inspect, main_check, scan
from spartito.data.images.headers import Kind
from spartito.errors import UserError
from tests.commands import LIMIT
from tests.skips import skip_if

CAMERA = ((500, 375), (4000, 3000))
EXIF = Image.Exif()
EXIF[0x0112] = 6


@cache
def picture(size: tuple[int, int] = (64, 48), mode: str = "RGB") -> Image.Image:
    """A smooth random picture, as hard to compress as a photo is."""
    coarse = np.random.default_rng(7).integers(0, 256, (12, 16, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC).convert(mode)


@cache
def encoded(
    kind: str, size: tuple[int, int] = (64, 48), mode: str = "RGB", progressive: bool = False
) -> bytes:
    buffer = BytesIO()
    options: dict[str, Any] = {"progressive": True} if progressive else {}
    picture(size, mode).save(buffer, kind, **options)
    return buffer.getvalue()


def without_jfif(jpeg: bytes) -> bytes:
    """``jpeg`` without its first segment, which is JFIF's."""
    length = int.from_bytes(jpeg[4:6], "big")
    return jpeg[:2] + jpeg[4 + length :]


def exif_only(size: tuple[int, int] = (64, 48)) -> bytes:
    """A JPEG as a camera writes it: Exif at once after the start."""
    bare = without_jfif(encoded("JPEG", size))
    payload = EXIF.tobytes()  # it has b"Exif\0\0" in front
    return bare[:2] + b"\xff\xe1" + struct.pack(">H", len(payload) + 2) + payload + bare[2:]


def png_claiming(width: int, height: int) -> bytes:
    """A PNG whose header promises other dims than its data has, with a right checksum."""
    png = encoded("PNG")
    head = b"IHDR" + struct.pack(">II", width, height) + png[24:29]
    return png[:12] + head + struct.pack(">I", zlib.crc32(head)) + png[33:]


def verdict(path: Path, data: bytes, jfif_only: bool = False) -> Kind | None:
    path.write_bytes(data)
    finding = inspect(path, jfif_only)
    assert finding is None or finding.path == path
    return finding.kind if finding else None


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two classes with two good and four bad files, and two that are nobody's business."""
    cat, dog = tmp_path / "pets" / "Cat", tmp_path / "pets" / "Dog" / "old"
    cat.mkdir(parents=True)
    dog.mkdir(parents=True)
    (cat / "1.jpg").write_bytes(encoded("JPEG"))
    (cat / "2.jpg").write_bytes(encoded("JPEG", (500, 375))[:9000])
    (cat / "3.jpg").write_bytes(b"")
    (cat / "Thumbs.db").write_bytes(b"\xd0\xcf\x11\xe0")
    (cat / "._1.jpg").write_bytes(b"\0\5\x16\7")
    (dog / "1.jpg").write_bytes(encoded("GIF", mode="P"))
    (dog / "2.png").write_bytes(encoded("PNG"))
    (dog / "3.jpg").write_bytes(b"")
    return tmp_path / "pets"


BAD = {
    "Cat/2.jpg": Kind.TRUNCATED,
    "Cat/3.jpg": Kind.EMPTY,
    "Dog/old/1.jpg": Kind.WRONG_HEADER,
    "Dog/old/3.jpg": Kind.EMPTY,
}


def listing(directory: Path) -> list[str]:
    return sorted(
        p.relative_to(directory).as_posix() for p in directory.rglob("*") if not p.is_dir()
    )


def test_the_report_has_all_bad_files_in_order(folder: Path) -> None:
    before = listing(folder)
    report = check_folder(folder)
    found = {f.path.relative_to(folder).as_posix(): f.kind for f in report.findings}
    assert list(found.items()) == list(BAD.items())
    assert (report.checked, report.ignored, report.left) == (6, 2, 4)
    assert report.kinds == {Kind.EMPTY: 2, Kind.TRUNCATED: 1, Kind.WRONG_HEADER: 1}
    assert next(iter(report.kinds)) is Kind.EMPTY
    assert list(scan(folder)) == list(report.findings)
    assert listing(folder) == before


def test_progress_counts_every_file(folder: Path) -> None:
    seen: list[tuple[int, int]] = []
    check_folder(folder, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(n, 6) for n in range(1, 7)]


def test_remove_takes_the_bad_and_nothing_else(folder: Path) -> None:
    before = listing(folder)
    report = check_folder(folder, remove=True)
    assert [p.relative_to(folder).as_posix() for p in report.removed] == list(BAD)
    assert report.left == 0
    assert listing(folder) == [name for name in before if name not in BAD]
    assert check_folder(folder).findings == ()


def test_move_keeps_paths_and_bytes(folder: Path, tmp_path: Path) -> None:
    before = {name: (folder / name).read_bytes() for name in listing(folder)}
    report = check_folder(folder, move_to=tmp_path / "new" / "bad")
    assert report.left == 0
    assert listing(tmp_path / "new" / "bad") == sorted(BAD)
    after = {name: (tmp_path / "new" / "bad" / name).read_bytes() for name in BAD}
    after |= {name: (folder / name).read_bytes() for name in listing(folder)}
    assert after == before


def test_move_never_overwrites(folder: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad"
    (bad / "Cat").mkdir(parents=True)
    (bad / "Cat" / "2.jpg").write_text("mine")
    (bad / "Cat" / "2-1.jpg").write_text("mine too")
    check_folder(folder, move_to=bad)
    assert (bad / "Cat" / "2.jpg").read_text() == "mine"
    assert (bad / "Cat" / "2-1.jpg").read_text() == "mine too"
    assert (bad / "Cat" / "2-2.jpg").read_bytes() == encoded("JPEG", (500, 375))[:9000]


def test_what_cannot_be_moved_stays_and_is_named(folder: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad"
    bad.mkdir()
    (bad / "Cat").write_text("a file where a folder is wanted")
    report = check_folder(folder, move_to=bad)
    assert [p.name for p, _ in report.failed] == ["2.jpg", "3.jpg"]
    assert report.left == 2
    assert (folder / "Cat" / "2.jpg").stat().st_size == 9000
    assert not (folder / "Dog" / "old" / "1.jpg").exists()


def test_a_bad_link_is_removed_and_not_its_target(tmp_path: Path) -> None:
    (tmp_path / "pets").mkdir()
    (tmp_path / "text.txt").write_text("hello")
    (tmp_path / "pets" / "a.jpg").symlink_to(tmp_path / "text.txt")
    assert check_folder(tmp_path / "pets", remove=True).left == 0
    assert (tmp_path / "text.txt").read_text() == "hello"
    assert listing(tmp_path / "pets") == []


def test_linked_folders_are_read_once_even_in_a_circle(folder: Path) -> None:
    (folder / "Zoo").symlink_to(folder)
    (folder / "Dog" / "up").symlink_to(folder / "Dog")
    assert check_folder(folder).checked == 6


def test_mistakes_of_the_user_are_told_before_anything_is_touched(
    folder: Path, tmp_path: Path
) -> None:
    before = listing(folder)
    (tmp_path / "empty").mkdir()
    (tmp_path / "file.txt").touch()
    with pytest.raises(UserError, match="exclude each other"):
        check_folder(folder, remove=True, move_to=tmp_path / "bad")
    for inside in (folder, folder / "bad", folder / ".." / folder.name / "bad"):
        with pytest.raises(UserError, match="inside the folder"):
            check_folder(folder, move_to=inside)
    with pytest.raises(UserError, match="cannot be written"):
        check_folder(folder, move_to=tmp_path / "file.txt" / "bad")
    with pytest.raises(UserError, match="does not exist"):
        check_folder(tmp_path / "nowhere", remove=True)
    with pytest.raises(UserError, match="not a directory"):
        check_folder(folder / "Cat" / "1.jpg", remove=True)
    with pytest.raises(UserError, match="no image file"):
        check_folder(tmp_path / "empty")
    assert listing(folder) == before


def test_the_command_prints_counts_and_names(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main_check(folder) == 1
    lines = capsys.readouterr().out.splitlines()
    for name in BAD:
        assert any(str(folder / name) in line for line in lines)
    assert "empty: 2" in lines
    assert lines[-1] == (
        f"checked 6 image files in {folder} (2 others passed over by name): "
        "4 bad, 0 removed, 0 moved"
    )


def test_the_last_line_is_json_and_the_exit_code_follows(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main_check(folder, json=True) == 1
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (figures["checked"], figures["bad"], figures["left"]) == (6, 4, 4)
    assert figures["kinds"] == {"empty": 2, "truncated": 1, "wrong_header": 1}
    assert [f["path"] for f in figures["findings"]] == [str(folder / name) for name in BAD]
    assert main_check(folder, move_to=tmp_path / "bad", json=True) == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (figures["left"], len(figures["moved"])) == (0, 4)
    assert main_check(folder, remove=True) == 0


def test_mistakes_end_with_2_and_one_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main_check(tmp_path / "nowhere") == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "nowhere' does not exist" in captured.err


def test_a_name_that_is_no_text_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / os.fsdecode(b"caf\xe9.jpg")).write_bytes(b"")
    assert main_check(tmp_path, json=True) == 1
    assert "empty: " in capsys.readouterr().out


def test_importing_the_check_does_not_import_torch() -> None:
    code = "import sys, spartito.data.images.check; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=LIMIT)


def test_a_finding_is_frozen(folder: Path) -> None:
    finding = next(iter(scan(folder)))
    assert finding == Finding(folder / "Cat" / "2.jpg", Kind.TRUNCATED, finding.detail)
    with pytest.raises(AttributeError):
        finding.kind = Kind.EMPTY  # type: ignore[misc]


PHOTOS = Path(__file__).parents[3] / "shared" / "data" / "PetImages"


@skip_if(not PHOTOS.is_dir(), "data", "the folder of real photos is absent")
def test_real_photos_are_all_good() -> None:
    report = check_folder(PHOTOS, jfif_only=True)
    assert (report.checked, report.findings) == (4999, ())
