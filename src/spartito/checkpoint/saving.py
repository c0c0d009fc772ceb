"""The tasks of a job write one checkpoint together, each its own parts."""

from __future__ import annotations

import ctypes
import json
import math
import mmap
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spartito.checkpoint.cuts import Box
from spartito.checkpoint.manager import write_trees
from spartito.checkpoint.stored_parts import Slot, write_slots
from spartito.checkpoint.write_plan import FilePlan, Local, Plan, plan
from spartito.collectives.collective import Collective
from spartito.errors import UnwritableError, UserError, writable
from spartito.storage.atomic import write_file_atomically
from spartito.storage.tensors import unpack_state
from spartito.system import affinity, large_pages

Attempt = Callable[[Callable[[], str]], list[str]]
"""`Coordination.attempt`: what a function returns on every task, or one error on all."""

ALIGNED = 64  # bytes: of a copy's beginning
CHUNK = 8 << 20  # bytes that a thread copies at once
COPYING = min(4, len(affinity()))  # threads


@dataclass(frozen=True)
class Tasks:
    """The tasks that save together, seen from one of them.

    Args:
        attempt: `Coordination.attempt`.
        group: All tasks that meet.
        is_chief: Whether this one has made the directory.
    """

    attempt: Attempt
    group: Collective
    is_chief: bool


class CopyMemory:
    """Memory for copies of a task's own part, kept from one checkpoint to the next."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, Slot], Tensor] = {}
        self.user: object = None
        """What a thread still writes from them, as for a save that was given up."""

    def of(self, sections: Mapping[str, Mapping[Slot, Tensor]]) -> dict[str, dict[Slot, Tensor]]:
        """Copies of these tensors, by section; those of the last call are overwritten.

        Unless somebody uses them: then these get other memory.
        """
        keys = [(section, slot) for section, slots in sections.items() for slot in slots]
        if self.user is not None or keys != [*self._kept]:
            self._kept = {}  # the older memory goes first
            self._kept = _memory_for(keys)
        _copy(
            (self._kept[section, slot], tensor.detach())
            for section, slots in sections.items()
            for slot, tensor in slots.items()
        )
        return {
            section: {slot: self._kept[section, slot] for slot in slots}
            for section, slots in sections.items()
        }


def _memory_for(keys: Sequence[tuple[str, Slot]]) -> dict[tuple[str, Slot], Tensor]:
    """A tensor for each slot, in one block of large pages: the first copy took half the time."""
    sizes = [slot.box.numel * slot.dtype.itemsize for _, slot in keys]
    starts = [0, *accumulate(-(-size // ALIGNED) * ALIGNED for size in sizes)]
    try:
        block = mmap.mmap(-1, starts[-1] + ALIGNED)
    except OSError as error:
        raise UserError(
            f"a copy of this task's part, {starts[-1] / 2**20:.0f} MiB: {error.strerror}",
            "Save without asynchronous=True: what is there is written as it lies.",
        ) from error
    large_pages(block)
    flat = torch.frombuffer(block, dtype=torch.uint8)
    return {
        (section, slot): flat[start : start + size].view(slot.dtype).view(slot.box.sizes)
        for (section, slot), start, size in zip(keys, starts, sizes, strict=False)
    }


def _copy(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Copy into the first of each pair, which lies in a row, the second.

    What lies in a row too is copied by threads: one alone has not all of a memory's bandwidth.
    """
    chunks = []
    for to, tensor in pairs:
        if tensor.is_cpu and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg()):
            for start in range(0, to.nbytes, CHUNK):
                size = min(CHUNK, to.nbytes - start)
                chunks.append((to.data_ptr() + start, tensor.data_ptr() + start, size))
        else:
            to.copy_(tensor)
    if len(chunks) < 2 * COPYING:
        for chunk in chunks:
            ctypes.memmove(*chunk)
        return
    with ThreadPoolExecutor(COPYING) as threads:
        for _ in threads.map(lambda chunk: ctypes.memmove(*chunk), chunks):
            pass


@dataclass(frozen=True)
class Unwritten:
    """What one task still has to write of a checkpoint; a thread may, as no task is called.

    Args:
        write: Writes it, and leaves a note in the directory that it is there, or why not.
        missing: On the chief, how many tasks have left no such note yet. Once nobody is missing all
            parts are there, or it raises the `UserError` of a task that could not write.
    """

    write: Callable[[], None]
    missing: Callable[[], int]


