"""Decoded images that are kept, so that a later epoch need not decode them.

An entry belongs to a file by its path, size and time of change, and to the way of decoding by
image size, color and Pillow's version. What cannot be decoded is not kept: it fails every time.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Sequence
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from threading import Lock
from typing import ClassVar, Protocol
from weakref import WeakSet

import numpy as np
import PIL
from numpy.typing import NDArray

from spartito.data.images.decode import MODES, Color, pixels_of
from spartito.data.images.headers import promised_format
from spartito.data.images.image_files import ImageFiles, LocalImages, Stamp
from spartito.errors import UserError
from spartito.names import size
from spartito.notes import warn
from spartito.storage.span_cache import space_in
from spartito.system.capacity import available_memory
from spartito.urls import is_remote

Pixels = NDArray[np.uint8]


class Reader(Protocol):
    """From a path to pixels of shape ``(height, width, channels)``; raises `ImageFault`."""

    def __call__(self, path: str, /) -> Pixels: ...

    def expect(self, paths: Sequence[str]) -> None:
        """Hear which ones will be read next, each once."""
        ...


SHARE = 0.8
"""The part of the free memory that a cache may take; the rest is for the training."""

_HEAD = struct.Struct("<Q8sI")  # the stamp, and a CRC-32 of it and the pixels

_full = Lock()
"""Held while one thread says that a cache takes no more."""


class Decoding:
    """Reads pixels from the images' own files, and keeps nothing.

    Args:
        image_size: Height and width.
        color: "rgb" or "grayscale".
        files: Where the images lie; None: on this machine.
    """

    def __init__(
        self, image_size: tuple[int, int], color: Color, files: ImageFiles | None = None
    ) -> None:
        self.image_size, self.color = image_size, color
        self.files: ImageFiles = LocalImages() if files is None else files
        self.shape = *image_size, len(MODES[color])

    def __call__(self, path: str) -> Pixels:
        """The pixels of the image at ``path``."""
        data = self.files.read(path)
        return pixels_of(data, promised_format(path), self.image_size, self.color)

    def expect(self, paths: Sequence[str]) -> None:
        """As `Reader.expect`."""
        self.files.expect(paths)


class MemoryCache:
    """Keeps pixels in the memory of this process."""

    _living: ClassVar[WeakSet[MemoryCache]] = WeakSet()

    def __init__(self, decode: Decoding, count: int, replicas: int) -> None:
        """For ``count`` images, on each of ``replicas`` of this machine.

        Raises `UserError` if they, and what other caches still wait for, are more than `SHARE`
        of the free memory.
        """
        self._decode = decode
        self._kept: dict[str, tuple[Stamp, Pixels]] = {}
        self._promised = count * int(np.prod(decode.shape)) * replicas
        self._count = count
        promised = sum(cache.still_to_come for cache in self._living)
        free = SHARE * available_memory() - promised
        if self._promised > free:
            raise UserError(
                f'cache="memory" of {_said(decode, count)} on each of {replicas} replicas of this '
                f"machine is {size(self._promised)}; it may take {size(max(0, free))} "
                f"({SHARE:.0%} of the free memory, less what other caches wait for)",
                "Name a directory instead: cache=DIR. It is shared by all replicas.",
            )
        self._living.add(self)

    @property
    def still_to_come(self) -> float:
        """Bytes that are not in memory yet, on all replicas of this machine together."""
        return self._promised * (1 - len(self._kept) / self._count)

    def __call__(self, path: str) -> Pixels:
        """The pixels of the image at ``path``."""
        stamp = self._decode.files.stamp(path)
        kept = self._kept.get(path)
        if kept is not None and kept[0] == stamp:
            return kept[1]
        pixels = self._decode(path)
        if (
            stamp is not None and self._decode.files.stamp(path) == stamp
        ):  # else it changed while it was read
            self._kept[path] = stamp, pixels
        return pixels

    def expect(self, paths: Sequence[str]) -> None:
        """As `Reader.expect`."""
        self._decode.expect([path for path in paths if path not in self._kept])


class DirectoryCache:
    """Keeps pixels in a directory, one file for each image, for all replicas and later runs.

    A file proves itself by a checksum, so it needs neither locks nor a rename: what a killed
    process left half written, or another one is just writing, is no entry yet. All write the
    same bytes.
    """

    def __init__(self, decode: Decoding, directory: str | os.PathLike[str], count: int) -> None:
        """For ``count`` images. Raises `UserError` if they do not fit, or it is no directory."""
        self._decode = decode
        self._bytes = int(np.prod(decode.shape))
        height, width = decode.image_size
        form = f"{height}x{width}-{decode.color}-pillow-{PIL.__version__}"
        self._directory = Path(directory).absolute() / form
        self._writes = True
        free = space_in(
            self._directory,
            f"cache={os.fspath(directory)!r}",
            "Name a directory that this process may write to.",
        )
        wanted = count * (self._bytes + _HEAD.size)
        if wanted > free and wanted - self._in_use() > free:
            raise UserError(
                f"cache={os.fspath(directory)!r} for {_said(decode, count)} is {size(wanted)}; "
                f"free on that disk are {size(free)}",
                "Name a directory on a larger disk.",
            )

    def __call__(self, path: str) -> Pixels:
        """The pixels of the image at ``path``."""
        stamp = self._decode.files.stamp(path)
        if stamp is None:
            return self._decode(path)
        file = self._file(path)
        kept = self._load(file, stamp)
        if kept is not None:
            return kept
        pixels = self._decode(path)
        if (
            self._writes and self._decode.files.stamp(path) == stamp
        ):  # else it changed while it was read
            self._store(file, stamp, pixels)
        return pixels

    def expect(self, paths: Sequence[str]) -> None:
        """As `Reader.expect`."""
        self._decode.expect([path for path in paths if not os.path.exists(self._file(path))])

    def _file(self, path: str) -> str:
        where = path if is_remote(path) else os.path.abspath(path)
        name = blake2b(os.fsencode(where), digest_size=16).hexdigest()
        return f"{self._directory}/{name[:2]}/{name[2:]}"

    def _load(self, file: str, stamp: Stamp) -> Pixels | None:
        """The pixels in ``file``, None if they are not all there or of an image that changed."""
        try:
            with open(file, "rb", buffering=0) as stream:
                data = stream.read()
        except OSError:
            return None
        if len(data) != _HEAD.size + self._bytes:
            return None
        pixels = memoryview(data)[_HEAD.size :]
        if data[: _HEAD.size] != _head(stamp, pixels):
            return None
        return np.frombuffer(pixels, np.uint8).reshape(self._decode.shape)

    def _store(self, file: str, stamp: Stamp, pixels: Pixels) -> None:
        data = pixels.tobytes()
        try:
            os.makedirs(os.path.dirname(file), exist_ok=True)
            with open(file, "wb") as stream:
                stream.write(_head(stamp, data) + data)
        except OSError as error:
            with _full:
                if self._writes:
                    warn("the cache of images takes no more: %s", error)
                self._writes = False
            with suppress(OSError):
                os.unlink(file)

    def _in_use(self) -> int:
        """Bytes of the entries that are there."""
        found = 0
        for file in self._directory.glob("*/*"):
            with suppress(OSError):  # another job has no space left, and takes it away
                found += file.stat().st_size
        return found


def make_cache(
    where: str | os.PathLike[str] | None, decode: Decoding, count: int, replicas: int
) -> Reader:
    """What reads images as ``cache=where`` of `image_folder` says."""
    if where is None:
        return decode
    if where == "memory":
        return MemoryCache(decode, count, replicas)
    return DirectoryCache(decode, where, count)


def _head(stamp: Stamp, pixels: bytes | memoryview) -> bytes:
    """What stands in front of the pixels in a file."""
    size, version = stamp
    digest = blake2b(version.encode(), digest_size=8).digest()
    return _HEAD.pack(size, digest, zlib.crc32(pixels, zlib.crc32(b"%d" % size + digest)))


def _said(decode: Decoding, count: int) -> str:
    return f"{count} images of {'x'.join(map(str, decode.shape))} bytes"
