"""IDX files: what is written is read, and what breaks the format is refused by name."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from spartito.data.sets.idx_format import find_idx, read_idx
from spartito.errors import UserError

CODES = {"u1": 0x08, "i1": 0x09, "i2": 0x0B, "i4": 0x0C, "f4": 0x0D, "f8": 0x0E}


def as_idx(array: NDArray[np.generic]) -> bytes:
    code = CODES[array.dtype.str[1:]]
    head = struct.pack(f">HBB{array.ndim}I", 0, code, array.ndim, *array.shape)
    return head + array.astype(array.dtype.newbyteorder(">")).tobytes()


arrays = st.sampled_from(sorted(CODES)).flatmap(
    lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=1, max_dims=4, min_side=0))
)


@given(arrays, st.booleans())
def test_what_is_written_is_read(
    tmp_path_factory: pytest.TempPathFactory, array: NDArray[np.generic], packed: bool
) -> None:
    path = tmp_path_factory.getbasetemp() / "round-trip"
    path.write_bytes(gzip.compress(as_idx(array)) if packed else as_idx(array))
    got = read_idx(path)
    assert (got.dtype, got.shape) == (array.dtype, array.shape)
    assert got.dtype.isnative
    assert got.flags.writeable
    assert got.tobytes() == array.tobytes()


GOOD = as_idx(np.arange(24, dtype=np.int16).reshape(2, 3, 4))


@given(st.integers(0, len(GOOD) - 1), st.booleans())
def test_every_cut_is_refused(
    tmp_path_factory: pytest.TempPathFactory, length: int, packed: bool
) -> None:
    path = tmp_path_factory.getbasetemp() / "cut"
    path.write_bytes(gzip.compress(GOOD[:length]) if packed else GOOD[:length])
    with pytest.raises(UserError, match="cut' is not a good IDX file"):
        read_idx(path)


@pytest.mark.parametrize(
    ("data", "rule"),
    [
        (b"", "starts with nothing"),
        (b"\1\0\x08\1" + b"\0" * 4, "starts with 01 00 08 01"),
        (b"\0\0\x07\1" + b"\0" * 4, "a type"),
        (b"\0\0\x08\0", "at least 1 dim"),
        (b"\0\0\x08\3\0\0\0\1", "ends inside its 3 dims"),
        (GOOD[:-1], r"dims \(2, 3, 4\) want 48 bytes of values and it has 47"),
        (GOOD + b"\0", "want 48 bytes of values and it has more"),
        (b"\0\0\x0e\4" + b"\xff" * 16 + b"abc", "and it has 3"),  # 3e39 bytes, never allocated
        (
            b"\0\0\x08\2" + b"\0\0\0\0" + b"\xff" * 4 + b"a",
            "want 0 bytes of values and it has more",
        ),
        (gzip.compress(GOOD, mtime=0)[:-9], "gzip stream is broken"),
        (gzip.compress(GOOD, mtime=0)[:30] + b"\xff" * 9, "gzip stream is broken"),
        (gzip.compress(GOOD, mtime=0) + b"tail", "gzip stream is broken"),
        (b"\x1f\x8b garbage", "gzip stream is broken"),
    ],
)
def test_a_broken_file_is_named_with_its_rule(tmp_path: Path, data: bytes, rule: str) -> None:
    path = tmp_path / "digits"
    path.write_bytes(data)
    with pytest.raises(UserError, match=rule) as error:
        read_idx(path)
    assert str(path) in str(error.value)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="No such file"):
        read_idx(tmp_path / "nothing")
    with pytest.raises(UserError, match="directory"):
        read_idx(tmp_path)


IMAGES = np.arange(3 * 28 * 28, dtype=np.uint8).reshape(3, 28, 28)
LABELS = np.array([7, 2, 1], dtype=np.uint8)


@pytest.mark.parametrize("dot", ["-", "."])
@pytest.mark.parametrize("end", ["", ".gz"])
def test_the_standard_names(tmp_path: Path, dot: str, end: str) -> None:
    pack = gzip.compress if end else bytes
    for prefix, count in (("train", 3), ("t10k", 2)):
        images = tmp_path / f"{prefix}-images{dot}idx3-ubyte{end}"
        images.write_bytes(pack(as_idx(IMAGES[:count])))
        labels = tmp_path / f"{prefix}-labels{dot}idx1-ubyte{end}"
        labels.write_bytes(pack(as_idx(LABELS[:count])))
    x, y = find_idx(tmp_path)
    assert np.array_equal(x, IMAGES)
    assert y.dtype == np.int64
    assert y.tolist() == [7, 2, 1]
    x, y = find_idx(tmp_path, "test")
    assert (x.shape, y.tolist()) == ((2, 28, 28), [7, 2])


def test_a_directory_without_the_files(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no file train-images-idx3-ubyte(.|\n)*ubyte\.gz"):
        find_idx(tmp_path)
    with pytest.raises(UserError, match=r"'tset'(.|\n)*Did you mean 'test'"):
        find_idx(tmp_path, "tset")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("images", "labels", "rule"),
    [
        (IMAGES[0], LABELS, r"images are 3 dims of bytes, not 2 dims \(28, 28\)"),
        (IMAGES.astype(np.int32), LABELS, "of int32"),
        (IMAGES, LABELS[:, None], "labels are 1 dim of bytes"),
        (IMAGES, LABELS[:2], "2 labels for 3 images"),
    ],
)
def test_files_that_do_not_belong_together(
    tmp_path: Path, images: NDArray[np.generic], labels: NDArray[np.generic], rule: str
) -> None:
    (tmp_path / "train-images-idx3-ubyte").write_bytes(as_idx(images))
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(as_idx(labels))
    with pytest.raises(UserError, match=rule):
        find_idx(tmp_path)