def save_together(
    directory: Path,
    apart: Callable[[], Mapping[str, Local]],
    tasks: Tasks,
    copies: CopyMemory | None = None,
) -> Unwritten:
    """Write sections into a checkpoint; all tasks call it.

    A task that finds the chief's directory writes its own files there. One that does not sends its
    parts to the chief, one at a time, who writes them at once.

    Args:
        directory: What `spartito.storage.atomic.write_directory` gave on the chief.
        apart: Gives what this task has, by section.
        tasks: All of them.
        copies: Where its part is copied to, to be written later; None: it is written now.

    Returns:
        What is still to be written; without ``copies`` nothing is.

    Raises:
        UserError: On all tasks, if one cannot write, or what they have is no whole model.
    """
    token = secrets.token_hex(8)

    def show() -> str:
        if tasks.is_chief:
            with writable(directory):
                (directory / f".{token}").touch()
        return token

    probe = directory / f".{tasks.attempt(show)[0]}"
    sections, found, shares = _agree(apart, tasks, probe.exists)
    rank, failures = tasks.group.rank, list[UserError]()
    mine = [f for f in found.files if f.owner == rank and (tasks.is_chief or shares[rank])]
    tensors = {
        section: {
            slot: local.tensors[slot]
            for file in mine
            if file.section == section
            for slot in file.slots
        }
        for section, local in sections.items()
    }
    for file in found.files:
        if not shares[file.owner]:
            come = _sent(
                file, sections[file.section].tensors if rank == file.owner else {}, tasks.group
            )
            if tasks.is_chief:
                _write(directory, file, come, failures)
            for _ in come:  # what the chief has left out too: all make the same calls
                pass

    def write() -> str:
        try:
            return write_all()
        finally:
            if copies is not None and copies.user is values:
                copies.user = None

    def write_all() -> str:
        if failures:
            raise failures[0]
        for file in mine:
            own = values[file.section]
            slots = (own[slot] for slot in file.slots)
            write_slots(directory / file.name, file.slots, slots, file.aliases)
        if tasks.is_chief:
            with writable(directory):
                write_trees(directory, found.trees)
                probe.unlink()
        return ""

    values = tensors if copies is None else {}
    if copies is None:
        tasks.attempt(write)
        return Unwritten(lambda: None, lambda: 0)

    def copy() -> str:
        values.update(copies.of(tensors))
        copies.user = values
        return ""

    tasks.attempt(copy)  # nobody writes into memory of several tasks while another still copies
    others = {file.owner for file in found.files if shares[file.owner]} - {rank}
    note = f"{probe.name}-{rank}" if mine and not tasks.is_chief else ""
    others = others if tasks.is_chief else set()
    waited_for = {directory / f"{probe.name}-{other}": other for other in others}
    return Unwritten(
        partial(_noted, directory, note, write), partial(_missing, waited_for, [], tasks)
    )


def _noted(directory: Path, note: str, write: Callable[[], str]) -> None:
    """Write, and leave a note for the chief: empty, or with the error."""
    failure = ""
    try:
        write()
    except UserError as error:
        failure = json.dumps([str(error), isinstance(error, UnwritableError)])
        raise
    finally:
        if note:
            with suppress(UserError):  # a full disk: the others hear of it when they next meet
                write_file_atomically(directory / note, failure)


def _missing(notes: dict[Path, int], failures: list[UserError], tasks: Tasks) -> int:
    """Of how many tasks there is no note yet; those that were read are removed.

    An error of a task is raised when all notes are there: nobody writes any more.
    """
    for note, rank in list(notes.items()):
        if note.exists():
            failure = note.read_text()
            note.unlink()
            del notes[note]
            if failure:
                text, unwritable = json.loads(failure)
                what, _, do = text.partition("\n  ")
                kind = UnwritableError if unwritable else UserError
                failures.append(kind(f"{tasks.group.names[rank]}: {what}", do))
    if failures and not notes:
        raise failures[0]
    return len(notes)


def gather_together(
    apart: Callable[[], Mapping[str, Local]], tasks: Tasks, here: bool = True
) -> dict[str, Any]:
    """All sections whole, on every task; all call it.

    Args:
        apart: Gives what this task has, by section.
        tasks: All of them.
        here: Whether this one wants them; else nothing is returned.

    Raises:
        UserError: On all tasks, if what they have is no whole model.
    """
    sections, found, _ = _agree(apart, tasks, bool)
    whole: dict[str, dict[str, Tensor]] = {section: {} for section in found.trees}
    for file in found.files:
        tensors = whole[file.section]
        come = _sent(file, sections[file.section].tensors, tasks.group)
        for slot, part in zip(file.slots, come, strict=True):
            if not here:
                continue
            if slot.name not in tensors:
                tensors[slot.name] = torch.empty(slot.shape, dtype=slot.dtype)
            tensors[slot.name][slot.box.within(Box.all_of(slot.shape))] = part
    if not here:
        return {}
    for file in found.files:  # what a name stands for may be in the file of another task
        tensors = whole[file.section]
        tensors |= {name: tensors[owner] for name, owner in file.aliases.items()}
    return {section: unpack_state(tree, whole[section]) for section, tree in found.trees.items()}


def _agree(
    apart: Callable[[], Mapping[str, Local]], tasks: Tasks, shares: Callable[[], bool]
) -> tuple[Mapping[str, Local], Plan, list[bool]]:
    """What is here, who writes what, and which tasks ``shares`` is true for."""
    sections: dict[str, Local] = {}

    def tell() -> str:
        sections.update(apart())
        told = {name: local.told() for name, local in sections.items()}
        return json.dumps([shares(), told])

    told = [json.loads(text) for text in tasks.attempt(tell)]
    return sections, plan([each for _, each in told]), [shared for shared, _ in told]


def _write(
    directory: Path, file: FilePlan, tensors: Iterable[Tensor], failures: list[UserError]
) -> None:
    try:
        write_slots(directory / file.name, file.slots, tensors, file.aliases)
    except UserError as error:
        failures.append(error)


def _sent(file: FilePlan, own: Mapping[Slot, Tensor], group: Collective) -> Iterator[Tensor]:
    """The parts of a file as they come from their owner; all tasks take part."""
    for slot in file.slots:
        sizes = slot.box.sizes
        if file.owner == group.rank:
            rows = own[slot].detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        else:
            rows = torch.empty(math.prod(sizes) * slot.dtype.itemsize, dtype=torch.uint8)
        if rows.numel():
            group.broadcast(rows, file.owner)
        yield rows.view(slot.dtype).reshape(sizes)
