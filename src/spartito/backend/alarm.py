"""What a wait of the backend that cannot end well means: errors that name the ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from spartito.backend.calls import different
from spartito.backend.errors import LostRankError, gone, heard, last_words, late
from spartito.collectives.alarm import LineAlarm
from spartito.collectives.membership.store import Membership


class RankAlarm(LineAlarm):
    """The errors of a group of ranks, which are torch's `RuntimeError` too."""

    def __init__(self, group: Membership) -> None:
        self._names, self._rank = group.names, group.rank

    def different(self, calls: Mapping[int, int], notes: Mapping[int, str]) -> BaseException:
        """As `spartito.collectives.alarm.Alarm`, and so all of these."""
        return different({self._names[r] + notes.get(r, ""): calls[r] for r in calls})

    def gone(self, ranks: Sequence[int]) -> BaseException:
        return gone([self._names[rank] for rank in ranks], self._names[self._rank])

    def late(self, ranks: Sequence[int], limit: float) -> BaseException:
        return late([self._names[rank] for rank in ranks], limit)

    def broken(self, rank: int) -> BaseException:
        name = self._names[rank]
        return LostRankError(f"{name} sent what is no frame", f"End {name}.")

    def left(self) -> BaseException:
        return LostRankError("a call of a group that was destroyed", "Make a new group.")

    def said(self, error: BaseException) -> bytes:
        return last_words(error)

    def heard(self, words: bytes) -> BaseException:
        return heard(words)

    def look(self, ranks: Sequence[int]) -> None:
        pass
