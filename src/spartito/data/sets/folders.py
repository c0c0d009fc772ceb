"""Data sets in folders, and the digits that come with the package."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch

from spartito.data.dataset import Dataset, arrays
from spartito.data.images.image_source import ImageFolder, Subset, image_folder_source
from spartito.data.reading.prefetch import reading_threads
from spartito.data.sets.idx_format import find_idx
from spartito.data.sets.packaged import split_digits
from spartito.urls import is_remote


def image_folder(
    directory: str | Path,
    image_size: tuple[int, int] = (180, 180),
    validation_split: float | None = None,
    subset: Subset | None = None,
    seed: int = 1337,
    *,
    cache: str | os.PathLike[str] | None = None,
    **options: Any,
) -> Dataset:
    """Images in one folder per class, read ahead in the background.

    Threads read: as many as this process has cores (its affinity and its container's quota,
    divided among the replicas of the machine), 16 at most, and two batches more than that ahead.
    A large JPEG is decoded at 1/2, 1/4 or 1/8 of its size where this is no smaller than
    ``image_size``.

    Args:
        directory: The folder that has the folders of the classes, or its URL in a store, as
            ``s3://bucket/photos``: what is fetched is kept in this machine's cache.
        image_size: Height and width, to which all images are scaled.
        validation_split: The fraction of the images that is kept for validation; with ``subset``.
        subset: "training" or "validation", in an order of its own; None takes all images.
        seed: What the split is drawn from.
        cache: Keep decoded images (a byte per value) for later epochs: "memory", in each replica,
            or a directory, which all replicas and later runs share. None decodes anew in each
            epoch. A file that changed is decoded again.
        options: ``color``, ``dtype`` and ``extensions`` of `image_folder_source`.

    Returns:
        Examples ``(x, y)``: ``x`` is float32 0 to 255 of shape ``(3, height, width)``, ``y`` the
        class' index in ``.classes``.

    Raises:
        UserError: No such directory, fewer than two classes, a class without an image, a value
            out of range, or a cache that is larger than the free memory or disk.
    """
    source: ImageFolder = image_folder_source(
        directory, image_size, validation_split, subset, seed, cache=cache, **options
    )
    threads = reading_threads(waits=is_remote(os.fspath(directory)))
    return replace(Dataset(source), classes=source.classes).prefetch(threads + 2, threads)


def idx(directory: str | Path, split: Literal["train", "test"] = "train") -> Dataset:
    """The images of MNIST's four IDX files (Fashion-MNIST's too).

    Args:
        directory: The folder that has the files, as they are or compressed by gzip, or its URL.
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
