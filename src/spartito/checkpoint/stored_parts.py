"""Parts of tensors in any number of files, read as any other parts.

A section of a checkpoint is one file, ``model.safetensors``, or several of them, as
``model-00002-of-00004.safetensors``. What a file holds is a box of a whole tensor; the head of the
file says of which, and where, unless it is all of it. So a file tells by itself what is in it, one
with whole tensors is what every other program expects, and those that others wrote in several files
can be read.

**For strategies that cut tensors**: all of saving and loading is in `Step`. A placement, or an
exchange, says in

    def cuts(self, pair: Pair, section: str) -> Mapping[str, Cut]

under the user's names which parameters and buffers this task has a part of, and which one: a
`BoxCut` where it is one box, as a tensor of the box's shape (also of several dimensions at once), a
`SpanCut` where it is a range of the elements, as a flat tensor. What is not named is whole.
``section`` is "model", "optimizer" or "accumulated" (gradients that wait): ZeRO's first stages cut
the last two alone. State of the optimizer that has the parameter's local shape is cut as the
parameter is, a single number (a step counter) is whole, and anything else of a cut parameter is
refused. Nobody says who writes: of the tasks that hold the same box the first one does; that all
boxes together are the whole tensor is checked before anything is written.

A task may lack parameters altogether (a stage of a pipeline): ``state_dict()`` of its model and
`named_state` of its optimizer then have fewer names than those of the others, and nothing is to be
said. Where the local tensors are not those in ``model.state_dict()``, as DTensors, override

    def _state(self, pair: Pair) -> dict[str, Any]

so that it returns plain local ones. What is loaded is copied into the model's own tensors (into
``to_local()`` of a DTensor); the optimizer's state becomes new tensors like the local parameter.
``strategy.state_dict()`` gathers the whole for everybody, and ``load_state_dict`` takes the task's
own part of whole tensors.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from spartito.checkpoint.cuts import Box, gap
from spartito.errors import UserError
from spartito.storage.atomic import TAKE_ANOTHER
from spartito.storage.stream import DTYPES, Entry, in_order, write_stream
from spartito.storage.tensors import ALIASES, metadata_with, same_tensors

SUFFIX = ".safetensors"
BOXES = "boxes"
"""Where the head of a file has the boxes: ``{key: [tensor, whole shape, offsets]}``."""


@dataclass(frozen=True)
class Slot:
    """A part without its values: a box of a tensor that has a name, a whole shape and a dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    box: Box

    @property
    def is_whole(self) -> bool:
        """Whether it is all of the tensor."""
        return self.box == Box.all_of(self.shape)


def file_name(section: str, number: int, count: int) -> str:
    """The name of file ``number`` of ``count``, from 1."""
    return f"{section}-{number:05d}-of-{count:05d}{SUFFIX}" if count > 1 else section + SUFFIX


def arrange(slots: Iterable[Slot]) -> tuple[list[Slot], list[Entry], dict[str, Any]]:
    """What a file with ``slots`` looks like.

    Returns:
        The slots in the order of the file, its entries, and what its head says of the boxes.
    """
    keyed: dict[str, Slot] = {}
    all_ = list(slots)
    names = {slot.name for slot in all_}
    for slot in all_:
        key, number = slot.name, 1
        while key in keyed or (number > 1 and key in names):
            number += 1
            key = f"{slot.name}#{number}"
        keyed[key] = slot
    entries = in_order(Entry(key, slot.box.sizes, slot.dtype) for key, slot in keyed.items())
    boxes = {
        key: [slot.name, slot.shape, slot.box.offsets]
        for key, slot in keyed.items()
        if not slot.is_whole or key != slot.name
    }
    return [keyed[entry.name] for entry in entries], entries, boxes


