"""From the bytes of an image file to pixels, with every way to fail made one `ImageFault`.

Training and ``spartito data check`` both read through here, so that they agree on which file is
corrupt. Pillow, no torch: the command line imports this.
"""

from __future__ import annotations

import os
import re
import stat
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from spartito.data.images.headers import (
    READABLE,
    ImageFault,
    Kind,
    is_cut_signature,
    promised_format,
    sniff,
    verify,
)

Color = Literal["rgb", "grayscale"]
MODES: dict[Color, Literal["RGB", "L"]] = {"rgb": "RGB", "grayscale": "L"}

# The form in which Python keeps a filter: warnings that a module of Pillow raises are ignored.
_QUIET = ("ignore", None, Warning, re.compile(r"PIL\."), 0)
_quiet_lock = threading.Lock()


def read_pixels(path: Path | str, image_size: tuple[int, int], color: Color) -> NDArray[np.uint8]:
    """The image in the file, of shape ``(height, width, channels)`` and values 0 to 255.

    ``image_size`` is (height, width); the image is stretched to it with Pillow's bilinear filter,
    which averages where it shrinks. A large JPEG is decoded at 1/2, 1/4 or 1/8 of its size as
    long as this is no smaller than wanted. The orientation that Exif may ask for is not applied,
    transparency is dropped, of an animation the first frame is taken: all as Keras does.

    Raises `ImageFault`.
    """
    return pixels_of(read_bytes(path), promised_format(path), image_size, color)


def pixels_of(
    data: bytes, promised: str | None, image_size: tuple[int, int], color: Color
) -> NDArray[np.uint8]:
    """As `read_pixels`, of the bytes of a file; ``promised`` is as for `decode`."""
    height, width = image_size
    mode = MODES[color]
    image = decode(data, promised, mode, (width, height))
    with _faults():
        image = _eight_bits(image)
        if image.mode != mode:
            image = image.convert(mode)
        if image.size != (width, height):
            image = image.resize((width, height), Image.Resampling.BILINEAR)
        return np.asarray(image).reshape(height, width, len(mode))


def read_bytes(path: Path | str) -> bytes:
    """The whole content of a regular file, at least one byte. Raises `ImageFault`."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # opening a pipe would wait for its writer
            raise ImageFault(Kind.UNREADABLE, "not a regular file")
        with open(path, "rb") as file:
            data = file.read()
    except OSError as error:
        raise ImageFault(Kind.UNREADABLE, error.strerror or str(error)) from error
    if not data:
        raise ImageFault(Kind.EMPTY, "0 bytes")
    return data


def decode(
    data: bytes, promised: str | None, mode: Literal["RGB", "L"], size: tuple[int, int]
) -> Image.Image:
    """The first image in ``data``, of any mode, decoded to the last byte of its stream.

    A JPEG may come smaller than it is, but not smaller than ``size`` (width, height). ``promised``
    is the format that the file's name promises; it only helps to tell a file that was cut inside
    its first bytes from one that never was an image. Raises `ImageFault`.
    """
    found = sniff(data)
    if found is None:
        if is_cut_signature(data, promised):
            raise ImageFault(Kind.TRUNCATED, f"{promised} ends after {len(data)} bytes")
        raise ImageFault(Kind.NOT_AN_IMAGE, f"no image header, starts with {data[:8]!r}")
    if found not in READABLE:
        raise ImageFault(Kind.UNDECODABLE, f"{found} is not a format that is read")
    verify(data, found)
    with _faults():
        image = Image.open(BytesIO(data), formats=[found])
        limit = Image.MAX_IMAGE_PIXELS
        if limit is not None and image.width * image.height > limit:
            raise ImageFault(
                Kind.UNDECODABLE,
                f"{image.width}x{image.height} is more than {limit} pixels (decompression bomb)",
            )
        image.draft(mode, size)
        image.load()
    return image


def _eight_bits(image: Image.Image) -> Image.Image:
    """16-bit grayscale by its upper byte, for Pillow's own conversion clips; others unchanged."""
    if not image.mode.startswith("I"):
        return image
    return Image.fromarray((np.asarray(image).astype(np.int32) >> 8).astype(np.uint8))


@contextmanager
def _faults() -> Iterator[None]:
    """Turn whatever Pillow raises about broken bytes into an `ImageFault`."""
    _hush()
    try:
        yield
    except (ImageFault, MemoryError):
        raise
    # Its plugins raise OSError, SyntaxError, ValueError, struct.error, KeyError and others.
    except Exception as error:
        text = str(error) or type(error).__name__
        cut = re.search(r"truncated|end of file|not enough data", text, re.IGNORECASE)
        raise ImageFault(Kind.TRUNCATED if cut else Kind.UNDECODABLE, text) from error


def _hush() -> None:
    """See to it that Pillow's warnings (about broken Exif, large images) do not come through.

    ``warnings.catch_warnings`` is not for threads, and whoever restores the filters (a test, a
    notebook) drops ours: so it is looked for, and put in front again, before every read.
    """
    filters: Any = warnings.filters
    if filters[:1] != [_QUIET]:
        with _quiet_lock:
            if filters[:1] != [_QUIET]:
                warnings.filterwarnings("ignore", module=_QUIET[3].pattern)
