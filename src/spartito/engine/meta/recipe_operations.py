"""Operations that gave memory its values, kept to be done again, each once and in their order."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.utils._pytree import TreeSpec, tree_leaves, tree_unflatten

LARGE = 1 << 18
"""Bytes from which on a tensor has pages of its own while it is made."""
CPU, META = torch.device("cpu"), torch.device("meta")
_OVERWRITES = frozenset(
    f"{name}_"
    for name in (
        *("bernoulli", "cauchy", "copy", "exponential", "fill", "geometric", "log_normal"),
        *("normal", "random", "uniform", "zero"),
    )
)
"""Operations after which it does not matter what was there."""


def memory(nbytes: int) -> UntypedStorage:
    """Memory that goes back to the system with the last tensor in it.

    The allocator keeps what is freed between tensors that stay, and has no gap for the
    next large one: a task that keeps halves took twice their size.

    Args:
        nbytes: How much.
    """
    if nbytes < LARGE:
        return UntypedStorage(nbytes)
    pages = mmap(-1, nbytes, flags=MAP_PRIVATE | MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=torch.uint8).untyped_storage()


@dataclass(frozen=True, slots=True)
class Slot:
    """A tensor without data, as a part of what it shares memory with."""

    key: int
    nbytes: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int | torch.SymInt

    def within(self, storage: UntypedStorage) -> Tensor:
        """The tensor with data.

        Args:
            storage: All that it shares memory with.
        """
        made = torch.empty(0, dtype=self.dtype)
        return made.set_(storage, self.offset, self.size, self.stride)

    @property
    def is_all(self) -> bool:
        """Whether it covers all of its memory."""
        return torch.Size(self.size).numel() * self.dtype.itemsize >= self.nbytes


def slot_of(tensor: Tensor) -> Slot:
    """Where a tensor without data lies.

    Args:
        tensor: One on the meta device.
    """
    storage, size = tensor.untyped_storage(), tuple(tensor.shape)
    return Slot(
        storage._cdata,
        storage.nbytes(),
        tensor.dtype,
        size,
        tensor.stride(),
        tensor.storage_offset(),
    )


@dataclass(frozen=True, eq=False, slots=True)
class Step:
    """One operation: its arguments, with slots for tensors, and what it gives values."""

    number: int
    func: Any
    leaves: tuple[Any, ...]
    form: TreeSpec
    fresh: Mapping[int, int]  # which of its outputs is in which new memory
    dtype: torch.dtype  # torch's default
    generator: torch.Generator
    state: Tensor | None  # of the generator, where it draws

    def begins(self, key: int) -> bool:
        """Whether it does not matter what was in this memory before."""
        if key in self.fresh:
            return True
        first, *rest = self.leaves or (None,)
        return (
            self.func.overloadpacket.__name__ in _OVERWRITES
            and isinstance(first, Slot)
            and first.key == key
            and first.is_all
            and not any(isinstance(leaf, Slot) and leaf.key == key for leaf in rest)
        )

    @property
    def slots(self) -> list[Slot]:
        """Its arguments that are tensors without data."""
        return [leaf for leaf in self.leaves if isinstance(leaf, Slot)]

    @property
    def touches(self) -> set[int]:
        """The memory that it reads or writes."""
        return {slot.key for slot in self.slots} | self.fresh.keys()

    def again(self, given: Mapping[int, UntypedStorage]) -> Any:
        """Compute it with the numbers that it drew; the generator goes on as if it had not."""
        if self.state is None:
            return self.run(given)
        now = self.generator.get_state()
        self.generator.set_state(self.state)
        try:
            return self.run(given)
        finally:
            self.generator.set_state(now)

    def run(self, given: Mapping[int, UntypedStorage]) -> Any:
        """Compute it, with the memory that its arguments lie in."""
        leaves = [
            leaf.within(given[leaf.key]) if isinstance(leaf, Slot) else leaf for leaf in self.leaves
        ]
        args, kwargs = tree_unflatten(leaves, self.form)
        default = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)
        try:
            with torch.no_grad():
                return self.func(*args, **kwargs)
        finally:
            torch.set_default_dtype(default)


class Notes:
    """What gave which memory its values, in order."""

    def __init__(self) -> None:
        self.steps: dict[int, list[Step]] = {}
        self.alive: dict[int, UntypedStorage] = {}  # so that no key comes twice
        self.is_noting = False
        self.seen: list[Tensor] = []  # in this block, by modules or by writes
        self._numbers = count()

    def add(self, func: Any, leaves: Any, form: TreeSpec, outputs: Any, writes: Any) -> None:
        """Note an operation that makes ``outputs``, and writes into the tensors ``writes``."""
        known = {leaf.untyped_storage()._cdata for leaf in leaves if isinstance(leaf, Tensor)}
        fresh = {}
        for number, output in enumerate(outputs):
            if isinstance(output, Tensor) and output.is_meta:
                storage = output.untyped_storage()
                if storage._cdata not in known:
                    fresh[storage._cdata] = number
                    self.seen.append(output)
                    self.alive[storage._cdata] = storage
                    self.steps[storage._cdata] = []
        self.seen += writes
        written = [tensor.untyped_storage() for tensor in writes]
        if not fresh and not written:
            return
        self.alive |= {storage._cdata: storage for storage in written}
        draws = torch.Tag.nondeterministic_seeded in func.tags
        generators = [leaf for leaf in leaves if isinstance(leaf, torch.Generator)]
        generator = next(iter(generators), torch.default_generator)
        step = Step(
            next(self._numbers),
            func,
            tuple(map(_noted, leaves)),
            form,
            fresh,
            torch.get_default_dtype(),
            generator,
            generator.get_state() if draws else None,
        )
        if draws:
            step.run(self._given(step))
        for key in dict.fromkeys([*fresh, *(storage._cdata for storage in written)]):
            self.steps.setdefault(key, []).append(step)

    def value(self, slot: Slot) -> Tensor:
        """What a tensor has now."""
        return slot.within(self._storage(slot.key))

    def _storage(self, key: int, before: float = math.inf) -> UntypedStorage:
        """All of some memory, as it was before a step: each operation it came of, once."""
        needed = self._needed(key, before)
        last = {touched: step.number for step in needed for touched in step.touches}
        held: dict[int, UntypedStorage] = {}
        for step in needed:
            for slot in step.slots:
                if slot.key not in held:  # it is overwritten
                    held[slot.key] = memory(slot.nbytes)
            made = tree_leaves(step.again(held))
            held |= {fresh: made[number].untyped_storage() for fresh, number in step.fresh.items()}
            for touched in step.touches:
                if touched != key and last[touched] == step.number:
                    del held[touched]
        return held[key] if key in held else memory(self.alive[key].nbytes())

    def _needed(self, key: int, before: float) -> list[Step]:
        """The operations that some memory came of, in their order."""
        found: dict[int, Step] = {}
        todo = [(key, before)]
        while todo:
            key, before = todo.pop()
            steps = [step for step in self.steps.get(key, ()) if step.number < before]
            starts = [number for number, step in enumerate(steps) if step.begins(key)]
            for step in steps[starts[-1] if starts else 0 :]:
                if step.number not in found:
                    found[step.number] = step
                    kept = [slot.key for slot in step.slots if not step.begins(slot.key)]
                    todo += [(each, step.number) for each in kept]
        return [found[number] for number in sorted(found)]

    def _given(self, step: Step) -> dict[int, UntypedStorage]:
        """The memory of a step's arguments, as it was then."""
        return {
            slot.key: memory(slot.nbytes)
            if step.begins(slot.key)
            else self._storage(slot.key, step.number)
            for slot in step.slots
        }


def _noted(leaf: Any) -> Any:
    """An argument as it is kept: values that may change are copied."""
    if isinstance(leaf, Tensor):
        return slot_of(leaf) if leaf.is_meta else leaf.detach().clone()
    return CPU if isinstance(leaf, torch.device) and leaf == META else leaf
