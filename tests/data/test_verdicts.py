"""What the check says of one file."""

from __future__ import annotations

import os
import random
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spartito.data.images.check import scan
from spartito.data.images.headers import Kind
from tests.data.test_check import CAMERA, encoded, exif_only, png_claiming, verdict, without_jfif

GOOD = {
    "bmp": lambda: encoded("BMP"),
    "gif": lambda: encoded("GIF", mode="P"),
    "jpg": lambda: encoded("JPEG"),
    "jpeg": lambda: encoded("JPEG", progressive=True),
    "png": lambda: encoded("PNG", mode="RGBA"),
    "webp": lambda: encoded("WEBP"),
}


@pytest.mark.parametrize("ending", GOOD)
def test_good_files_of_every_format_are_good(tmp_path: Path, ending: str) -> None:
    assert verdict(tmp_path / f"a.{ending}", GOOD[ending](), jfif_only=True) is None
    assert verdict(tmp_path / f"a.{ending.upper()}", GOOD[ending](), jfif_only=True) is None


@pytest.mark.parametrize("size", CAMERA)
@pytest.mark.parametrize("progressive", [False, True])
def test_good_camera_files_are_good(
    tmp_path: Path, size: tuple[int, int], progressive: bool
) -> None:
    data = encoded("JPEG", size, progressive=progressive)
    assert verdict(tmp_path / "a.jpg", data, jfif_only=True) is None
    assert verdict(tmp_path / "a.jpg", exif_only(size)) is None
    assert verdict(tmp_path / "a.jpg", data + b"appended by a camera") is None


@pytest.mark.parametrize("size", CAMERA)
@pytest.mark.parametrize("progressive", [False, True])
@pytest.mark.parametrize("share", [0.0005, 0.01, 0.3, 0.5, 0.9, 0.999])
def test_camera_files_cut_at_any_length_are_truncated(
    tmp_path: Path, size: tuple[int, int], progressive: bool, share: float
) -> None:
    data = encoded("JPEG", size, progressive=progressive)
    cut = data[: max(1, int(share * len(data)))]
    assert verdict(tmp_path / "a.jpg", cut) is Kind.TRUNCATED
    # A download that was cut often keeps its full length, filled with zeros.
    assert verdict(tmp_path / "a.jpg", cut.ljust(len(data), b"\0")) in (
        Kind.TRUNCATED,
        Kind.UNDECODABLE,
        Kind.NOT_AN_IMAGE,
    )


def test_a_thumbnail_does_not_hide_that_the_photo_is_cut(tmp_path: Path) -> None:
    photo, thumbnail = encoded("JPEG", (500, 375)), encoded("JPEG", (160, 120))
    segment = b"\xff\xed" + struct.pack(">H", len(thumbnail) + 2) + thumbnail
    assert verdict(tmp_path / "a.jpg", photo[:2] + segment + photo[2:]) is None
    assert verdict(tmp_path / "a.jpg", photo[:2] + segment + photo[2:-2000]) is Kind.TRUNCATED


