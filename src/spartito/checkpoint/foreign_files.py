"""What a path holds, whoever wrote it: a checkpoint, a safetensors file, a torch state_dict."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spartito.checkpoint.manager import STATE, CheckpointManager, read_trees
from spartito.checkpoint.stored_parts import SUFFIX, InMemory, Reader, Tensors, section_files
from spartito.errors import UserError
from spartito.storage.atomic import MANIFEST, read_manifest, verify
from spartito.storage.tensors import Json

MODEL = "model"
PLAIN = (".pt", ".pth", ".bin", ".ckpt")
"""How files end that ``torch.save`` has written."""
INSIDE = ("state_dict", "model_state_dict", "model")
"""Where other programs keep the state_dict in a larger file."""


@dataclass(frozen=True)
class Opened:
    """What was found at a path, of which only the heads of files are read.

    Args:
        path: Where it is.
        kind: What it is, in words.
        trees: Of its sections, by name.
        sections: Their tensors.
        about: What its manifest says, if it has one.
    """

    path: Path
    kind: str
    trees: Mapping[str, Json]
    sections: Mapping[str, Tensors]
    about: Mapping[str, Any]

    @property
    def model(self) -> Tensors:
        """The tensors of its model; a `UserError` where it has none."""
        found = self.sections.get(MODEL)
        if found is None or not found.names:
            raise UserError(f"{self.path} holds no model: its sections are {[*self.sections]}")
        return found

    def verify(self, *sections: str) -> None:
        """Compare the files of sections, of all where none is named, with their checksums.

        Raises:
            UserError: If one has changed; what has no manifest tells nothing.
        """
        if not (self.path / MANIFEST).exists():
            return
        readers = [self.sections[name] for name in sections]
        files = {file.name for each in readers for n in each.names for file in each.files_of(n)}
        verify(self.path, files if sections else None)


def opened(path: Path) -> Opened:
    """Look into ``path``.

    Args:
        path: A checkpoint, a folder of them or a run folder (the newest is taken), a folder of
            safetensors files, one such file, or a file that ``torch.save`` wrote.

    Raises:
        UserError: If it is none of these, or is not whole.
    """
    if path.is_dir():
        return _of_directory(path)
    if not path.exists():
        raise UserError(f"{path} does not exist", "Name a checkpoint, or a file with a model.")
    if path.suffix == SUFFIX:
        return _of_model(path, "a safetensors file", Reader.of([path]))
    if path.suffix in PLAIN:
        return _of_model(path, "a torch state_dict", InMemory(read_plain(path)))
    raise UserError(
        f"{path} is no checkpoint: its name ends with {path.suffix or 'no suffix'}",
        f"Name a checkpoint's directory, or a file that ends with {SUFFIX}, {', '.join(PLAIN)}.",
    )


def checkpoints_in(path: Path) -> list[Path]:
    """The checkpoints that ``path`` means: itself, or all of a folder or run folder."""
    if (path / STATE).exists() or (path / MANIFEST).exists():
        return [path]
    return CheckpointManager(path).all() or CheckpointManager(path / "checkpoints").all()


def check(path: Path) -> Opened:
    """Compare a checkpoint with its checksums, and see that nothing of its state is missing.

    Raises:
        UserError: If something is wrong; the file is named.
    """
    verify(path)
    found = _of_checkpoint(path)
    for section, tree in found.trees.items():
        there = set(found.sections[section].names)
        if lost := [name for name in _leaves(tree) if name not in there]:
            raise UserError(f"{path / STATE} names {lost[0]} of {section}, which no file holds")
    return found


def read_plain(path: Path) -> dict[str, Tensor]:
    """The tensors of a file that ``torch.save`` wrote, by name; nothing in it is run.

    Raises:
        UserError: If it holds anything but tensors, also inside of `INSIDE`.
    """
    try:
        try:
            found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError:  # written by an old torch: it cannot be mapped
            found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        first = str(error).partition("\n")[0]
        raise UserError(
            f"{path} is no torch file of plain tensors: {first}",
            "Save the weights alone: torch.save(model.state_dict(), path).",
        ) from error
    keys = [*found] if isinstance(found, Mapping) else []
    for name in INSIDE:
        if isinstance(found, Mapping) and isinstance(found.get(name), Mapping):
            found = found[name]
    if isinstance(found, Mapping):
        odd = [name for name, value in found.items() if not isinstance(value, Tensor)]
        if found and not odd:
            return {str(name): value for name, value in found.items()}
    what = f"a dict of {keys[:6]}" if keys else f"a {type(found).__name__}"
    raise UserError(
        f"{path} holds {what}, and no state_dict: names with their tensors",
        "Save the weights alone: torch.save(model.state_dict(), path).",
    )


def _of_directory(path: Path) -> Opened:
    if (path / STATE).exists():
        return _of_checkpoint(path)
    if section_files(path, MODEL) and not (path / MANIFEST).exists():
        return _of_model(path, "safetensors files", Reader(path, MODEL))
    found = checkpoints_in(path)
    if not found or found == [path]:
        raise UserError(
            f"{path} holds no checkpoint: it has no {STATE}, and no {MODEL}{SUFFIX}",
            "Name a checkpoint's directory, a folder of them, or a file with a model.",
        )
    return _of_checkpoint(found[-1])


def _of_checkpoint(path: Path) -> Opened:
    trees = read_trees(path)
    manifest = read_manifest(path)
    if missing := [name for name in manifest.files if not (path / name).exists()]:
        raise UserError(
            f"{path / missing[0]} is missing",
            "Take another checkpoint; where its model is whole, name the model's file.",
        )
    sections = {name: Reader(path, name) for name in trees}
    return Opened(path, "a checkpoint", trees, sections, manifest.about)


def _of_model(path: Path, kind: str, tensors: Tensors) -> Opened:
    tree = {name: {"$tensor": name} for name in tensors.names}
    return Opened(path, kind, {MODEL: tree}, {MODEL: tensors}, {})


def _leaves(tree: Json) -> Iterator[str]:
    """The tensors that a tree has marks for."""
    if isinstance(tree, dict):
        if [*tree] == ["$tensor"]:
            yield tree["$tensor"]
        else:
            for value in tree.values():
                yield from _leaves(value)
    elif isinstance(tree, list):
        for value in tree:
            yield from _leaves(value)
