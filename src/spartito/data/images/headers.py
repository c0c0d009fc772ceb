"""What the bytes of an image file say of themselves: their format, and whether all are there.

Pure functions on bytes; no Pillow and no torch. The layouts are those of ITU-T T.81 annex B
(JPEG), the PNG specification section 5, GIF89a, and RFC 9649 (WebP).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from enum import StrEnum
from pathlib import PurePath

FORMATS = {
    ".bmp": "BMP",
    ".gif": "GIF",
    ".jpe": "JPEG",
    ".jpeg": "JPEG",
    ".jfif": "JPEG",
    ".jpg": "JPEG",
    ".png": "PNG",
    ".webp": "WEBP",
}
"""The format that a file's ending promises."""

EXTENSIONS = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".webp")
"""The endings that an image folder takes, as Keras' ``image_dataset_from_directory``, and WebP."""

READABLE = frozenset(FORMATS.values())

_SIGNATURES = {
    "JPEG": (b"\xff\xd8\xff",),
    "PNG": (b"\x89PNG\r\n\x1a\n",),
    "GIF": (b"GIF87a", b"GIF89a"),
    "TIFF": (b"II*\0", b"MM\0*"),
    "JPEG 2000": (b"\0\0\0\x0cjP  ",),
}
_BRANDS = {b"avif": "AVIF", b"avis": "AVIF", b"heic": "HEIC", b"heix": "HEIC", b"mif1": "HEIC"}
_BMP_HEADER_SIZES = frozenset({12, 16, 40, 52, 56, 64, 108, 124})


class Kind(StrEnum):
    """What is wrong with a file."""

    UNREADABLE = "unreadable"
    EMPTY = "empty"
    NOT_AN_IMAGE = "not_an_image"
    WRONG_HEADER = "wrong_header"
    TRUNCATED = "truncated"
    UNDECODABLE = "undecodable"
    CMYK = "cmyk"
    NO_JFIF = "no_jfif"


class ImageFault(Exception):
    """The bytes of one file are no good image: of which kind, and why in a few words."""

    def __init__(self, kind: Kind, detail: str) -> None:
        """``detail`` names what was found and, where it helps, at which byte."""
        super().__init__(detail)
        self.kind = kind
        self.detail = detail


def promised_format(path: PurePath | str) -> str | None:
    """The format that the file's ending promises, or None for an ending that promises none."""
    return FORMATS.get(PurePath(path).suffix.lower())


def sniff(data: bytes) -> str | None:
    """The format that the first bytes of ``data`` are, or None if they are of no image."""
    for name, signatures in _SIGNATURES.items():
        if data.startswith(signatures):
            return name
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "WEBP"
    # Two letters are too few to tell a bitmap from a text: the size of the next header must fit.
    if data[:2] == b"BM" and len(data) >= 18:
        size = int.from_bytes(data[14:18], "little")
        return "BMP" if size in _BMP_HEADER_SIZES else None
    return _BRANDS.get(data[8:12]) if data[4:8] == b"ftyp" else None


def is_cut_signature(data: bytes, image_format: str | None) -> bool:
    """Whether ``data`` is the start of an ``image_format`` file, too short to `sniff`."""
    if image_format == "BMP":
        return len(data) < 18 and data[:2] == b"BM"[: len(data)]
    if image_format == "WEBP":
        return len(data) < 12 and data[:4] == b"RIFF"[: len(data)]
    return any(s.startswith(data) for s in _SIGNATURES.get(image_format or "", ()))


def verify(data: bytes, image_format: str) -> None:
    """Raise an `ImageFault` if ``data`` ends too early or fails a checksum of its format.

    A decoder is more lenient than this: it accepts a PNG without its end, and checks no sums.
    """
    if image_format in _VERIFIERS:
        _VERIFIERS[image_format](data)


def has_jfif(data: bytes) -> bool:
    """Whether the JPEG ``data`` has a JFIF header (APP0), at the start or after another one."""
    return any(m == 0xE0 and data[s : s + 5] == b"JFIF\0" for m, s in jpeg_segments(data))


