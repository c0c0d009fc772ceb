"""How the tasks of a job agree at its store on who is of the next generation."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec

from spartito.cluster.recovery import Recovery
from spartito.cluster.store.client import FencedError, Store, StoreError, StoreGoneError
from spartito.collectives.membership.generations import (
    Card,
    Generation,
    Seen,
    Vote,
    next_generation,
)
from spartito.collectives.membership.lifeline import LIVES, Lifeline
from spartito.errors import TaskLostError

LOOK = 0.03  # seconds between two looks who has come
WATCH = 0.25  # seconds between two looks whether somebody comes
REPLY = 3.0  # seconds in which the store has to reply
GONE = 0.3  # seconds without a lifeline after which a process counts as dead
SOON = 0.5  # seconds in which the store has to reply to who only looks

_CURRENT = "generation"
_generation = msgspec.msgpack.Decoder(Generation)
_vote = msgspec.msgpack.Decoder(Vote)
_card = msgspec.msgpack.Decoder(Card)
_encode = msgspec.msgpack.encode


def keys_of(number: int) -> str:
    """Below which key a generation has all of its own."""
    return f"g/{number}"


@dataclass(frozen=True, slots=True)
class Assembly:
    """A process that takes part in the generations of a job.

    ``names`` are all tasks of the job, by rank; ``own`` is this process. A store that is out of
    reach is waited for, up to ``patience`` seconds.
    """

    store: Store
    own: Card
    names: tuple[str, ...]
    recovery: Recovery
    patience: float = REPLY
    lifeline: Lifeline | None = None
    _missed: dict[str, float] = field(default_factory=dict)

    def lost(self, names: Collection[str], members: Collection[Card]) -> list[str]:
        """Those of ``names``, of a generation's ``members``, that have certainly ended.

        A process that has no connection to the store any more cannot go on either: nobody does
        without it. So it counts as ended, even where it cannot be seen from here.
        """
        asked = [card for card in members if self.names[card.rank] in names]
        with suppress(StoreError):
            dead = self._dead(asked, self.store.within(SOON).keys(LIVES))
            return [self.names[rank] for rank in sorted(dead)]
        return []

    def close(self) -> None:
        """Leave. May be called again."""
        if self.lifeline is not None:
            self.lifeline.close()

    def _dead(self, cards: Collection[Card], lives: Collection[str]) -> frozenset[int]:
        now, dead = time.monotonic(), set()
        for card in cards:
            if card.life.is_over:
                dead.add(card.rank)
            elif f"{LIVES}{card.token}" in lives:
                self._missed.pop(card.token, None)
            elif now - self._missed.setdefault(card.token, now) >= GONE:
                dead.add(card.rank)
        return frozenset(dead)

    def begin(self, cards: tuple[Card, ...]) -> Generation:
        """The generation of the job now; the first one is of ``cards``."""
        first = _encode(Generation(0, cards))
        found = self.store.swap(_CURRENT, None, first)
        return _generation.decode(found or first)

    def current(self) -> Generation | None:
        """The generation of the job now; None before the first."""
        found = self.store.gather([_CURRENT]).get(_CURRENT)
        return None if found is None else _generation.decode(found)

    def comes(self) -> bool:
        """Whether a newcomer that may live waits at the store."""
        comers = self._comers()
        return len(self._dead(comers.values(), self.store.keys(LIVES))) < len(comers)

    def is_left(self, number: int) -> bool:
        """Whether somebody wants the generation after that of this number."""
        return bool(self.store.keys(f"vote/{number + 1}/")) or self.comes()

    def regroup(self, last: Generation | None, lost: bool) -> Generation:
        """The next generation that this process is of, after ``last``; None for a newcomer.

        Raises:
            TaskLostError: There is none.
        """
        start = came = heard = time.monotonic()
        people: tuple[Card, ...] = ()
        while True:
            try:
                now = self.current()
                if now is None:
                    raise TaskLostError("the job's store has no generation", "Start the job again.")
                if now.has(self.own) and (last is None or now.number > last.number):
                    self._enter(now)
                    return now
                seen = self._sign(now, lost)
            except FencedError:  # there is another generation meanwhile
                continue
            except StoreGoneError:
                came = time.monotonic()
                if came - heard > self.patience:
                    raise
                time.sleep(WATCH)
                continue
            heard = time.monotonic()
            if seen.people != people:
                people, came = seen.people, time.monotonic()
            waited = time.monotonic() - came
            made = next_generation(seen, len(self.names), self.recovery, waited)
            if made is not None and made.has(self.own):
                with suppress(StoreGoneError):
                    self.store.swap(_CURRENT, _encode(now), _encode(made))
            elif waited > self._patience(seen, now):
                raise self._too_few(seen, time.monotonic() - start)
            else:
                time.sleep(LOOK)

    def _sign(self, now: Generation, lost: bool) -> Seen:
        """Say that we are here, and look who else is."""
        lives = self.store.keys(LIVES)
        dead = self._dead(now.members, lives)
        key = f"vote/{now.number + 1}/"
        if now.has(self.own):
            vote = Vote(self.own, tuple(sorted(dead)), lost)
            self.store.set(f"{key}{self.own.rank}", _encode(vote))
        else:
            self.store.set(f"comes/{self.own.rank}", _encode(self.own))
        votes = {int(k[len(key) :]): _vote.decode(v) for k, v in self.store.keys(key).items()}
        comers = self._comers()
        ended = self._dead(comers.values(), lives)
        comes = {rank: card for rank, card in comers.items() if rank not in ended}
        return Seen(now, votes, comes, dead)

    def _comers(self) -> dict[int, Card]:
        found = self.store.keys("comes/")
        return {int(key.removeprefix("comes/")): _card.decode(card) for key, card in found.items()}

    def _enter(self, now: Generation) -> None:
        """Leave what is over behind, for everybody."""
        for number in range(max(0, now.number - 2), now.number):
            self.store.retire(keys_of(number))
            self.store.retire(f"vote/{number + 1}")
        self.store.delete(f"comes/{self.own.rank}")

    def _patience(self, seen: Seen, now: Generation) -> float:
        """Seconds to wait for somebody more; a newcomer waits until the members regroup."""
        if now.has(self.own) or seen.all_dead == seen.ranks:
            return self.recovery.patience + 1.0
        return float("inf")

    def _too_few(self, seen: Seen, waited: float) -> TaskLostError:
        here = {card.rank for card in seen.people}
        missing = [name for rank, name in enumerate(self.names) if rank not in here]
        least = self.recovery.min_workers
        enough = "all have to be there" if least is None else f"at least {least} have to be there"
        if least is not None and len(here) >= least:
            enough = (
                f"{len(seen.side)} of {len(seen.ranks)} cannot go on alone, as the others may "
                "live where they are not seen"
            )
        return TaskLostError(
            f"{' and '.join(missing)} did not come back within {waited:.0f} s: {enough}",
            "Look at the last lines of that task. --wait and --min-workers, or "
            "Recovery(min_workers, wait), say how long to wait, and with how many to go on.",
        )


class Watch:
    """Looks every moment, in a thread, whether something is so."""

    def __init__(self) -> None:
        self.seen = False
        self._stopped: threading.Event | None = None

    def start(self, look: Callable[[], bool]) -> None:
        """Look from now on, until it was `seen` once."""
        self.stop()
        stopped = self._stopped = threading.Event()

        def watch() -> None:
            while not stopped.wait(WATCH):
                with suppress(StoreError):
                    if look():
                        self.seen = not stopped.is_set()
                        return

        threading.Thread(target=watch, name="spartito-newcomers", daemon=True).start()

    def stop(self) -> None:
        """Look no more; nothing was seen."""
        if self._stopped is not None:
            self._stopped.set()
        self.seen = False
