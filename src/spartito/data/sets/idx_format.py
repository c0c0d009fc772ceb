"""IDX files, the format of MNIST and Fashion-MNIST, plain or compressed with gzip.

Two zero bytes, a byte for the type, one for the number of dims, then each dim as 4 bytes and the
values, all big-endian: http://yann.lecun.com/exdb/mnist (section "The IDX file format").
"""

from __future__ import annotations

import gzip
import math
import os
import zlib
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import BinaryIO, Literal, cast

import numpy as np
from numpy.typing import NDArray

from spartito.errors import UserError
from spartito.names import nearest
from spartito.storage.files import open_files
from spartito.storage.remote import AbsentError
from spartito.storage.whole_files import read_whole

TYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
SPLITS = {"train": "train", "test": "t10k"}
_CHUNK = 1 << 20

Split = Literal["train", "test"]


def read_idx(path: Path | str) -> NDArray[np.generic]:
    """The array in an IDX file, in the machine's byte order; gzip is found by its first bytes.

    Args:
        path: Its path or URL.

    Raises:
        UserError: It is not there, or no such file; the error names the rule that it breaks.
    """
    data = read_whole(path)
    file: BinaryIO = BytesIO(data)
    try:
        if data.startswith(b"\x1f\x8b"):  # unpacked as it is read: a header may promise anything
            file = cast("BinaryIO", gzip.GzipFile(fileobj=file))
        return _read(file, path)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise _broken(path, f"its gzip stream is broken: {error}") from error


def find_idx(
    directory: Path | str, split: Split = "train"
) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """The images ``(count, height, width)`` and labels ``(count,)`` of MNIST's standard files.

    ``train-images-idx3-ubyte`` and ``train-labels-idx1-ubyte``, or ``t10k-...`` for ``"test"``,
    with ``.gz`` or without, a dot in place of the second dash too. Raises `UserError`.
    """
    if split not in SPLITS:
        raise UserError(f"unknown split {split!r}", nearest(str(split), SPLITS))
    image_path = _find(directory, f"{SPLITS[split]}-images", "idx3-ubyte")
    label_path = _find(directory, f"{SPLITS[split]}-labels", "idx1-ubyte")
    images, labels = read_idx(image_path), read_idx(label_path)
    if images.ndim != 3 or images.dtype != np.uint8:
        raise _broken(image_path, f"images are 3 dims of bytes, not {_shape(images)}")
    if labels.ndim != 1 or labels.dtype != np.uint8:
        raise _broken(label_path, f"labels are 1 dim of bytes, not {_shape(labels)}")
    if len(images) != len(labels):
        raise _broken(label_path, f"it has {len(labels)} labels for {len(images)} images")
    return cast("NDArray[np.uint8]", images), labels.astype(np.int64)


def _find(directory: Path | str, stem: str, kind: str) -> str:
    files = open_files(os.fspath(directory))
    names = [f"{stem}{dot}{kind}{end}" for dot in "-." for end in ("", ".gz")]
    if files.local and not os.path.isdir(files.url):
        raise UserError(f"directory {os.fspath(directory)!r} does not exist", "Check the path.")
    for name in names:
        with suppress(AbsentError):
            files.look(name)
            return f"{files.url}/{name}"
    raise UserError(
        f"{os.fspath(directory)!r} has no file {names[0]}",
        f"It may be called {', '.join(names)}.",
    )


def _read(file: BinaryIO, path: Path | str) -> NDArray[np.generic]:
    head = file.read(4)
    if len(head) < 4 or head[:2] != b"\0\0" or head[2] not in TYPES or head[3] == 0:
        raise _broken(
            path,
            f"it starts with {head.hex(' ') or 'nothing'}, not with 00 00, a type "
            f"({', '.join(f'{t:02x}' for t in TYPES)}) and at least 1 dim",
        )
    dims = file.read(4 * head[3])
    if len(dims) < 4 * head[3]:
        raise _broken(path, f"it ends inside its {head[3]} dims")
    shape = tuple(int(n) for n in np.frombuffer(dims, ">u4"))
    dtype = np.dtype(TYPES[head[2]])
    wanted = math.prod(shape) * dtype.itemsize
    values = _read_up_to(file, wanted + 1)
    if len(values) != wanted:
        had = "more" if len(values) > wanted else str(len(values))
        raise _broken(path, f"dims {shape} want {wanted} bytes of values and it has {had}")
    array = np.frombuffer(values, dtype).reshape(shape)
    return array.astype(dtype.newbyteorder("="), copy=False)


def _read_up_to(file: BinaryIO, count: int) -> bytearray:
    """At most ``count`` bytes, in chunks: a header that lies must not make us allocate."""
    values = bytearray()
    while chunk := file.read(min(_CHUNK, count - len(values))):
        values += chunk
    return values


def _shape(array: NDArray[np.generic]) -> str:
    return f"{array.ndim} dims {array.shape} of {array.dtype}"


def _broken(path: Path | str, rule: str) -> UserError:
    return UserError(
        f"{os.fspath(path)!r} is not a good IDX file: {rule}", "Fetch or write the file again."
    )
