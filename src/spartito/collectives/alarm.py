"""What a wait for other tasks that cannot end well means: errors that name them."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Protocol

from spartito.collectives.calls import mismatch
from spartito.collectives.collective import Collective, left
from spartito.collectives.membership.store import error_from_text, error_to_text
from spartito.collectives.sockets.links import MOST_TEXT
from spartito.errors import SpartitoError


class Alarm(Protocol):
    """The errors of a group, whichever way its tasks are connected."""

    def different(self, calls: Mapping[int, int], notes: Mapping[int, str]) -> BaseException:
        """Ranks are at other calls: their tags, and what else tells them apart."""

    def gone(self, ranks: Sequence[int]) -> BaseException:
        """Ranks have left, or their processes ended, without a word."""

    def late(self, ranks: Sequence[int], limit: float) -> BaseException:
        """Nothing has come of these within so many seconds."""

    def left(self) -> BaseException:
        """This task has left the group."""

    def said(self, error: BaseException) -> bytes:
        """The last words of this task, because of an error."""

    def heard(self, words: bytes) -> BaseException:
        """The error that another task has ``said``."""


class LineAlarm(Alarm, Protocol):
    """Those of tasks with connections."""

    def broken(self, rank: int) -> BaseException:
        """A rank has sent what is no frame."""

    def look(self, ranks: Sequence[int]) -> None:
        """Raise if one of these is certainly gone; asked again and again while they are late."""


class TaskAlarm(Alarm):
    """What is the same for all groups of tasks that a strategy has.

    Args:
        group: The tasks.
    """

    def __init__(self, group: Collective) -> None:
        self._tasks = weakref.proxy(group)

    def different(self, calls: Mapping[int, int], notes: Mapping[int, str]) -> BaseException:
        """As `Alarm`, and so all of these."""
        names = self._tasks.names
        return mismatch({names[rank] + notes.get(rank, ""): calls[rank] for rank in calls})

    def left(self) -> BaseException:
        return left()

    def said(self, error: BaseException) -> bytes:
        found = error if isinstance(error, SpartitoError) else SpartitoError(str(error))
        return error_to_text(found).encode()[:MOST_TEXT]

    def heard(self, words: bytes) -> BaseException:
        return error_from_text(words.decode(errors="replace"))
