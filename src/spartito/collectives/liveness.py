"""Who of a group is lost: the living sign in at the job's store, with what they know."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import suppress

import torch.distributed as dist

from spartito.collectives.store import ask, retold, sign_in, told
from spartito.errors import SpartitoError, TaskLostError, UserError

GRACE = 3.0  # seconds in which the living answer after an error
LINGER = 10.0  # seconds that the keeper of the store stays for those who have not heard its reason


class LivenessCheck:
    """The group's list at ``store``, which its first task keeps; ``names`` are in rank order."""

    def __init__(self, store: dist.Store, rank: int, names: Sequence[str], timeout: float) -> None:
        self._stores: tuple[dist.Store, dist.Store] | None = (
            dist.PrefixStore("alive", store),
            dist.PrefixStore("heard", store),
        )
        self._rank = rank
        self._names = names
        self._timeout = timeout

    def lost(
        self, error: BaseException, suspects: Collection[str] = (), what: str = ""
    ) -> SpartitoError:
        """What ``error`` means, once the living had a few seconds to sign in.

        Of those who do not, the ``suspects`` are named, with ``what`` was seen of them, else
        all: others may just be busy. A reason that somebody left at the store comes first.
        """
        if self._stores is None:
            return UserError("a call to other tasks after close()", "Make a new strategy.")
        alive, heard = self._stores
        absent, reasons = sign_in(alive, self._rank, self._names, GRACE)
        if reasons:  # somebody left because of another loss
            # The store goes with its keeper, who stays for those that are slower to hear.
            sign_in(heard, self._rank, self._names, 0.0 if self._rank else GRACE)
            return retold(reasons[0])
        seen = [name for name in absent if name in suspects]
        if not seen:
            what = f"is gone or did not come within {self._timeout:g} s"
        return TaskLostError(
            f"{' and '.join(seen or absent)} {what}"
            if absent
            else f"the network between the tasks failed: {error}",
            "Look at the last lines of that task; SPARTITO_TIMEOUT sets the limit in seconds.",
        )

    def leave(self, error: SpartitoError, close: Callable[[], None]) -> None:
        """Leave ``error`` to the others, then ``close`` what they wait at: they look here."""
        if self._stores is None:
            return
        word, (alive, heard) = told(error), self._stores

        def tell() -> None:
            alive.set(str(self._rank), word)
            heard.set(str(self._rank), "")  # the keeper need not wait for us

        # A store that is gone cannot be told; the others then name its keeper.
        with suppress(TaskLostError):
            ask(tell, GRACE, self._names[0])
        close()
        if self._rank == 0:  # the store goes with us
            sign_in(heard, self._rank, self._names, LINGER)

    def close(self) -> None:
        """Let go of the store: its keeper's address is free for the next group."""
        self._stores = None