def has_exif(data: bytes) -> bool:
    """Whether the JPEG ``data`` has an Exif header (APP1)."""
    return any(m == 0xE1 and data[s : s + 5] == b"Exif\0" for m, s in jpeg_segments(data))


def jpeg_segments(data: bytes) -> Iterator[tuple[int, int]]:
    """The (marker, start of the payload) of each segment of a JPEG, up to the first scan.

    Ends at the start of scan (0xDA, the last one given). An `ImageFault` tells bytes that end
    before it (truncated) from bytes where no marker is (undecodable).
    """
    at = 2
    while True:
        while data[at : at + 2] == b"\xff\xff":  # markers may be padded with any number of 0xff
            at += 1
        head = data[at : at + 4]
        if len(head) < 4:
            raise ImageFault(Kind.TRUNCATED, f"JPEG ends in its header, after {len(data)} bytes")
        if head[0] != 0xFF:
            raise ImageFault(Kind.UNDECODABLE, f"JPEG has no marker at byte {at}")
        yield head[1], at + 4
        if head[1] == 0xDA:
            return
        at += 2 + max(2, int.from_bytes(head[2:], "big"))


def _verify_jpeg(data: bytes) -> None:
    *_, (_, scan) = jpeg_segments(data)
    # Inside a scan 0xff is always followed by 0, so that these two bytes are the end. They are
    # searched from behind as cameras append other pictures, and thumbnails stand before the scan.
    if data.rfind(b"\xff\xd9", scan) < 0:
        raise ImageFault(Kind.TRUNCATED, f"JPEG has no end marker, after {len(data)} bytes")


def _verify_png(data: bytes) -> None:
    at, name = 8, b""
    while name != b"IEND":
        length = int.from_bytes(data[at : at + 4], "big")
        name = data[at + 4 : at + 8]
        end = at + 12 + length
        if len(name) < 4 or end > len(data):
            raise ImageFault(Kind.TRUNCATED, f"PNG has no end chunk, after {len(data)} bytes")
        if not name.isalpha():
            raise ImageFault(Kind.UNDECODABLE, f"PNG has no chunk at byte {at}")
        if zlib.crc32(data[at + 4 : end - 4]) != int.from_bytes(data[end - 4 : end], "big"):
            raise ImageFault(
                Kind.UNDECODABLE, f"PNG chunk {name.decode()} at byte {at} fails its checksum"
            )
        at = end


def _verify_webp(data: bytes) -> None:
    size = 8 + int.from_bytes(data[4:8], "little")
    if size > len(data):
        raise ImageFault(Kind.TRUNCATED, f"WebP has {len(data)} of {size} bytes")


def _verify_gif(data: bytes) -> None:
    at = 13 + _gif_colors(data[10:11])
    while (block := data[at : at + 1]) in (b"!", b","):
        is_image = block == b","
        at = _gif_end(data, at + (11 + _gif_colors(data[at + 9 : at + 10]) if is_image else 2))
        if is_image and at <= len(data):  # the first image is whole, and only that one is read
            return
    if not block:
        raise ImageFault(Kind.TRUNCATED, f"GIF ends in its first image, after {len(data)} bytes")


def _gif_end(data: bytes, at: int) -> int:
    """Where a chain of blocks ends, each with its length in front; behind the data if it is cut."""
    while length := data[at : at + 1]:
        at += 1 + length[0]
        if not length[0]:
            return at
    return len(data) + 1


def _gif_colors(flags: bytes) -> int:
    """Bytes of the table of colours that ``flags`` announce."""
    return 3 << (flags[0] & 7) + 1 if flags and flags[0] & 0x80 else 0


_VERIFIERS: dict[str, Callable[[bytes], None]] = {
    "GIF": _verify_gif,
    "JPEG": _verify_jpeg,
    "PNG": _verify_png,
    "WEBP": _verify_webp,
}