@pytest.mark.parametrize("ending", GOOD)
def test_each_cut_of_each_format_is_truncated(tmp_path: Path, ending: str) -> None:
    data = GOOD[ending]()
    last = len(data) - (1 if ending == "gif" else 0)  # a GIF without its last mark is whole
    cuts = {*range(1, 40), *range(40, last, max(1, last // 40)), *range(last - 8, last)}
    verdicts = {n: verdict(tmp_path / f"a.{ending}", data[:n]) for n in sorted(cuts)}
    assert {n: v for n, v in verdicts.items() if v is not Kind.TRUNCATED} == {}


@given(st.randoms(use_true_random=False), st.sampled_from(sorted(GOOD)))
def test_noise_never_raises(
    tmp_path_factory: pytest.TempPathFactory, random: random.Random, ending: str
) -> None:
    data = bytearray(GOOD[ending]())
    for _ in range(random.randint(1, 30)):
        data[random.randrange(min(len(data), 700))] = random.randrange(256)
    verdict(tmp_path_factory.getbasetemp() / f"noise.{ending}", bytes(data))


@pytest.mark.parametrize("content", ["bmp", "gif", "jpg", "png", "webp"])
@pytest.mark.parametrize("ending", ["bmp", "gif", "jpg", "png", "webp"])
def test_a_name_and_a_header_that_differ(tmp_path: Path, content: str, ending: str) -> None:
    wanted = None if content == ending else Kind.WRONG_HEADER
    assert verdict(tmp_path / f"a.{ending}", GOOD[content]()) is wanted


@pytest.mark.parametrize("kind", ["TIFF", "JPEG2000", "AVIF"])
def test_formats_that_training_does_not_read(tmp_path: Path, kind: str) -> None:
    assert verdict(tmp_path / "a.jpg", encoded(kind)) is Kind.WRONG_HEADER


@pytest.mark.parametrize(
    "data",
    [
        b"hello, I am a text",
        b"BMW is a maker of cars, and this is a text about it",
        b"<!DOCTYPE html><title>404</title>",
        b"\0" * 5000,
        b"%PDF-1.7\n",
        encoded("JPEG")[2:],
        bytes(20) + encoded("JPEG"),
    ],
)
def test_what_has_no_header_is_no_image(tmp_path: Path, data: bytes) -> None:
    for ending in ("jpg", "png", "bmp"):
        assert verdict(tmp_path / f"a.{ending}", data) is Kind.NOT_AN_IMAGE


def test_an_empty_file(tmp_path: Path) -> None:
    assert verdict(tmp_path / "a.jpg", b"") is Kind.EMPTY


def test_unreadable_files_do_not_block(tmp_path: Path) -> None:
    (tmp_path / "a.jpg").symlink_to(tmp_path / "gone.jpg")
    (tmp_path / "b.jpg").symlink_to(tmp_path / "b.jpg")
    os.mkfifo(tmp_path / "c.jpg")
    findings = list(scan(tmp_path))
    assert [f.path.name for f in findings] == ["a.jpg", "b.jpg", "c.jpg"]
    assert {f.kind for f in findings} == {Kind.UNREADABLE}
    assert findings[2].detail == "not a regular file"


@pytest.mark.parametrize("size", [(64, 48), *CAMERA])
def test_cmyk(tmp_path: Path, size: tuple[int, int]) -> None:
    assert verdict(tmp_path / "a.jpg", encoded("JPEG", size, mode="CMYK")) is Kind.CMYK


@pytest.mark.parametrize("size", [(64, 48), *CAMERA])
def test_jfif_is_wanted_only_when_asked_for(tmp_path: Path, size: tuple[int, int]) -> None:
    path = tmp_path / "a.jpg"
    assert verdict(path, exif_only(size)) is None
    assert verdict(path, exif_only(size), jfif_only=True) is Kind.NO_JFIF
    bare = without_jfif(encoded("JPEG", size))
    assert verdict(path, bare) is None
    assert verdict(path, bare, jfif_only=True) is Kind.NO_JFIF


def test_jfif_behind_exif_is_jfif(tmp_path: Path) -> None:
    jpeg, exif = encoded("JPEG"), exif_only()
    length = 2 + int.from_bytes(exif[4:6], "big")
    both = jpeg[:2] + exif[2 : 2 + length] + jpeg[2:]
    assert verdict(tmp_path / "a.jpg", both, jfif_only=True) is None


def test_damage_that_a_decoder_forgives(tmp_path: Path) -> None:
    png = bytearray(encoded("PNG"))
    png[len(png) // 2] ^= 1
    assert verdict(tmp_path / "a.png", bytes(png)) is Kind.UNDECODABLE
    assert verdict(tmp_path / "a.png", encoded("PNG")[:-12]) is Kind.TRUNCATED


def test_damaged_headers_are_undecodable(tmp_path: Path) -> None:
    jpeg = bytearray(encoded("JPEG"))
    jpeg[20] = 0  # where the marker after JFIF's segment stands
    assert verdict(tmp_path / "a.jpg", bytes(jpeg)) is Kind.UNDECODABLE
    assert verdict(tmp_path / "a.png", png_claiming(0, 48)) is Kind.UNDECODABLE


def test_a_decompression_bomb(tmp_path: Path) -> None:
    for side in (10_000, 100_000):  # Pillow warns of the one and refuses the other
        assert verdict(tmp_path / "a.png", png_claiming(side, side)) is Kind.UNDECODABLE


def test_broken_exif_is_no_fault_and_no_warning(tmp_path: Path) -> None:
    jpeg = bytearray(exif_only())
    start = jpeg.index(b"Exif\0\0") + 14
    jpeg[start : start + 2] = b"\xff\xff"  # as many entries as do not fit
    assert verdict(tmp_path / "a.jpg", bytes(jpeg)) is None
