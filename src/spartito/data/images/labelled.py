"""Images in one folder for each class: which there are, and what each is labelled with."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, groupby

from spartito.data.images.headers import EXTENSIONS
from spartito.data.images.image_files import ImageFiles, LocalImages, RemoteImages
from spartito.data.images.walk import image_files, is_image, subfolders
from spartito.errors import UserError
from spartito.storage.files import open_files
from spartito.storage.span_cache import default_cache
from spartito.urls import is_remote, local_path


@dataclass(frozen=True, slots=True)
class Labelled:
    """The images of a folder, one folder per class.

    Attributes:
        classes: Their names, sorted.
        paths: Of the images, those of the first class first.
        labels: The index of the class of each.
        files: Where they lie.
    """

    classes: tuple[str, ...]
    paths: tuple[str, ...]
    labels: tuple[int, ...]
    files: ImageFiles


def find_labelled(directory: str, extensions: Sequence[str] = EXTENSIONS) -> Labelled:
    """The images below one folder for each class, labelled by the folders' sorted order.

    Args:
        directory: The folder that has the folders of the classes, or its URL in a store.
        extensions: How names of images end.

    Raises:
        UserError: No such folder, fewer than two classes, or a class without an image.
    """
    look = _in_store if is_remote(directory) and not local_path(directory) else _in_folder
    return look(local_path(directory) or directory, extensions)


def _in_folder(directory: str, extensions: Sequence[str]) -> Labelled:
    """The images of a folder of this machine."""
    classes = subfolders(directory)
    _check_classes(directory, classes)
    by_class = {
        name: image_files(os.path.join(directory, name), extensions).images for name in classes
    }
    return _labelled(directory, by_class, extensions, LocalImages())


def _in_store(url: str, extensions: Sequence[str]) -> Labelled:
    """The images of a folder in a store, in the order that they have in one of this machine."""
    files = open_files(url)
    found = sorted(files.find(), key=lambda file: file.name.split("/"))
    by_class: dict[str, tuple[str, ...]] = {}
    for name, group in groupby(found, key=lambda file: file.name.partition("/")[0]):
        inside = [file.name for file in group if "/" in file.name]
        if inside:
            by_class[name] = tuple(
                f"{files.url}/{each}"
                for each in inside
                if is_image(each.rpartition("/")[2], extensions)
            )
    _check_classes(files.url, tuple(by_class))
    remote = RemoteImages(files, found, default_cache())
    return _labelled(files.url, by_class, extensions, remote)


def _labelled(
    where: str,
    by_class: Mapping[str, tuple[str, ...]],
    extensions: Sequence[str],
    files: ImageFiles,
) -> Labelled:
    for name, paths in by_class.items():
        if not paths:
            raise UserError(
                f"class folder {name!r} of {where!r} has no image ({', '.join(extensions)})",
                "Remove the folder, or put images into it.",
            )
    counted = enumerate(by_class.values())
    return Labelled(
        tuple(by_class),
        tuple(chain.from_iterable(by_class.values())),
        tuple(label for label, paths in counted for _ in paths),
        files,
    )


def _check_classes(where: str, classes: tuple[str, ...]) -> None:
    layout = "Make one folder per class: DIR/cat/1.jpg, DIR/dog/1.jpg."
    if not classes:
        raise UserError(f"{where!r} has no folders of classes", layout)
    if len(classes) == 1:
        raise UserError(
            f"{where!r} has only one class, {classes[0]!r}; at least 2 are needed", layout
        )
