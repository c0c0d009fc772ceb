"""Changes to one sample's image: random ones, drawn from a generator that they are given.

The dataset seeds that generator from (seed, epoch, index), so that a sample comes out the same on
whichever replica and thread it is made.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import grid_sample

from spartito.errors import UserError
from spartito.names import nearest


class RandomTransform(ABC):
    """A random change of one sample that depends on the sample and the generator alone."""

    def apply(self, sample: Any, generator: np.random.Generator) -> Any:
        """Change the image of a sample.

        Args:
            sample: A tensor, a tuple whose first part is one, or a dict with the key ``"x"``.
            generator: What to draw from, seeded for this sample.

        Returns:
            The sample with another image; the one that came is left as it was.
        """
        return on_image(lambda image: self.transform(image, generator), sample)

    @abstractmethod
    def transform(self, image: torch.Tensor, generator: np.random.Generator) -> torch.Tensor:
        """Change an image.

        Args:
            image: Shape ``(channels, height, width)``.
            generator: What to draw from, seeded for this sample.

        Returns:
            The changed image, of the same shape and dtype.
        """


def on_image(change: Callable[[torch.Tensor], torch.Tensor], sample: Any) -> Any:
    """``sample`` with ``change`` applied to its image; the sample that came is left as it was."""
    if isinstance(sample, torch.Tensor):
        return change(sample)
    if isinstance(sample, tuple | list) and sample:
        parts = [change(sample[0]), *sample[1:]]
        return parts if isinstance(sample, list) else tuple(parts)
    if isinstance(sample, Mapping) and "x" in sample:
        return {**sample, "x": change(sample["x"])}
    raise UserError(
        f"a sample of type {type(sample).__name__} has no image to transform",
        'Give a tensor, a tuple whose first part is one, or a dict with the key "x".',
    )


FLIPS = {"horizontal": (-1,), "vertical": (-2,), "horizontal_and_vertical": (-1, -2)}
"""The dims that a flip of this name may turn around."""


@dataclass(frozen=True)
class RandomFlip(RandomTransform):
    """Mirrors half of the images; with two directions each is drawn on its own.

    Attributes:
        mode: "horizontal", "vertical" or "horizontal_and_vertical".
    """

    mode: str = "horizontal"

    def __post_init__(self) -> None:
        """Raise `UserError` for an unknown mode."""
        if self.mode not in FLIPS:
            raise UserError(f"unknown flip {self.mode!r}", nearest(str(self.mode), FLIPS))

    def transform(self, image: torch.Tensor, generator: np.random.Generator) -> torch.Tensor:
        dims = [dim for dim in FLIPS[self.mode] if generator.random() < 0.5]
        return image.flip(dims) if dims else image


FILLS = {"reflect": "reflection", "nearest": "border", "constant": "zeros"}
"""What stands outside of an image, by Keras' name and by torch's."""


@dataclass(frozen=True)
class RandomRotation(RandomTransform):
    """Turns an image around its centre by up to ``factor`` of a full turn, either way.

    The angle is uniform in ±``factor`` x 2π, pixels are bilinear, as in Keras' layer of this name.

    Attributes:
        factor: A fraction of a full turn, 0 to 1.
        fill_mode: What is outside of the image: "reflect" (dcba|abcd|dcba), "nearest"
            (aaaa|abcd|dddd) or "constant" (0).
    """

    factor: float
    fill_mode: str = "reflect"

    def __post_init__(self) -> None:
        """Raise `UserError` for a factor outside 0 to 1 or an unknown fill mode."""
        if not 0 <= self.factor <= 1:
            raise UserError(
                f"rotation factor {self.factor} is not within 0 and 1",
                "It is a fraction of a full turn: 0.1 is up to 36 degrees either way.",
            )
        if self.fill_mode not in FILLS:
            raise UserError(
                f"unknown fill mode {self.fill_mode!r}", nearest(str(self.fill_mode), FILLS)
            )

    def transform(self, image: torch.Tensor, generator: np.random.Generator) -> torch.Tensor:
        return rotate(image, generator.uniform(-1, 1) * self.factor * 2 * math.pi, self.fill_mode)


def rotate(image: torch.Tensor, angle: float, fill_mode: str = "reflect") -> torch.Tensor:
    """The image ``(channels, height, width)`` turned counter-clockwise by ``angle`` radians."""
    if image.ndim != 3 or not image.is_floating_point():
        raise UserError(
            f"an image of shape {tuple(image.shape)} and {image.dtype} cannot be rotated",
            "Give floating values of shape (channels, height, width).",
        )
    if angle == 0:
        return image
    exact = image if image.dtype in (torch.float32, torch.float64) else image.float()
    source = exact.numpy()
    turned = grid_sample(
        exact[None],
        torch.from_numpy(_coordinates(angle, *source.shape[1:]).astype(source.dtype)),
        mode="bilinear",
        padding_mode=FILLS[fill_mode],
        align_corners=False,
    )
    # numpy for what is around: on a reading thread, torch would share each copy with its pool.
    result = np.empty_like(source)
    np.copyto(result, turned[0].numpy())
    return torch.from_numpy(result).to(image.dtype)


def _coordinates(angle: float, height: int, width: int) -> NDArray[np.float64]:
    """Where each pixel of a turned image comes from: (x, y), both sides from -1 to 1.

    Of shape ``(1, height, width, 2)``. An oblong needs the ratio of its sides.
    """
    cos, sin = math.cos(angle), math.sin(angle)
    x = (2 * np.arange(width) + 1) / width - 1
    y = ((2 * np.arange(height) + 1) / height - 1)[:, None]
    coordinates = np.empty((1, height, width, 2))
    np.subtract(cos * x, sin * height / width * y, out=coordinates[0, ..., 0])
    np.add(sin * width / height * x, cos * y, out=coordinates[0, ..., 1])
    return coordinates


@dataclass(frozen=True)
class Rescale:
    """Multiplies an image by a number and adds another; whole numbers become float32.

    Attributes:
        scale: What every value is multiplied by, as 1/255.
        offset: What is added then.
    """

    scale: float
    offset: float = 0.0

    def __call__(self, *sample: Any) -> Any:
        """The sample with its image rescaled; for ``dataset.map``."""
        return on_image(self._rescale, sample if len(sample) > 1 else sample[0])

    def _rescale(self, image: torch.Tensor) -> torch.Tensor:
        wide = image if image.is_floating_point() else image.float()
        return wide * self.scale + self.offset