def write_slots(
    file: Path, slots: Sequence[Slot], tensors: Iterable[Tensor], aliases: Mapping[str, str]
) -> None:
    """Write a file of parts.

    Args:
        file: Its path.
        slots: What it holds, in the order that `arrange` gives.
        tensors: Their values in that order; each is asked for when the one before is written.
        aliases: Names that stand for others (tied weights).

    Raises:
        UserError: If it cannot be written.
    """
    _, entries, boxes = arrange(slots)
    metadata = metadata_with(aliases) | ({BOXES: json.dumps(boxes)} if boxes else {})
    write_stream(file, entries, tensors, metadata)


class Tensors(Protocol):
    """Named tensors that are read box by box."""

    @property
    def names(self) -> list[str]:
        """Of all tensors."""
        ...

    @property
    def aliases(self) -> Mapping[str, str]:
        """Which of the names stand for which others."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """That of the whole tensor."""
        ...

    def dtype(self, name: str) -> torch.dtype:
        """That of a tensor."""
        ...

    def read(self, name: str, box: Box | None = None) -> Tensor:
        """A box of a tensor, or all of it, on the CPU; not to be written to."""
        ...

    def files_of(self, name: str) -> list[Path]:
        """The files that a tensor is in, if any."""
        ...


class InMemory:
    """Whole tensors that are there already."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    @property
    def names(self) -> list[str]:
        """Of all tensors."""
        return list(self._tensors)

    @cached_property
    def aliases(self) -> Mapping[str, str]:
        """Which of the names stand for which others: the same memory."""
        return same_tensors(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """That of the whole tensor."""
        return tuple(self._tensors[name].shape)

    def dtype(self, name: str) -> torch.dtype:
        """That of a tensor."""
        return self._tensors[name].dtype

    def read(self, name: str, box: Box | None = None) -> Tensor:
        """A view of a tensor."""
        tensor = self._tensors[name].detach()
        return tensor if box is None else tensor[box.within(Box.all_of(tensor.shape))]

    def files_of(self, name: str) -> list[Path]:
        """None."""
        return []


@dataclass(frozen=True)
class _Stored:
    """Where a part is: a key of a file."""

    file: Path
    key: str
    slot: Slot


class Reader:
    """The tensors of one section of a checkpoint, from however many files.

    Only the heads of the files are read at first. What is read of one part alone is a view of
    the file; what lies in several is put together. A section without files has no tensors.

    Args:
        directory: That of the checkpoint, or any other with safetensors files so named.
        section: "model", "optimizer", ...

    Raises:
        UserError: If a file is missing or damaged, which it names, or boxes are missing.
    """

    def __init__(self, directory: str | os.PathLike[str], section: str) -> None:
        self._read(section_files(Path(directory), section))

    @classmethod
    def of(cls, files: Sequence[Path]) -> Reader:
        """The tensors of these files, whatever they are called."""
        made = cls.__new__(cls)
        made._read(files)
        return made

    def _read(self, files: Sequence[Path]) -> None:
        self.files = files
        self._stored: dict[str, list[_Stored]] = {}
        self._aliases: dict[str, str] = {}
        self._open: dict[Path, Any] = {}
        for file in files:
            for stored in self._look(file):
                self._stored.setdefault(stored.slot.name, []).append(stored)
        self._check()

    @property
    def names(self) -> list[str]:
        """Of all tensors, also those that stand for another."""
        return [*self._stored, *self._aliases]

    @property
    def aliases(self) -> Mapping[str, str]:
        """Which names stand for which others."""
        return self._aliases

    def files_of(self, name: str) -> list[Path]:
        """The files that have a part of a tensor."""
        return [stored.file for stored in self._of(name)]

    def shape(self, name: str) -> tuple[int, ...]:
        """That of the whole tensor."""
        return self._of(name)[0].slot.shape

    def dtype(self, name: str) -> torch.dtype:
        """That of a tensor."""
        return self._of(name)[0].slot.dtype

    def read(self, name: str, box: Box | None = None) -> Tensor:
        """A box of a tensor, or all of it, on the CPU; not to be written to."""
        parts = self._of(name)
        want = Box.all_of(parts[0].slot.shape) if box is None else box
        for part in parts:
            if want.numel == 0 or part.slot.box.common(want) == want:
                return self._slice(part, want)
        whole = torch.empty(want.sizes, dtype=parts[0].slot.dtype)
        for part in parts:
            if (common := part.slot.box.common(want)) is not None:
                whole[common.within(want)] = self._slice(part, common)
        return whole

    def all(self) -> dict[str, Tensor]:
        """All tensors whole; names that stand for another have the same one."""
        found = {name: self.read(name) for name in self._stored}
        return found | {name: found[owner] for name, owner in self._aliases.items()}

    def _of(self, name: str) -> list[_Stored]:
        return self._stored[self._aliases.get(name, name)]

    def _slice(self, part: _Stored, box: Box) -> Tensor:
        content = self._open[part.file]
        if box.numel == 0:
            return torch.empty(box.sizes, dtype=part.slot.dtype)
        try:
            tensor: Tensor
            if box == part.slot.box:
                tensor = content.get_tensor(part.key)
            else:
                tensor = content.get_slice(part.key)[box.within(part.slot.box)]
        except (OSError, SafetensorError) as error:
            raise UserError(f"{part.file} cannot be read: {error}", TAKE_ANOTHER) from error
        return tensor

    def _look(self, file: Path) -> Iterator[_Stored]:
        """What the head of ``file`` says."""
        try:
            content: Any = safe_open(os.fspath(file), framework="pt")
            self._open[file] = content
            metadata = content.metadata() or {}
            self._aliases |= json.loads(metadata.get(ALIASES, "{}"))
            boxes = json.loads(metadata.get(BOXES, "{}"))
            for key in content.keys():  # noqa: SIM118
                head = content.get_slice(key)
                sizes = tuple(head.get_shape())
                name, shape, offsets = boxes.get(key, (key, sizes, (0,) * len(sizes)))
                slot = Slot(
                    str(name), tuple(shape), DTYPES[head.get_dtype()], Box(tuple(offsets), sizes)
                )
                yield _Stored(file, key, slot)
        except (OSError, SafetensorError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise UserError(
                f"{file} is not a safetensors file that can be read: {error}", TAKE_ANOTHER
            ) from error

    def _check(self) -> None:
        for name, parts in self._stored.items():
            first = parts[0]
            for other in parts:
                if (first.slot.shape, first.slot.dtype) != (other.slot.shape, other.slot.dtype):
                    raise UserError(
                        f"{first.file} and {other.file} have parts of different tensors {name}",
                        TAKE_ANOTHER,
                    )
            if wrong := gap(first.slot.shape, [part.slot.box for part in parts]):
                raise UserError(
                    f"{name} is not complete in {self.files[0].parent}: {wrong}", TAKE_ANOTHER
                )
        if lost := [name for name, owner in self._aliases.items() if owner not in self._stored]:
            raise UserError(
                f"{lost[0]} stands for {self._aliases[lost[0]]}, which is not in "
                f"{self.files[0].parent}",
                TAKE_ANOTHER,
            )


def section_files(directory: Path, section: str) -> list[Path]:
    """The files of a section, in order; none where it has no tensors.

    Raises:
        UserError: If one of several is missing, which is named.
    """
    whole = directory / (section + SUFFIX)
    if whole.exists():
        return [whole]
    pattern = re.compile(re.escape(section) + r"-(\d{5,})-of-(\d{5,})" + re.escape(SUFFIX))
    found = [match for file in directory.glob("*") if (match := pattern.fullmatch(file.name))]
    if not found:
        return []
    count = max(int(match[2]) for match in found)
    names = [f"{section}-{number + 1:05d}-of-{count:05d}{SUFFIX}" for number in range(count)]
    files = [directory / name for name in names]
    for file in files:
        if not file.exists():
            raise UserError(f"{file} is missing: {section} is in {count} files", TAKE_ANOTHER)
    return files
