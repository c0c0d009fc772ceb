"""Data sets in folders, and the digits that come with the package."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch

from spartito.data.dataset import Dataset, arrays
from spartito.data.idx_format import find_idx
from spartito.data.images import ImageFolder, Subset, image_folder_source
from spartito.data.packaged import split_digits


def image_folder(
    directory: str | Path,
    image_size: tuple[int, int] = (180, 180),
    validation_split: float | None = 0.2,
    subset: Subset | None = "training",
    seed: int = 1337,
    **options: Any,
) -> Dataset:
    """Images in one folder per class, read ahead in the background.

    Args:
        directory: The folder that has the folders of the classes.
        image_size: Height and width, to which all images are scaled.
        validation_split: The fraction of the images that is kept for validation; None keeps none.
        subset: "training" or "validation"; None takes all images, without a split.
        seed: What the split is drawn from.
        options: ``color``, ``dtype`` and ``extensions`` of `image_folder_source`.

    Returns:
        Examples ``(x, y)``: ``x`` is float32 0 to 255 of shape ``(3, height, width)``, ``y`` the
        class' index in ``.classes``.
    """
    source: ImageFolder = image_folder_source(
        directory, image_size, validation_split, subset, seed, **options
    )
    return replace(Dataset(source), classes=source.classes).prefetch(3)


def idx(directory: str | Path, split: Literal["train", "test"] = "train") -> Dataset:
    """The images of MNIST's four IDX files (Fashion-MNIST's too).

    Args:
        directory: The folder that has the files, as they are or compressed by gzip.
        split: "train" or "test".

    Returns:
        Examples ``(x, y)``: ``x`` is float32 0 to 1 of shape ``(height, width)``, ``y`` int64.
    """
    images, labels = find_idx(directory, split)
    return _digits(images, labels)


def digits(subset: Literal["training", "validation"] = "training") -> Dataset:
    """The 10,000 digits that come with the package: 8,000 to train, 2,000 to validate.

    They are MNIST's test digits, so what is reached on them is not comparable with published
    figures.

    Args:
        subset: "training" or "validation".

    Returns:
        Examples ``(x, y)``: ``x`` is float32 0 to 1 of shape ``(28, 28)``, ``y`` int64.
    """
    training, validation = split_digits()
    return _digits(*(training if subset == "training" else validation))


def _digits(images: Any, labels: Any) -> Dataset:
    x = torch.from_numpy(images).to(torch.get_default_dtype()).div_(255)
    chain = arrays(x, torch.from_numpy(labels).long())
    return replace(chain, classes=tuple(str(label) for label in range(int(labels.max()) + 1)))
