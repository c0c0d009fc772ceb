"""The tasks of a job write one checkpoint together, each its own parts."""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spartito.checkpoint.boxes import Box
from spartito.checkpoint.manager import write_trees
from spartito.checkpoint.parts import Slot, write_slots
from spartito.checkpoint.plan import FilePlan, Local, Plan, plan
from spartito.collectives.collective import Collective
from spartito.errors import UserError
from spartito.storage.tensors import unpack_state

Attempt = Callable[[Callable[[], str]], list[str]]
"""`Coordination.attempt`: what a function returns on every task, or one error on all."""


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


def save_together(directory: Path, apart: Callable[[], Mapping[str, Local]], tasks: Tasks) -> None:
    """Write sections into a checkpoint; all tasks call it.

    A task that finds the chief's directory writes its own files there. One that does not sends its
    parts to the chief, one at a time.

    Args:
        directory: What `spartito.storage.atomic.write_directory` gave on the chief.
        apart: Gives what this task has, by section.
        tasks: All of them.

    Raises:
        UserError: On all tasks, if one cannot write, or what they have is no whole model.
    """
    token = secrets.token_hex(8)

    def show() -> str:
        if tasks.is_chief:
            (directory / f".{token}").touch()
        return token

    probe = directory / f".{tasks.attempt(show)[0]}"
    sections, found, shares = _agree(apart, tasks, probe.exists)
    failures: list[UserError] = []
    own = {name: local.tensors for name, local in sections.items()}
    for file in found.files:
        if file.owner == tasks.group.rank and shares[file.owner]:
            tensors = own[file.section]
            _write(directory, file, (tensors[slot] for slot in file.slots), failures)
    for file in found.files:
        if not shares[file.owner]:
            come = _sent(file, own.get(file.section, {}), tasks.group)
            if tasks.is_chief:
                _write(directory, file, come, failures)
            for _ in come:  # what the chief has left out too: all make the same calls
                pass

    def end() -> str:
        if failures:
            raise failures[0]
        if tasks.is_chief:
            write_trees(directory, found.trees)
            probe.unlink()
        return ""

    tasks.attempt(end)


def gather_together(apart: Callable[[], Mapping[str, Local]], tasks: Tasks) -> dict[str, Any]:
    """All sections whole, on every task; all call it.

    Args:
        apart: Gives what this task has, by section.
        tasks: All of them.

    Raises:
        UserError: On all tasks, if what they have is no whole model.
    """
    sections, found, _ = _agree(apart, tasks, bool)
    whole: dict[str, dict[str, Tensor]] = {section: {} for section in found.trees}
    for file in found.files:
        tensors = whole[file.section]
        come = _sent(file, sections[file.section].tensors, tasks.group)
        for slot, part in zip(file.slots, come, strict=True):
            if slot.name not in tensors:
                tensors[slot.name] = torch.empty(slot.shape, dtype=slot.dtype)
            tensors[slot.name][slot.box.within(Box.all_of(slot.shape))] = part
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
