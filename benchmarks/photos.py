"""JPEG files of camera size in one folder per class, from real photos or made up."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

SIZE = (500, 375)
CLASSES = ("Cat", "Dog")


def make_photos(
    folder: Path, count: int, photos: Path | None = None, size: tuple[int, int] = SIZE
) -> None:
    """Write ``count`` files of ``size``; ``photos`` has one folder per class to enlarge from."""
    found = [] if photos is None else sorted(photos.glob("*/*.jpg"))
    random = np.random.default_rng(0)
    for number in range(count):
        name = CLASSES[number % len(CLASSES)]
        (folder / name).mkdir(parents=True, exist_ok=True)
        if found:
            with Image.open(found[random.integers(len(found))]) as small:
                image = small.convert("RGB").resize(size, Image.Resampling.LANCZOS)
        else:
            image = _made_up(random, size)
        image.save(folder / name / f"{number}.jpg", quality=90)


def _made_up(random: np.random.Generator, size: tuple[int, int]) -> Image.Image:
    """Smooth shapes with the grain of a sensor: 50 to 60 kB at 500x375, as in 2007."""
    coarse = random.integers(0, 256, (12, 16, 3), dtype=np.uint8)
    smooth = np.asarray(Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC), float)
    grain = random.normal(0, 4, smooth.shape)
    return Image.fromarray((smooth + grain).clip(0, 255).astype(np.uint8))
