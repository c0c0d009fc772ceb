"""Reads folders of photos with one library, and prints the images per second.

Runs under the Python of that library; TensorFlow needs nothing else, the others Pillow.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SIDE, BATCH = 180, 32

Variants = dict[str, Callable[[], Iterable[Any]]]
"""What gives the batches ``(x, y)`` of an epoch each time it is iterated, by name."""


@contextmanager
def spartito(folder: Path) -> Iterator[Variants]:
    """Decoding each time, and both caches."""
    import spartito as sp

    def images(cache: str | None) -> Iterable[Any]:
        return sp.data.image_folder(folder, (SIDE, SIDE), cache=cache).batch(BATCH)

    with tempfile.TemporaryDirectory() as kept:
        yield {
            "": lambda: images(None),
            ", memory": lambda: images("memory"),
            ", directory": lambda: images(kept),
        }


@contextmanager
def torch(folder: Path) -> Iterator[Variants]:
    """As a user writes it, and with Pillow's reduced scale."""
    from torch.utils.data import DataLoader, Dataset

    class Photos(Dataset[Any]):
        def __init__(self, reduced: bool) -> None:
            self.paths, self.labels = listed(folder)
            self.reduced = reduced

        def __len__(self) -> int:
            return len(self.paths)

        def __getitem__(self, index: int) -> Any:
            import torch

            pixels = decoded(self.paths[index], self.reduced)
            return torch.from_numpy(pixels).permute(2, 0, 1).float(), self.labels[index]

    def loader(workers: int, reduced: bool = False) -> Iterable[Any]:
        lasting = workers > 0
        return DataLoader(Photos(reduced), BATCH, num_workers=workers, persistent_workers=lasting)

    yield {
        ", 0 workers": lambda: loader(0),
        ", 2 workers": lambda: loader(2),
        ", 2 workers, reduced scale": lambda: loader(2, reduced=True),
    }


@contextmanager
def tensorflow(folder: Path) -> Iterator[Variants]:
    """As its guide writes it, with its reduced scale, and with its cache in memory."""
    import tensorflow as tf

    paths, labels = listed(folder)
    shorter = min(map(int, folder.name.split("x")))  # "500x375"
    smallest = max(ratio for ratio in (1, 2, 4, 8) if shorter // ratio >= SIDE)

    def load(ratio: int) -> Callable[[Any, Any], Any]:
        def one(path: Any, label: Any) -> Any:
            image = tf.io.decode_jpeg(tf.io.read_file(path), channels=3, ratio=ratio)
            return tf.image.resize(image, (SIDE, SIDE)), label

        return one

    def images(ratio: int = 1, kept: bool = False) -> Iterable[Any]:
        data = tf.data.Dataset.from_tensor_slices((paths, labels))
        data = data.map(load(ratio), tf.data.AUTOTUNE)
        found: Iterable[Any] = (
            (data.cache() if kept else data).batch(BATCH).prefetch(tf.data.AUTOTUNE)
        )
        return found

    yield {
        "": images,
        ", reduced scale": lambda: images(smallest),
        ", memory": lambda: images(kept=True),
    }


@contextmanager
def grain(folder: Path) -> Iterator[Variants]:
    """As its guide writes it: in its threads, with Pillow."""
    import grain as library
    import numpy as np

    paths, labels = listed(folder)

    def load(index: int) -> Any:
        return decoded(paths[index], reduced=False).astype(np.float32), labels[index]

    yield {
        "": lambda: library.MapDataset.range(len(paths)).map(load).batch(BATCH).to_iter_dataset()
    }


def listed(folder: Path) -> tuple[list[str], list[int]]:
    """All files, and the number of the class of each."""
    classes = sorted(path.name for path in folder.iterdir())
    files = sorted(folder.glob("*/*.jpg"))
    return list(map(str, files)), [classes.index(path.parent.name) for path in files]


def decoded(path: str, reduced: bool) -> Any:
    """Pixels as bytes, by Pillow's bilinear filter."""
    import numpy as np
    from PIL import Image

    with Image.open(path) as image:
        if reduced:
            image.draft("RGB", (SIDE, SIDE))
        small = image.convert("RGB").resize((SIDE, SIDE), Image.Resampling.BILINEAR)
        return np.array(small)


def images_per_second(batches: Iterable[Any], least: float) -> float:
    """Over as many whole epochs as begin within ``least`` seconds."""
    began, images = time.perf_counter(), 0
    while not images or time.perf_counter() - began < least:
        images += sum(len(y) for _, y in batches)
    return images / (time.perf_counter() - began)


def main() -> None:
    """Print ``{folder: {variant: images per second}}``, without the first epoch of each."""
    options = argparse.ArgumentParser()
    options.add_argument("library", choices=list(LIBRARIES))
    options.add_argument("folders", type=Path, nargs="+")
    options.add_argument("--seconds", type=float, required=True)
    given = options.parse_args()
    found: dict[str, dict[str, float]] = {}
    for folder in given.folders:
        with LIBRARIES[given.library](folder) as variants:
            found[folder.name] = {}
            for name, make in variants.items():
                batches = make()
                images_per_second(batches, 0.0)  # starts workers, traces graphs, fills caches
                rate = images_per_second(batches, given.seconds)
                found[folder.name][given.library + name] = rate
    print(json.dumps(found), flush=True)


LIBRARIES = {each.__name__: each for each in (spartito, torch, tensorflow, grain)}

if __name__ == "__main__":
    main()
