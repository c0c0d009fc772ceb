"""Data sets: where examples come from, and what is done to them on the way to a replica."""

from typing import TYPE_CHECKING

from spartito._lazy import attach as _attach

if TYPE_CHECKING:
    from spartito.data.batch import Batch
    from spartito.data.blocks.opening import packed
    from spartito.data.dataset import Dataset, arrays, as_dataset, per_worker
    from spartito.data.images.transforms import RandomFlip, RandomRotation, RandomTransform, Rescale
    from spartito.data.mixture import mix
    from spartito.data.sets.cifar import cifar10
    from spartito.data.sets.downloads import get
    from spartito.data.sets.folders import digits, idx, image_folder
    from spartito.data.sets.text import characters
    from spartito.data.source import InputContext
    from spartito.data.windows.opening import tokens

__getattr__ = _attach(
    __name__,
    {
        "Batch": "spartito.data.batch",
        "Dataset": "spartito.data.dataset",
        "InputContext": "spartito.data.source",
        "RandomFlip": "spartito.data.images.transforms",
        "RandomRotation": "spartito.data.images.transforms",
        "RandomTransform": "spartito.data.images.transforms",
        "Rescale": "spartito.data.images.transforms",
        "arrays": "spartito.data.dataset",
        "as_dataset": "spartito.data.dataset",
        "characters": "spartito.data.sets.text",
        "cifar10": "spartito.data.sets.cifar",
        "digits": "spartito.data.sets.folders",
        "get": "spartito.data.sets.downloads",
        "idx": "spartito.data.sets.folders",
        "image_folder": "spartito.data.sets.folders",
        "mix": "spartito.data.mixture",
        "packed": "spartito.data.blocks.opening",
        "per_worker": "spartito.data.dataset",
        "tokens": "spartito.data.windows.opening",
    },
)

__all__ = [
    "Batch",
    "Dataset",
    "InputContext",
    "RandomFlip",
    "RandomRotation",
    "RandomTransform",
    "Rescale",
    "arrays",
    "as_dataset",
    "characters",
    "cifar10",
    "digits",
    "get",
    "idx",
    "image_folder",
    "mix",
    "packed",
    "per_worker",
    "tokens",
]
