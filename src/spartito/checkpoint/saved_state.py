"""A state that is read part by part, from a checkpoint or from memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from spartito.checkpoint.cuts import Cut
from spartito.checkpoint.manager import read_trees
from spartito.checkpoint.stored_parts import InMemory, Reader, Tensors
from spartito.errors import UserError
from spartito.storage.tensors import Json, pack_state, unpack_state

T = TypeVar("T")


class Saved:
    """The sections of a state.

    Args:
        trees: Their trees, by name.
        tensors: Gives the tensors of a section.
        strict: Whether it has to be all of a model, and nothing else.
    """

    def __init__(
        self,
        trees: Mapping[str, Json],
        tensors: Callable[[str], Tensors],
        strict: bool = True,
    ) -> None:
        self._trees, self._tensors, self.strict = trees, tensors, strict
        self._read: dict[str, Tensors] = {}

    @classmethod
    def at(cls, directory: Path) -> Saved:
        """Those of a checkpoint; its checksums are not compared."""
        return cls(read_trees(directory), lambda section: Reader(directory, section))

    @classmethod
    def of(cls, state: Mapping[str, Any], strict: bool = True) -> Saved:
        """Those of a state in memory."""
        packed = {section: pack_state(tree, section) for section, tree in state.items()}
        trees = {section: tree for section, (tree, _) in packed.items()}
        return cls(trees, lambda section: InMemory(packed[section][1]), strict)

    def __contains__(self, section: str) -> bool:
        return section in self._trees

    def __iter__(self) -> Iterator[str]:
        return iter(self._trees)

    def tensors(self, section: str) -> Tensors:
        """The tensors of a section."""
        if section not in self._read:
            self._read[section] = self._tensors(section)
        return self._read[section]

    def tree(self, section: str) -> Json:
        """The tree of a section, with marks for tensors."""
        return self._trees[section]

    def whole(self, section: str) -> Any:
        """All of a section."""
        return unpack_state(self._trees[section], whole(self.tensors(section)))


class LazyValues(Mapping[str, T]):
    """What ``read`` gives for the name of each of the tensors, when it is asked for."""

    def __init__(self, tensors: Tensors, read: Callable[[str], T]) -> None:
        self._tensors, self._read = tensors, read

    def __getitem__(self, name: str) -> T:
        return self._read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors.names)

    def __len__(self) -> int:
        return len(self._tensors.names)


@dataclass(frozen=True)
class Stored:
    """A tensor of a state that is read when somebody says how much of it is wanted.

    Args:
        tensors: Those of its section.
        name: Its own.
    """

    tensors: Tensors
    name: str

    def read(self, cut: Cut | None = None) -> Tensor:
        """Its values; not to be written to.

        Args:
            cut: What a task has of the parameter that it belongs to; None: all.

        Returns:
            That part of a tensor of the parameter's shape; any other one whole.
        """
        if cut is None or self.tensors.shape(self.name) != cut.shape:
            return self.tensors.read(self.name)
        return read_cut(self.tensors, self.name, cut)


def whole(tensors: Tensors) -> LazyValues[Tensor]:
    """Tensors that are read whole."""
    return LazyValues(tensors, tensors.read)


def unread(tensors: Tensors) -> Mapping[str, Any]:
    """Tensors that are read later: a `Stored` in place of each."""
    return LazyValues(tensors, partial(Stored, tensors))


def of_cut(tensors: Tensors, cut: Cut, owner: str) -> LazyValues[Tensor]:
    """The part that a task has of tensors of a parameter that is cut: read so, or whole numbers."""

    def read(name: str) -> Tensor:
        shape = tensors.shape(name)
        if shape == cut.shape:
            return read_cut(tensors, name, cut)
        if shape in ((), (1,)):
            return tensors.read(name)
        raise UserError(
            f"{name} of the checkpoint is {shape}, and {owner}, of which this task has a part, is "
            f"{cut.shape}",
            "Choose an optimizer whose state has the parameter's shape, as SGD and Adam, or a "
            "strategy that does not cut parameters.",
        )

    return LazyValues(tensors, read)


def read_cut(tensors: Tensors, name: str, cut: Cut) -> Tensor:
    """The local tensor of a cut one; not to be written to."""
    parts = cut.parts(torch.empty(cut.local, dtype=tensors.dtype(name), device="meta"))
    if len(parts) == 1 and parts[0][1].shape == cut.local:
        return tensors.read(name, parts[0][0])  # a view, where it lies so in a file
    local = torch.empty(cut.local, dtype=tensors.dtype(name))
    copy_cut(tensors, name, cut, local)
    return local


def copy_cut(tensors: Tensors, name: str, cut: Cut, local: Tensor) -> None:
    """Copy what a task has of a cut tensor into its own."""
    for box, part in cut.parts(local):
        part.copy_(tensors.read(name, box))
