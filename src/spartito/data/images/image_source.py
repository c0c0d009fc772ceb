"""Images on disk as a source of samples: one folder per class, any size of image.

As Keras' ``image_dataset_from_directory``; the files are read when a sample is asked for.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from spartito.cluster.resolver import replicas_here
from spartito.data.images.cache import Decoding, Reader, make_cache
from spartito.data.images.decode import MODES, Color, read_pixels
from spartito.data.images.headers import EXTENSIONS, ImageFault
from spartito.data.images.labelled import find_labelled
from spartito.data.source import BatchSource, Found
from spartito.errors import CorruptSampleError, UserError
from spartito.names import nearest
from spartito.urls import is_remote

Subset = Literal["training", "validation"]
SUBSETS: tuple[Subset, ...] = ("training", "validation")

_NUMPY: dict[torch.dtype, type[np.generic]] = {torch.float64: np.float64, torch.uint8: np.uint8}


def read_image(
    path: Path | str,
    image_size: tuple[int, int] = (180, 180),
    color: Color = "rgb",
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """One image of shape ``(channels, height, width)``, values 0 to 255, resized to fit.

    ``image_size`` is (height, width). The tensor is a view of a (height, width, channels) buffer,
    so that a batch of them can be made channels_last without moving a byte out of order. How
    pixels are made is said at `spartito.data.images.decode.read_pixels`; Exif orientation is not
    applied.

    Raises `CorruptSampleError`, which names the file and what is wrong with it.
    """
    with _corrupt(path):
        return tensor_of(read_pixels(path, image_size, color), dtype)


def tensor_of(pixels: NDArray[np.uint8], dtype: torch.dtype) -> torch.Tensor:
    """Pixels ``(height, width, channels)`` as a tensor of its own ``(channels, height, width)``."""
    # numpy converts on this thread alone: torch would wake its pool below every reading thread.
    values = pixels.astype(_NUMPY.get(dtype, np.float32))
    return torch.from_numpy(values).to(dtype).permute(2, 0, 1)


def empty_pixels(shape: tuple[int, ...], dtype: torch.dtype) -> NDArray[Any]:
    """An array for pixels that are to be tensors of ``dtype``."""
    return np.empty(shape, _NUMPY.get(dtype, np.float32))


@contextmanager
def _corrupt(path: Path | str) -> Iterator[None]:
    """Say which file an `ImageFault` is about."""
    try:
        yield
    except ImageFault as fault:
        if not is_remote(os.fspath(path)) and not os.path.exists(path):
            raise CorruptSampleError(
                f"there is no image {os.fspath(path)!r}", "Check the path."
            ) from fault
        raise CorruptSampleError(
            f"image {os.fspath(path)!r} is corrupt ({fault.kind}): {fault.detail}",
            "Find all such files with `spartito data check DIR`.",
        ) from fault


def split_order(
    count: int, validation_split: float | None, subset: Subset | None, seed: int
) -> NDArray[np.int64]:
    """Which of ``count`` files a subset holds, as indices in its order.

    Without a split all of them, in order. Else a permutation that ``seed`` alone decides; its
    last ``int(validation_split * count)`` files are for validation and the rest for training.
    """
    if validation_split is None:
        return np.arange(count)
    # The raw stream of PCG64 is the same in every numpy; `Generator.permutation` is not promised.
    keys = np.random.PCG64(seed).random_raw(count)
    order = np.argsort(keys, kind="stable").astype(np.int64)
    training = count - int(validation_split * count)
    return order[:training] if subset == "training" else order[training:]


@dataclass(frozen=True, eq=False)
class ImageFolder(BatchSource):
    """A source of samples ``(x, y)``: the images below one folder per class.

    ``x`` is as `read_image` gives it, ``y`` the class' index in ``classes``, a 0-d int64 tensor.
    ``read`` is where pixels come from: the files, or a cache before them.
    Reading is safe from many threads, and Pillow lets them run side by side.
    """

    classes: tuple[str, ...]
    paths: tuple[str, ...]
    labels: tuple[int, ...]
    read: Reader
    dtype: torch.dtype = torch.float32
    _targets: torch.Tensor = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Keep the labels as one tensor, of which a sample takes a view."""
        object.__setattr__(self, "_targets", torch.tensor(self.labels, dtype=torch.int64))

    def __len__(self) -> int:
        """How many images there are."""
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Read one image. Raises `CorruptSampleError` for one that cannot be read."""
        path = self.paths[index]
        with _corrupt(path):
            return tensor_of(self.read(path), self.dtype), self._targets[index]

    def read_batch(self, indices: Sequence[int]) -> Found:
        """As `BatchSource.read_batch`: pixels become floating where they stay, in the batch."""
        self.read.expect([self.paths[index] for index in indices])
        batch: NDArray[Any] | None = None
        kept: list[int] = []
        corrupt: list[tuple[int, str]] = []
        for position, index in enumerate(indices):
            path = self.paths[index]
            try:
                with _corrupt(path):
                    pixels = self.read(path)
            except CorruptSampleError as error:
                corrupt.append((index, str(error)))
                continue
            if batch is None:
                batch = empty_pixels((len(indices), *pixels.shape), self.dtype)
            batch[len(kept)] = pixels
            kept.append(position)
        if batch is None:
            return Found(None, kept, corrupt)
        x = torch.from_numpy(batch[: len(kept)]).to(self.dtype).permute(0, 3, 1, 2)
        y = self._targets[[indices[position] for position in kept]]
        return Found((x, y), kept, corrupt)


def image_folder_source(
    directory: Path | str,
    image_size: tuple[int, int] = (180, 180),
    validation_split: float | None = None,
    subset: Subset | None = None,
    seed: int = 1337,
    *,
    extensions: Sequence[str] = EXTENSIONS,
    color: Color = "rgb",
    dtype: torch.dtype = torch.float32,
    cache: str | os.PathLike[str] | None = None,
) -> ImageFolder:
    """The images below ``directory``, one folder per class, labelled by the folders' sorted order.

    It may be the URL of a folder in a store. Folders are searched at any depth.
    ``validation_split`` with ``subset`` takes one part of a split that depends on the files'
    number and ``seed`` alone: see `split_order`. ``cache`` keeps decoded pixels: "memory", or a
    directory.

    Raises `UserError`: no such directory, fewer than two classes, a class without an image, a
    value out of range, a cache larger than the free memory or disk.
    """
    _check_options(image_size, validation_split, subset, seed, color, dtype)
    found = find_labelled(os.fspath(directory), extensions)
    order = split_order(len(found.paths), validation_split, subset, seed)
    if not len(order):
        raise UserError(
            f"validation_split={validation_split} of {len(found.paths)} images leaves none for "
            f"{subset}",
            "Choose another fraction.",
        )
    decoding = Decoding(image_size, color, found.files)
    return ImageFolder(
        found.classes,
        tuple(found.paths[i] for i in order),
        tuple(found.labels[i] for i in order),
        make_cache(cache, decoding, len(order), replicas_here()),
        dtype,
    )


def _check_options(
    image_size: tuple[int, int],
    validation_split: float | None,
    subset: str | None,
    seed: int,
    color: str,
    dtype: torch.dtype,
) -> None:
    if len(image_size) != 2 or any(not isinstance(n, int) or n < 1 for n in image_size):
        raise UserError(
            f"image_size={image_size!r} is not (height, width) in pixels, both at least 1",
            "For example image_size=(180, 180).",
        )
    check_split(validation_split, subset, seed)
    if color not in MODES:
        raise UserError(f"unknown color {color!r}", nearest(str(color), MODES))
    if not (dtype.is_floating_point or dtype == torch.uint8):
        raise UserError(
            f"dtype={dtype} does not hold the values 0 to 255 of an image",
            "Use torch.float32, another floating type, or torch.uint8.",
        )


def check_split(validation_split: float | None, subset: str | None, seed: int) -> None:
    """Raise `UserError` for a split that cannot be, or is said by halves.

    Args:
        validation_split: The fraction for validation.
        subset: "training" or "validation".
        seed: What it is drawn from.
    """
    if subset is not None and subset not in SUBSETS:
        raise UserError(f"unknown subset {subset!r}", nearest(str(subset), SUBSETS))
    if (validation_split is None) != (subset is None):
        raise UserError(
            f"validation_split={validation_split} and subset={subset!r} must come together",
            'For example validation_split=0.2, subset="training".',
        )
    if validation_split is not None and not 0 < validation_split < 1:
        raise UserError(
            f"validation_split={validation_split} is not between 0 and 1",
            "0.2 keeps a fifth of the examples for validation.",
        )
    if not isinstance(seed, int) or seed < 0:
        raise UserError(f"seed={seed!r} is not an integer of at least 0", "For example seed=1337.")
