"""Data sets in folders, as chains."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from spartito.data.reading.loader import Loader
from spartito.data.sets.folders import digits, idx, image_folder
from spartito.errors import UserError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Ten images of two classes, each of one grey and of its own size."""
    for kind in ("cat", "dog"):
        (tmp_path / kind).mkdir()
        for n in range(5):
            level = n * 10 + (100 if kind == "dog" else 0)
            Image.new("RGB", (20 + n, 30), (level,) * 3).save(tmp_path / kind / f"{n}.png")
    return tmp_path


def test_a_folder_of_images_trains_and_validates(folder: Path) -> None:
    train = image_folder(folder, (8, 6), 0.2, "training", seed=1)
    held_out = image_folder(folder, (8, 6), 0.2, "validation", seed=1)
    assert train.classes == ("cat", "dog")
    assert (len(train), len(held_out)) == (8, 2)
    assert train.ahead > 0
    seen = []
    for chain in (train, held_out):
        for x, y in chain.batch(4):
            assert x.shape[1:] == (3, 8, 6)
            assert x.dtype == torch.float32
            assert x.is_contiguous(memory_format=torch.channels_last)
            for image, label in zip(x, y.tolist(), strict=True):
                assert image.min() == image.max()
                assert label == (image.max() >= 100)
                seen.append(image.max().item())
    assert sorted(seen) == [*range(0, 50, 10), *range(100, 150, 10)]


def test_replicas_share_a_folder(folder: Path) -> None:
    chain = image_folder(folder, (4, 4)).shuffle().batch(4)
    alone = [batch.x for batch in Loader(chain)]
    parts = [[batch.x for batch in Loader(chain, (rank, 3))] for rank in range(3)]
    for whole, shards in zip(alone, zip(*parts, strict=True), strict=True):
        assert torch.equal(whole, torch.cat(shards))


def test_a_broken_image_is_left_out(folder: Path) -> None:
    (folder / "cat" / "2.png").write_bytes(b"no image")
    chain = image_folder(folder, (4, 4)).batch(5)
    assert [len(y) for _, y in chain] == [4, 5]
    with pytest.raises(UserError, match=r"cat/2\.png"):
        list(chain.skip_corrupt(0))


def test_idx_files(tmp_path: Path) -> None:
    images = np.arange(3 * 4 * 4, dtype=np.uint8).reshape(3, 4, 4)
    head = struct.pack(">4B3I", 0, 0, 8, 3, *images.shape)
    (tmp_path / "train-images-idx3-ubyte").write_bytes(head + images.tobytes())
    head = struct.pack(">4BI", 0, 0, 8, 1, 3)
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(head + bytes([2, 0, 1]))
    chain = idx(tmp_path)
    x, y = next(iter(chain.batch(3)))
    assert torch.equal(x, torch.from_numpy(images) / 255)
    assert (y.tolist(), y.dtype) == ([2, 0, 1], torch.int64)
    assert chain.classes == ("0", "1", "2")
    with pytest.raises(UserError, match="t10k"):
        idx(tmp_path, "test")


def test_the_digits_that_come_along() -> None:
    assert len(digits()) == 8000
    held_out = digits("validation")
    assert len(held_out) == 2000
    x, y = next(iter(held_out.batch(2000)))
    assert x.shape == (2000, 28, 28)
    assert (x.min().item(), x.max().item()) == (0.0, 1.0)
    assert set(y.tolist()) == set(range(10))
    assert held_out.classes == tuple("0123456789")
