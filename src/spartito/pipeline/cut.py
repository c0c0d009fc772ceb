"""A model's operations and where its stages begin."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from spartito.errors import UserError
from spartito.pipeline.program import Program, Value


@dataclass(frozen=True, slots=True)
class Cut:
    """A program and where its stages begin.

    Args:
        program: The operations.
        starts: The first operation of each stage but the first.
        formats: Dtype and whether channels are last of what enters each stage, once it is known.
    """

    program: Program
    starts: tuple[int, ...]
    formats: dict[int, list[tuple[torch.dtype, bool]]] = field(default_factory=dict)
    _enters: dict[int, list[Value]] = field(default_factory=dict)
    _swaps: dict[int, frozenset[int]] = field(default_factory=dict)

    @property
    def stages(self) -> int:
        """The number of stages."""
        return len(self.starts) + 1

    def part(self, stage: int) -> tuple[int, int]:
        """The first operation of a stage, and that of the next one."""
        edges = (0, *self.starts, len(self.program.functions))
        return edges[stage], edges[stage + 1]

    def enters(self, stage: int) -> list[Value]:
        """What a stage gets from the one before."""
        if stage not in self._enters:
            self._enters[stage] = self.program.crossing(self.part(stage)[0]) if stage else []
        return self._enters[stage]

    def swaps(self, stage: int) -> frozenset[int]:
        """The operations of a stage that take values of earlier stages."""
        if stage not in self._swaps:
            (begin, end), program = self.part(stage), self.program
            values, takes = program.values, program.takes
            self._swaps[stage] = frozenset(
                index
                for index in range(begin, end)
                if any(values[key].born < begin for key in takes[index])
            )
        return self._swaps[stage]

    def check_buffers(self) -> None:
        """Raise `UserError` where several stages use a buffer that the pass changes."""
        program = self.program
        for name, stages in self.owners(program.buffers).items():
            if name in program.changed and len(stages) > 1:
                raise UserError(
                    f"the forward pass changes the buffer {name!r}, which the stages "
                    f"{' and '.join(map(str, stages))} use: each would have its own",
                    "Begin stages elsewhere by split=[...], so that one has all that uses it.",
                )

    def owners(self, uses: Mapping[str, Sequence[int]]) -> dict[str, list[int]]:
        """The stages that use each parameter or buffer, by its name."""
        return {
            name: sorted({bisect_right(self.starts, index) for index in indices})
            for name, indices in uses.items()
        }
