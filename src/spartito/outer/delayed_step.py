"""How far a group has moved, on its way from leader to leader while its training goes on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from spartito.collectives.calls import encode
from spartito.collectives.collective import Collective
from spartito.engine.devices.host_reads import Number
from spartito.outer.delta_exchange import Exchange


class Line(Protocol):
    """Where leaders exchange what their groups have moved: `spartito.collectives.lane.Lane`, `Now`.

    Attributes:
        group: The leaders.
    """

    group: Collective

    def begin(self, work: Callable[[], None]) -> int:
        """Have ``work`` done, after all before; all leaders call it in the same order.

        Args:
            work: Exchanges something over ``group``.

        Returns:
            Its number.
        """
        ...

    def wait(self, number: int) -> None:
        """Return when the work of this number is done.

        Args:
            number: What `begin` returned.
        """
        ...

    def count_for(self, group: Collective) -> None:
        """Count what was sent, received and waited for as the traffic of another group.

        Args:
            group: That one.
        """
        ...

    def close(self) -> None:
        """End what is under way. May be called again."""
        ...


class Now:
    """A line on which all is done when somebody waits for it.

    Args:
        group: The leaders.
    """

    def __init__(self, group: Collective) -> None:
        self.group = group
        self._work: list[Callable[[], None]] = []
        self._done = 0

    def begin(self, work: Callable[[], None]) -> int:
        """Keep it."""
        self._work.append(work)
        return self._done + len(self._work)

    def wait(self, number: int) -> None:
        """Do it, and all before."""
        while self._done < number:
            self._done += 1
            self._work.pop(0)()

    def count_for(self, group: Collective) -> None:
        """It is the same group."""

    def close(self) -> None:
        """Nothing is under way."""


@dataclass(slots=True)
class Flight:
    """The difference of one fragment, from when it is taken until its mean is used.

    Attributes:
        weight: What the losses that it is made of were divided by.
        numbers: 0, the group's part, whether an end was asked for, and that part of the square
            of the distance; their sums over all groups, but the first, once it has landed.
        due: After which update it is used.
        moved: On a leader, flat: the group's values until it departs, then how far they are from
            the start, then what `depart` was told to make of the sum.
        landed: Whether the exchange is over, here, and the outer optimizer has used its sum.
    """

    weight: Number
    numbers: Tensor
    due: int
    moved: Tensor = field(default_factory=lambda: torch.empty(0))
    landed: bool = False
    _nbytes: int = 0
    _number: int = 0

    def depart(
        self,
        exchange: Exchange,
        line: Line,
        before: Sequence[Callable[[], object]],
        after: Callable[[], object],
    ) -> None:
        """Begin the exchange, on a leader: all that computes for it is done where ``line`` is.

        Args:
            exchange: How leaders add up what their groups have moved.
            line: Where they do.
            before: Make what is exchanged.
            after: Uses the sum.
        """
        group, numel = line.group, self.moved.numel()

        def add() -> None:
            for make in before:
                make()
            with group.current_call.call(encode("reduce", numel, self.moved.dtype)):
                self._nbytes = exchange.add(self.moved, self.numbers[1:], group)
            after()

        self._number = line.begin(add)

    def land(self, line: Line, group: Collective) -> int:
        """Wait until the exchange is over, on a leader.

        Args:
            line: Where it was begun.
            group: Whose traffic it is.

        Returns:
            The bytes of ``moved`` that this leader sent; 0 when it is called again.
        """
        if self.landed:
            return 0
        line.wait(self._number)
        line.count_for(group)
        self.landed = True
        return self._nbytes
