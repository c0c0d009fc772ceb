"""Finds out which tasks of a group are lost: those that live sign in at the store."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import suppress

from spartito.collectives.store import Membership, error_from_text, error_to_text
from spartito.errors import SpartitoError, TaskLostError, UserError
from spartito.heartbeat import dump_stacks, last_words

GRACE = 3.0  # seconds in which tasks that live sign in after an error
LINGER = 10.0  # seconds that the keeper of the store stays for those who have not read its reason


class LivenessCheck:
    """Names the missing tasks of a group, and hands on the reason of one that left."""

    def __init__(self, group: Membership) -> None:
        self._group: Membership | None = group

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
        missing, reasons = group.under("alive").sign_in(GRACE)
        if reasons:  # somebody left because of another loss
            # The store goes with its keeper, who stays for those that are slower to read it.
            group.under("informed").sign_in(GRACE if group.is_keeper else 0.0)
            return error_from_text(reasons[0])
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

    def leave(self, error: SpartitoError, close: Callable[[], None]) -> None:
        """Leave ``error`` to the others, then ``close`` their connections: they look here."""
        group = self._group
        if group is None:
            return
        if group.recovers and isinstance(error, TaskLostError):
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
            informed.sign_in(LINGER)

    def close(self) -> None:
        """Let go of the store: its keeper's address is free for the next group."""
        self._group = None
