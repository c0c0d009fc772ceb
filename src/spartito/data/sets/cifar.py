"""CIFAR-10 in its binary form: a byte for the label, then 32x32 red, green and blue ones."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from spartito.data.dataset import Dataset
from spartito.errors import UserError
from spartito.names import nearest

SHAPE = (3, 32, 32)
ROW = 1 + 3 * 32 * 32
"""Bytes of an example."""
FOLDER = "cifar-10-batches-bin"
"""In the archive."""
FILES = {
    "train": [f"data_batch_{number}.bin" for number in range(1, 6)],
    "test": ["test_batch.bin"],
}
CLASSES = (
    *("airplane", "automobile", "bird", "cat", "deer"),
    *("dog", "frog", "horse", "ship", "truck"),
)


@dataclass(frozen=True, eq=False)
class ByteImages:
    """Images that stay bytes in memory, a quarter of what they take as float32.

    Args:
        images: ``(examples, channels, height, width)`` uint8.
        labels: ``(examples,)`` int64.
    """

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.images[index].to(torch.get_default_dtype()).div_(255), self.labels[index]

    def gather(self, indices: slice | Tensor) -> tuple[Tensor, Tensor]:
        """The examples at ``indices``, of values 0 to 1."""
        images = self.images[indices].to(torch.get_default_dtype()).div_(255)
        return images, self.labels[indices].clone()


def cifar10(directory: str | Path, split: Literal["train", "test"] = "train") -> Dataset:
    """The photos of CIFAR-10, of the files of its binary form.

    Args:
        directory: The folder that ``spartito data get cifar10`` made, or that of the files.
        split: "train" (50,000) or "test" (10,000).

    Returns:
        Examples ``(x, y)``: ``x`` is float32 0 to 1 of shape ``(3, 32, 32)``, ``y`` int64, the
        index in ``.classes``.

    Raises:
        UserError: No such folder or file, or one of another length.
    """
    if split not in FILES:
        raise UserError(f"unknown split {split!r}", nearest(str(split), FILES))
    inner = Path(directory, FOLDER)
    folder = inner if inner.is_dir() else Path(directory)
    rows = np.concatenate([_read(folder / name) for name in FILES[split]])
    labels = torch.from_numpy(rows[:, 0].astype(np.int64))
    images = torch.from_numpy(rows[:, 1:].copy()).reshape(-1, *SHAPE)
    return replace(Dataset(ByteImages(images, labels)), classes=CLASSES)


def _read(path: Path) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    try:
        data = np.fromfile(path, np.uint8)
    except OSError as error:
        raise UserError(
            f"{os.fspath(path)!r} cannot be read: {error.strerror or error}",
            "`spartito data get cifar10` fetches the files.",
        ) from error
    rows, rest = divmod(len(data), ROW)
    if rest or not rows or data[::ROW].max() >= len(CLASSES):
        raise UserError(
            f"{os.fspath(path)!r} is no file of CIFAR-10 in its binary form: {len(data):,} bytes "
            f"are not examples of {ROW:,}, each with a label below {len(CLASSES)}",
            "`spartito data get cifar10` fetches the files.",
        )
    return data.reshape(rows, ROW)
