"""The workers of a job as the coordinator knows them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from spartito.errors import SpartitoError, TaskLostError, UserError
from spartito.heartbeat import last_words
from spartito.notes import shown
from spartito.ps.scheduler.ledger import Known


@dataclass(slots=True)
class Member:
    """What is known of one worker: it is ``live`` from its coming until it leaves or is lost."""

    name: str
    session: int = 0  # of its present connection; 0: none
    heard: float = 0.0
    live: bool = False
    came: bool = False
    local: bool = False
    bad: int = 0


def members(names: Sequence[str], known: Mapping[int, Known], now: float) -> list[Member]:
    """The workers by index; ``known`` are those of a chief before this one: they may come back."""
    found = [Member(name) for name in names]
    for index, one in known.items():
        found[index] = Member(
            names[index], one.session, now, one.session > 0, one.last > 0, False, one.bad
        )
    return found


def absent(members: Sequence[Member]) -> list[str]:
    """The names of those who never came."""
    return [member.name for member in members if not member.came]


def absence(members: Sequence[Member], all_expected: bool, seconds: float) -> TaskLostError:
    """The error of a wait of so many ``seconds`` without progress: names who is missing."""
    if all_expected:
        return TaskLostError(
            f"{' and '.join(absent(members))} did not come within {seconds:g} s",
            "Start it, or fix the address; SPARTITO_TIMEOUT sets the limit in seconds.",
        )
    missing = [member.name for member in members if not member.live]
    return TaskLostError(
        f"{' and '.join(missing)} is gone or did not come, and nothing was done for {seconds:g} s"
        + "".join(map(last_words, missing))
        if missing
        else f"no worker has finished anything for {seconds:g} s",
        "Look at the last lines of that task; SPARTITO_TIMEOUT sets the limit in seconds.",
    )


def raised(member: Member, what: str) -> TaskLostError:
    """The error of a job one of whose workers raised the exception ``what``."""
    return TaskLostError(
        f"{member.name} failed: {shown(what, 500)}",
        "Look at its last lines. A worker that is killed can be replaced, but one that raises "
        "an exception would do so again.",
    )


def spoiled(last: Member, total: int, limit: int, detail: str) -> SpartitoError:
    """The error of a job whose workers pushed what was not finite more than ``limit`` times."""
    return SpartitoError(
        f"{total} pushes were not finite and dropped, more than {limit}; "
        f"the last by {last.name}: {detail}",
        "Lower the learning rate, clip the gradients, or look at the data.",
    )


def other_order(odd: Member, first: Member) -> UserError:
    """The error of a job whose workers do not read the same data in the same order."""
    return UserError(
        f"{odd.name} has trained on other examples, or in another order, than {first.name}",
        "Give all workers the same data, batch size and seed. A stream must give all of them all "
        "examples, whatever their rank: Spartito divides it.",
    )
