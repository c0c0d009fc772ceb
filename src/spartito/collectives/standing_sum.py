"""Sums that are repeated, and of which a task sends what its machine has summed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from spartito.collectives.calls import encode
from spartito.collectives.collective import Collective
from spartito.collectives.hierarchical import HierarchicalCollective

Work = Callable[[], None]
Summing = Callable[[Collective, Tensor], Work]
"""Makes what sums a flat tensor over a group, in place, as often as it is called."""


def exact(group: Collective, flat: Tensor) -> Work:
    """The sum as it is."""
    return group.summing(flat)


class StandingSum(Protocol):
    """A sum of one flat tensor that is repeated: fill ``input``, `run`, read ``output``."""

    input: Tensor
    output: Tensor

    def run(self) -> None:
        """Sum over the group; ``output`` is this task's own memory."""
        ...


class _FlatSum:
    """The sum over tasks of which each sends its own."""

    def __init__(
        self, group: Collective, numel: int, dtype: torch.dtype, summing: Summing,
        device: torch.device | None,
    ) -> None:  # fmt: skip
        self.input = self.output = torch.zeros(numel, dtype=dtype, device=device)
        self.run = summing(group, self.output)


class _LayeredSum:
    """The sum inside a machine, which its leader then adds up with those of the others."""

    def __init__(
        self, group: HierarchicalCollective, numel: int, dtype: torch.dtype, summing: Summing
    ) -> None:
        self._group = group
        self._inside = group.within(lambda: group.inside.reducer(numel, dtype, torch.device("cpu")))
        self.input = self._inside.input
        self.output = torch.empty(numel, dtype=dtype)
        self._between = summing(group.between, self._inside.output) if group.is_leader else _nothing

    def run(self) -> None:
        self._group.within(lambda: self._inside.reduce((0.0,), 1.0))
        self._group.across(self._between)
        self.output.copy_(self._inside.output)


def _nothing() -> None:
    """The leader does it."""


def standing_sum(
    group: Collective,
    numel: int,
    dtype: torch.dtype,
    summing: Summing = exact,
    device: torch.device | None = None,
) -> StandingSum:
    """Make a sum over tasks on several machines, inside of which it is exact.

    Args:
        group: The tasks, which all call this together, with nothing under way.
        numel: Elements of the flat tensor.
        dtype: Of the tensor.
        summing: How it is summed by those who send what their machine has summed.
        device: Where it is; None: in the host's memory.

    Returns:
        The sum with its memory.
    """
    with group.current_call.call(encode("new reducer", numel, dtype)):
        if isinstance(group, HierarchicalCollective):
            made: StandingSum = _LayeredSum(group, numel, dtype, summing)
        else:
            made = _FlatSum(group, numel, dtype, summing, device)
    tag, run = group.tag_of_sum(numel, dtype), made.run

    def announced() -> None:
        with group.current_call.call(tag):
            run()

    made.run = announced  # type: ignore[method-assign]
    return made
