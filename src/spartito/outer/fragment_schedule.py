"""After which updates the fragments of a model meet. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from spartito.errors import UserError
from spartito.numeric import is_number, is_whole


@dataclass(frozen=True, slots=True)
class Turns:
    """After which updates fragments meet. Pure.

    Attributes:
        fragments: How many there are.
        every: Updates from a fragment's meeting to its next one.
        delay: For how many updates a fragment's difference is under way.
        mixing: How much of its own values a group keeps at a meeting.
    """

    fragments: int = 1
    every: int = 20
    delay: int = 0
    mixing: float = 0.0

    def begins(self, number: int, updates: int) -> bool:
        """Whether the difference of a fragment is taken after so many updates.

        Args:
            number: The fragment's.
            updates: Since all have met.
        """
        return updates > 0 and (updates - self._first(number)) % self.every == 0

    def next(self, updates: int) -> int:
        """The first update after ``updates`` at which a difference is taken.

        Args:
            updates: Since all have met.
        """
        waits = ((self._first(n) - updates - 1) % self.every for n in range(self.fragments))
        return updates + 1 + min(waits)

    def _first(self, number: int) -> int:
        return self.every * (number + 1) // self.fragments - self.delay


def turns_of(fragments: int, every: int, overlap: bool | int, mixing: float | None) -> Turns:
    """When fragments meet, as a user has said it. Pure.

    Args:
        fragments: How many there are.
        every: Updates from a fragment's meeting to its next one.
        overlap: For how many updates a difference is under way; True: a quarter of ``every``, and
            less than from one fragment's meeting to the next one's.
        mixing: What a group keeps of its own; None: half of it where meetings overlap.

    Raises:
        UserError: Fragments cannot meet so.
    """
    check_fragments(fragments, every)
    delay = overlap
    if overlap is True:
        delay = max(1, min(every // 4, every // fragments - 1))
    if not isinstance(delay, int) or not 0 <= delay <= every:
        raise UserError(
            f"overlap={overlap!r} with every={every}",
            "True, or the updates for which a difference is under way: every at most.",
        )
    if mixing is None:
        mixing = 0.5 if delay else 0.0
    if not is_number(mixing) or not 0 <= mixing <= 1:
        raise UserError(f"mixing={mixing!r}", "What a group keeps of its own values: from 0 to 1.")
    return Turns(fragments, every, int(delay), float(mixing))


def check_fragments(fragments: object, every: int) -> None:
    """Refuse a number of fragments that cannot meet in turn. Pure.

    Args:
        fragments: What was asked for.
        every: Updates from a fragment's meeting to its next one.

    Raises:
        UserError: It is no whole number from 1 to ``every``.
    """
    if not is_whole(fragments) or fragments < 1:
        raise UserError(f"fragments={fragments!r}", "1 or more: parts of the model that meet.")
    if fragments > every:
        raise UserError(
            f"fragments={fragments} with every={every}: two would meet after one update",
            "Take fewer, or a larger every.",
        )
