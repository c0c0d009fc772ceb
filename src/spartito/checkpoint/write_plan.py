"""Who writes which parts into which file, found from what all tasks tell of theirs. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from spartito.checkpoint.cuts import Box, Cut, Part, gap
from spartito.checkpoint.stored_parts import Slot, arrange, file_name
from spartito.errors import UserError
from spartito.storage.stream import CODES, DTYPES
from spartito.storage.tensors import Json, check_tensor, is_mark, pack_state, same_tensors


@dataclass(frozen=True)
class Local:
    """What one task has of a section: the tree of its values, and its tensors by slot."""

    tree: Json
    tensors: Mapping[Slot, Tensor]
    aliases: Mapping[str, str]

    @classmethod
    def of(cls, section: str, state: Any, cuts: Mapping[int, Cut]) -> Local:
        """Take a section apart.

        Args:
            section: Its name.
            state: A nested tree of plain values, tensors and `Part`s of tensors.
            cuts: By the ids of tensors in it, how those are cut that are not whole.

        Raises:
            UserError: If something in it cannot be saved.
        """
        found = dict(cuts)
        tree, tensors = pack_state(_bare(state, found), section)
        for name, tensor in tensors.items():
            check_tensor(name, tensor)
        aliases = same_tensors(tensors)
        slots: dict[Slot, Tensor] = {}
        for name, tensor in tensors.items():
            if name in aliases:
                continue
            shape, parts = _parts(tensor, found.get(id(tensor)))
            slots |= {Slot(name, shape, tensor.dtype, box): part for box, part in parts}
        return cls(tree, slots, aliases)

    def told(self) -> Json:
        """What the others have to know of it, as JSON."""
        return {
            "tree": self.tree,
            "aliases": dict(self.aliases),
            "slots": [[s.name, s.shape, CODES[s.dtype], *s.box] for s in self.tensors],
        }


def _bare(state: Any, cuts: dict[int, Cut]) -> Any:
    """A nested state with tensors in place of `Part`s, whose cuts are noted."""
    if isinstance(state, Part):
        cuts[id(state.tensor)] = state.cut
        return state.tensor
    if isinstance(state, dict):
        return {key: _bare(value, cuts) for key, value in state.items()}
    return [_bare(value, cuts) for value in state] if isinstance(state, list) else state


def _parts(tensor: Tensor, cut: Cut | None) -> tuple[tuple[int, ...], list[tuple[Box, Tensor]]]:
    """The shape of the whole, and what a task has of it."""
    if cut is None:
        shape = tuple(tensor.shape)
        return shape, [(Box.all_of(shape), tensor)]
    if not math.prod(cut.shape):  # nobody has an element of it
        return cut.shape, [(Box.all_of(cut.shape), tensor.new_empty(cut.shape))]
    return cut.shape, [(box, part) for box, part in cut.parts(tensor) if box.numel]


@dataclass(frozen=True)
class FilePlan:
    """A file of a checkpoint: who has its parts, and what they are, in their order."""

    name: str
    section: str
    owner: int
    slots: Sequence[Slot]
    aliases: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Plan:
    """The files of a checkpoint, and the trees of its sections."""

    files: Sequence[FilePlan]
    trees: Mapping[str, Json]


def plan(told: Sequence[Mapping[str, Json]]) -> Plan:
    """Give each part to the first task that has it.

    Args:
        told: What each task told of its sections, by rank: `Local.told` by name.

    Raises:
        UserError: If tasks have different tensors of one name, or not all of one.
    """
    files: list[FilePlan] = []
    trees: dict[str, Json] = {}
    for section in dict.fromkeys(name for each in told for name in each):
        of_all = [each.get(section) for each in told]
        trees[section] = merged([each["tree"] for each in of_all if each is not None])
        files += _files(section, of_all)
    return Plan(files, trees)


def _files(section: str, told: Sequence[Json]) -> list[FilePlan]:
    owners: dict[Slot, int] = {}
    aliases: dict[str, str] = {}
    for rank, each in enumerate(told):
        if each is None:
            continue
        aliases |= {name: owner for name, owner in each["aliases"].items() if name not in aliases}
        for name, shape, code, offsets, sizes in each["slots"]:
            box = Box(tuple(offsets), tuple(sizes))
            owners.setdefault(Slot(name, tuple(shape), DTYPES[code], box), rank)
    _check(section, owners)
    stored = {slot.name for slot in owners}
    aliases = {name: owner for name, owner in aliases.items() if name not in stored}
    writers = sorted(set(owners.values()))
    files = []
    for number, owner in enumerate(writers):
        slots, _, _ = arrange([slot for slot, rank in owners.items() if rank == owner])
        name = file_name(section, number + 1, len(writers))
        files.append(FilePlan(name, section, owner, slots, {} if number else aliases))
    return files


def _check(section: str, owners: Mapping[Slot, int]) -> None:
    """Refuse what is no whole tensor, or not one tensor."""
    by_name: dict[str, list[Slot]] = {}
    for slot in owners:
        by_name.setdefault(slot.name, []).append(slot)
    for name, slots in by_name.items():
        first = slots[0]
        for other in slots:
            if (other.shape, other.dtype) != (first.shape, first.dtype):
                raise UserError(
                    f"{name} of {section} is {first.shape} of {first.dtype} on one task and "
                    f"{other.shape} of {other.dtype} on another",
                    "All tasks must have the same model.",
                )
        if wrong := gap(first.shape, [slot.box for slot in slots]):
            raise UserError(
                f"{name} of {section}, {first.shape}, is not whole over all tasks: {wrong}",
                "This is an error of the strategy's cuts: report it.",
            )


def merged(trees: Sequence[Json]) -> Json:
    """One tree of those of several tasks.

    Dicts are united, lists of equal length too, and lists of names in their order; where values
    differ, those of the first task count.
    """
    first, *others = trees
    for other in others:
        first = _merge(first, other)
    return first


def _merge(one: Json, other: Json) -> Json:
    if one == other:
        return one
    if isinstance(one, dict) and isinstance(other, dict) and not is_mark(one):
        both = {key: _merge(one[key], other[key]) for key in one.keys() & other.keys()}
        return {key: both.get(key, one.get(key, other.get(key))) for key in [*one, *other]}
    if isinstance(one, list) and isinstance(other, list):
        if all(isinstance(each, str) for each in [*one, *other]):
            return list(dict.fromkeys([*one, *other]))
        if len(one) == len(other):
            return [_merge(a, b) for a, b in zip(one, other, strict=True)]
    return one
