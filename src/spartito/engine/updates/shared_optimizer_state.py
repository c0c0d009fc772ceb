"""An optimizer's state in memory that all replicas of a machine share: each writes its slice.

It has torch's own format, and each replica reads all of it. What a user writes into it stays on
his replica, is noticed, and makes the state private again.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from spartito.collectives.memory.segment import Segment
from spartito.collectives.memory.shared_memory import SharedMemoryCollective
from spartito.collectives.memory.slices import LINE, Section
from spartito.engine.devices.memory_layout import is_like, sample
from spartito.engine.updates.fused_update import Kernel
from spartito.errors import UserError
from spartito.system.shared import forget_pages

Layout = tuple[tuple[int, ...], tuple[int, ...]]
"""Shape and strides."""


@dataclass(frozen=True)
class Cut:
    """Parameters, their layouts, and the sections that they are cut into, of ``size`` bytes."""

    parameters: Sequence[nn.Parameter]
    layouts: Sequence[Layout]
    sections: Sequence[Section]
    size: int
    rank: int

    @property
    def own(self) -> list[Section]:
        """The sections of this replica."""
        return [section for section in self.sections if section.owner == self.rank]

    @property
    def foreign(self) -> list[Section]:
        """The sections of the others."""
        return [section for section in self.sections if section.owner != self.rank]

    @property
    def wholes(self) -> list[Section]:
        """All of each parameter."""
        offsets = {section.tensor: section.offset for section in reversed(self.sections)}
        return [
            Section(number, 0, parameter.numel(), 0, offsets[number], True)
            for number, parameter in enumerate(self.parameters)
        ]

    def views(
        self, sections: Iterable[Section], memory: Callable[[Section, torch.dtype], Tensor]
    ) -> list[Tensor]:
        """Flat memory of sections as an update sees it: as the parameter, unless that is cut."""
        found = [(s, memory(s, self.parameters[s.tensor].dtype)) for s in sections]
        return [flat.as_strided(*self.layouts[s.tensor]) if s.whole else flat for s, flat in found]

    def part(self, section: Section, tensor: Tensor | None) -> Tensor:
        """A section of a tensor that has the shape of its parameter."""
        assert tensor is not None
        if section.whole:
            return tensor
        shape, stride = self.layouts[section.tensor]
        if tensor.stride() != stride:
            tensor = torch.empty_strided(shape, stride, dtype=tensor.dtype).copy_(tensor)
        first = tensor.storage_offset() + section.start
        return tensor.as_strided((section.stop - section.start,), (1,), first)


class SharedState:
    """The state of one optimizer for parameters that are cut so; ``memory`` by key, as users see.

    ``own`` has the sections of this replica, where they are written.
    """

    def __init__(self, optimizer: Optimizer, shared: SharedMemoryCollective, cut: Cut) -> None:
        self._optimizer, self._shared, self._cut = optimizer, shared, cut
        self.memory: dict[str, list[Tensor]] = {}
        self.own: dict[str, list[Tensor]] = {}
        self._segments: dict[str, Segment] = {}
        self._samples: list[tuple[memoryview, memoryview]] = []
        self._ours: dict[int, Tensor] = {}  # what users see, by id
        self._accepted: tuple[Sequence[Any], ...] = ((), (), ())
        self.steps: list[Tensor] = []
        """How often each parameter was updated, where all were and the kernel counts it."""

    def is_shown(self, kernel: Kernel, numbers: Mapping[int, int], step: int) -> bool:
        """Whether all state that ``kernel`` wants is here, and nobody has written into it.

        Args:
            kernel: The update of the optimizer.
            numbers: Of the parameters that learn, by id.
            step: Counts the calls: a write through ``.data`` leaves no trace, so a sample is
                looked at, another one in each step.

        Returns:
            Whether an update can be divided.
        """
        if not self._is_accepted(kernel) and not self._accept(kernel, numbers):
            return False
        if any(map(VERSION, self._ours.values())):
            return False
        if not self._samples:
            return True
        ours, shown = self._samples[step % len(self._samples)]
        return ours == shown

    def make_private(self) -> None:
        """Replace the state in shared memory by copies, before anything else changes it."""
        for values in self._optimizer.state.values() if self._ours else ():
            for key, value in values.items():
                if id(value) in self._ours:
                    values[key] = value.clone()
        self._ours.clear()

    def share(self, kernel: Kernel | None, numbers: Mapping[int, int]) -> bool:
        """Move the state that each replica has into memory that all share; all call this.

        Args:
            kernel: The update of the optimizer; None where this replica cannot divide it.
            numbers: Of the parameters that learn, by id.

        Returns:
            Whether there was space, the same for all.
        """
        found: dict[str, dict[int, Tensor]] = {}
        fits = kernel is not None
        for group in self._optimizer.param_groups if kernel is not None else ():
            for parameter in group["params"]:
                values = self._optimizer.state.get(parameter)
                number = numbers.get(id(parameter))
                if not values or number is None or kernel is None:
                    continue
                for key in kernel.keys(group):
                    fits = fits and is_like(values.get(key), parameter)
                    found.setdefault(key, {})[number] = values.get(key)
        if self._shared.all_reduce(torch.tensor([float(not fits)])).item():
            return True
        try:
            for key in found:
                if key not in self.memory:
                    self._allocate(key)
                self._show(key)
        except UserError:  # no space, which all of them hear
            return False
        for key, tensors in found.items():
            for number, value in tensors.items():
                if value is not self.memory[key][number]:
                    self._take(key, number, value)
        self._samples = [
            (sample(ours), sample(self._cut.part(section, self.memory[key][section.tensor])))
            for key in found
            for ours, section in zip(self.own[key], self._cut.own, strict=True)
        ]
        self._shared.barrier()
        return True

    def _is_accepted(self, kernel: Kernel) -> bool:
        """Whether the optimizer still has the state that `_accept` saw: nothing but identities."""
        values, names, tensors = self._accepted
        now = list(self._optimizer.state.values())
        if len(now) != len(values) or not now or not all(map(is_, now, values)):
            return False
        found = [kernel.keys(group) for group in self._optimizer.param_groups]
        return found == names and all(
            map(is_, chain.from_iterable([value.values() for value in now]), tensors)
        )

    def _accept(self, kernel: Kernel, numbers: Mapping[int, int]) -> bool:
        self._accepted, self.steps = ((), (), ()), []
        state = self._optimizer.state
        for group in self._optimizer.param_groups:
            keys = kernel.keys(group)
            for parameter in group["params"]:
                number, values = numbers.get(id(parameter)), state.get(parameter)
                if number is None:  # frozen
                    continue
                if not values:
                    if (keys or kernel.counts) and parameter.grad is not None:
                        return False
                    continue
                for key in keys:
                    memory = self.memory.get(key)
                    if memory is None or values.get(key) is not memory[number]:
                        return False
        if all(state.get(parameter) for parameter in self._cut.parameters):
            values = list(state.values())
            names = [kernel.keys(group) for group in self._optimizer.param_groups]
            tensors = list(chain.from_iterable(value.values() for value in values))
            self._accepted = values, names, tensors
            if kernel.counts:
                self.steps = [state[parameter]["step"] for parameter in self._cut.parameters]
        return True

    def _take(self, key: str, number: int, value: Tensor) -> None:
        """Give the optimizer the shared tensor of one parameter in place of ``value``."""
        for own, section in zip(self.own[key], self._cut.own, strict=True):
            if section.tensor == number:
                own.copy_(self._cut.part(section, value))
        shared = self.memory[key][number]
        self._ours[id(shared)] = shared
        self._optimizer.state[self._cut.parameters[number]][key] = shared

    def _allocate(self, key: str) -> None:
        """Shared memory for the state ``key`` of all parameters."""
        segment = self._shared.segment(max(self._cut.size, LINE), has_view=True)
        self._segments[key] = segment
        self.own[key] = self._cut.views(self._cut.own, _in(segment, segment.map))

    def _show(self, key: str) -> None:
        """Make the tensors that a user sees, without what was written into former ones."""
        segment = self._segments[key]
        forget_pages(segment.view)
        self.memory[key] = self._cut.views(self._cut.wholes, _in(segment, segment.view))


def _in(segment: Segment, map_: mmap.mmap) -> Callable[[Section, torch.dtype], Tensor]:
    """The sections in one of the two mappings of a segment."""
    return lambda section, dtype: segment.tensor(
        section.offset, section.stop - section.start, dtype, map_
    )


VERSION = attrgetter("_version")
