"""Finds out which tasks of a group are lost: those that live sign in at the store."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from spartito.collectives.membership.store import Membership, error_from_text, error_to_text
from spartito.errors import SpartitoError, TaskLostError, UserError
from spartito.heartbeat import dump_stacks, last_words, stands

GRACE = 3.0  # seconds in which tasks that live sign in after an error
LINGER = 10.0  # seconds that the keeper of the store stays for those who have not read its reason


class LivenessCheck:
    """Names the missing tasks of a group, and hands on the reason of one that left."""

    def __init__(self, group: Membership) -> None:
        self._group: Membership | None = group
        self._silent = False

    def gone(self, names: Collection[str]) -> Sequence[str]:
        """Those of ``names`` that have certainly ended, as far as that can be told."""
        return () if self._group is None else self._group.lost(names)

    @property
    def looks(self) -> bool:
        """Whether `gone` can tell anything."""
        return self._group is not None and self._group.recovers

    def lost(
        self, error: BaseException, suspects: Collection[str] = (), what: str = ""
    ) -> SpartitoError:
        """What ``error`` means, after a few seconds in which tasks that live sign in.

        Of those who do not, the ``suspects`` are named, with ``what`` was seen of them, else
        all: others may just be busy. A reason that somebody left at the store comes first.
        """
        group = self._group
        if group is None:
            return UserError("a call to other tasks after close()", "Make a new strategy.")
        if group.recovers:  # those who live find out who does, at once
            named = " and ".join(sorted(suspects)) or "a task"
            return TaskLostError(f"{named} {what or f'is lost: {error}'}")
        missing, reason = _told(group)
        if reason is not None:
            return reason
        seen = [name for name in missing if name in suspects]
        if not seen:
            what = f"is gone or did not come within {group.timeout:g} s"
        return TaskLostError(
            f"{' and '.join(seen or missing)} {what}{''.join(map(last_words, seen or missing))}"
            if missing
            else f"the network between the tasks failed: {error}",
            "Look at the last lines of that task; SPARTITO_TIMEOUT sets the limit in seconds."
            + dump_stacks(f"{error}"),
        )

    def reason(self, error: TaskLostError, grace: float = GRACE) -> SpartitoError | None:
        """Why the task that ``error`` names has left, if it said so, or does within ``grace``."""
        if self._group is None or self._group.recovers or self._is_silent(error):
            return None
        return _told(self._group, grace)[1]

    def _is_silent(self, error: SpartitoError) -> bool:
        """Whether the store's keeper is lost, so that nothing is to be asked or left there."""
        group = self._group
        if group is None or self._silent or not _all_named(str(error), [group.keeper]):
            return self._silent
        if stands(group.keeper):  # it would be asked for seconds
            self._silent = True
            return True
        try:
            group.ask(lambda: group.store.set(str(group.rank), b""), 0.0)
        except TaskLostError:
            self._silent = True
        return self._silent

    def leave(self, error: SpartitoError, close: Callable[[], None]) -> None:
        """Leave ``error`` to the others, then ``close`` their connections: they look here."""
        group = self._group
        if group is None:
            return
        if group.recovers and isinstance(error, TaskLostError):
            close()
            return
        if self._is_silent(error):
            close()
            return
        alive, informed = group.under("alive"), group.under("informed")

        def write() -> None:
            alive.store.set(str(group.rank), error_to_text(error).encode())
            informed.store.set(str(group.rank), b"")  # the keeper need not wait for us

        # Where the store is gone the others name its keeper.
        with suppress(TaskLostError):
            group.ask(write, GRACE)
        close()
        if group.is_keeper:  # the store goes with us
            replace(informed, lost=partial(_all_named, str(error))).sign_in(LINGER)

    def informed(self) -> None:
        """This task knows why another one has left: the keeper need not stay for it."""
        group = self._group
        if group is None or self._silent:
            return
        with suppress(TaskLostError):  # where the store is gone nobody stays
            group.ask(lambda: group.under("informed").store.set(str(group.rank), b""), GRACE)

    def close(self) -> None:
        """Let go of the store: its keeper's address is free for the next group."""
        self._group = None


def _all_named(text: str, names: Collection[str]) -> Sequence[str]:
    """``names``, if the error ``text`` is about all of them: none will come to read it."""
    found = all(re.search(rf"{re.escape(name)}(?!\d)", text) for name in names)
    return tuple(names) if found else ()


def _told(group: Membership, grace: float = GRACE) -> tuple[list[str], SpartitoError | None]:
    """Who does not sign in, and the reason of a task that left because of another loss."""
    missing, reasons = group.under("alive").sign_in(grace)
    if not reasons:
        return missing, None
    # The store goes with its keeper, who stays for those that are slower to read it.
    group.under("informed").sign_in(GRACE if group.is_keeper else 0.0)
    return missing, error_from_text(reasons[0])
