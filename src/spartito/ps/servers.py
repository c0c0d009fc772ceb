"""All parameter servers of a job as one: for those who compute, and for the chief."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from math import isfinite
from typing import Any, TypeVar

import msgspec
import torch
from msgspec.structs import replace
from torch import Tensor

from spartito.errors import SpartitoError
from spartito.ps.client import Link, Restarted
from spartito.ps.keys import Keys
from spartito.ps.layout import unused
from spartito.ps.messages import End, Fence, Load, Lost, Message, Pull, Push, Release, Values
from spartito.ps.shard import State as OptimizerState
from spartito.ps.timetable import Timetable
from spartito.ps.vector import Vector

T = TypeVar("T")


class Servers:
    """All servers of the job as one: what they hold together is the whole vector.

    ``ordered`` holds where the first server decides who may go on: it is asked first for values
    and told last of gradients, so that none gets staler on the others than on it.
    """

    def __init__(self, links: Sequence[Link], vector: Vector, ordered: bool) -> None:
        self.links, self.vector = list(links), vector
        self._ordered = ordered and len(links) > 1
        self._sent: list[Push] = []
        self._norms = [0.0] * len(self.links)  # of what lies in the links' memory
        self._early: list[Values] = []  # what all but the first said to a push that is ordered
        self._versions = [0] * len(self.links)
        self.far = Values(0, 0, 0, 0)
        """How far the first server is."""

    @torch.no_grad()
    def fill(self) -> tuple[list[list[int]], bool]:
        """The model's gradients into the links' memory, and how its buffers changed.

        Returns per server the entries without a gradient or a change, and whether all numbers
        are finite.
        """
        absent, self._norms = [], []
        for link in self.links:
            missing = link.outgoing.store_gradients() + link.outgoing.store_changes(link.incoming)
            self._norms.append(link.outgoing.norm(unused(link.runs, missing)))
            absent.append(missing)
        return absent, all(map(isfinite, self._norms))

    def push(self, push: Push, absent: Sequence[Sequence[int]]) -> None:
        """Send what `fill` stored, and ask for new values; `answers` waits for them.

        Raises `Restarted` when a server has forgotten what it knew; nothing is left to wait for.
        """
        self._sent = [
            replace(push, pulled=version, absent=list(missing), norm=0.0 if push.dropped else norm)
            for version, missing, norm in zip(self._versions, absent, self._norms, strict=True)
        ]
        if self._ordered:
            others = [replace(push, pull=False) for push in self._sent[1:]]
            self._early = self._exchange(self.links[1:], others)
            self.links[0].send(self._sent[0])
        else:
            self._send(self.links, self._sent)

    def answers(self) -> list[Values]:
        """What the servers say to the last `push`, with the new values in the model."""
        if self._ordered:
            first, *rest = self.links[0].receive(self._sent[0]), *self._look(self.links[1:])
            told = [
                replace(now, status=was.status) for now, was in zip(rest, self._early, strict=True)
            ]
            found = [first, *told]
        else:
            found = self._receive(self.links, self._sent)
        self._take(found)
        return found

    def get(self, admit: bool) -> None:
        """The newest values into the model; ``admit`` to compute with, so it may have to wait."""
        first = self.links[0].ask(Pull(admit))
        self._take([first, *self._look(self.links[1:])])

    def release(self) -> None:
        """Say that nothing is computed here for now."""
        self.links[0].ask(Release())

    def close(self) -> None:
        """Leave all."""
        for link in self.links:
            link.close()

    def _look(self, links: Sequence[Link]) -> list[Values]:
        return self._exchange(links, [Pull(admit=False)] * len(links))

    def _exchange(self, links: Sequence[Link], messages: Sequence[Message]) -> list[Values]:
        self._send(links, messages)
        return self._receive(links, messages)

    def _send(self, links: Sequence[Link], messages: Sequence[Message]) -> None:
        """Send to all; if one was restarted hear the others out, so that none has to say more."""
        heard: list[tuple[Link, Message]] = []
        restarted: Restarted | None = None
        for link, message in zip(links, messages, strict=True):
            try:
                link.send(message)
                heard.append((link, message))
            except Restarted as error:
                restarted = error
        if restarted is not None:
            self._hear(heard)
            raise restarted

    def _receive(self, links: Sequence[Link], messages: Sequence[Message]) -> list[Values]:
        found, restarted = self._hear(list(zip(links, messages, strict=True)))
        if restarted is not None:
            raise restarted
        return found

    def _hear(self, asked: Sequence[tuple[Link, Message]]) -> tuple[list[Values], Restarted | None]:
        found: list[Values] = []
        restarted: Restarted | None = None
        for link, message in asked:
            try:
                found.append(link.receive(message))
            except Restarted as error:
                restarted = error
        return found, restarted

    @torch.no_grad()
    def _take(self, found: Sequence[Values]) -> None:
        self._versions = [values.version for values in found]
        self.far = found[0]
        for link in self.links:
            link.fill_model()


class Control:
    """The chief's own links to the servers, for what is not about gradients; thread-safe.

    ``on_restart`` is called with the number of a server that was started again.
    """

    def __init__(self, links: Sequence[Link]) -> None:
        self.links = list(links)
        self._turn = threading.Lock()
        self._lost: deque[Lost] = deque(maxlen=64)
        self._generations: dict[int, int] = {}
        self.timetable = b""
        """The last one that the servers were told, encoded."""
        self.restarted: set[int] = set()

    def tell(self, message: Message) -> list[Any]:
        """Ask every server the same; answers in their order."""
        with self._turn:
            return [self._ask(number, message) for number in range(len(self.links))]

    def lose(self, lost: Lost) -> None:
        """Tell the servers that a worker is gone, and those that are started again later too."""
        with self._turn:
            self._lost.append(lost)
            for number in range(len(self.links)):
                self._ask(number, lost)

    def fence(self, worker: int, generation: int) -> None:
        """Have the servers serve no process in a worker's place that is older than this one."""
        with self._turn:
            self._generations[worker] = max(generation, self._generations.get(worker, 0))
            for number in range(len(self.links)):
                self._ask(number, Fence(self._generations))

    def applied(self, number: int, slices: int) -> Keys:
        """Which pieces a server has applied."""
        with self._turn:
            return self._insist(number, Link.applied, slices)

    def load(self, job: str, values: Sequence[Tensor], states: Sequence[OptimizerState],
             settings: list[dict[str, Any]]) -> None:  # fmt: skip
        """Give every server its values and the state of its optimizer."""
        with self._turn:
            self.timetable = b""
            for number, (own, state) in enumerate(zip(values, states, strict=True)):
                load = Load(job, settings, len(state))
                self._insist(number, Link.load, load, own, state)

    def schedule(self, timetable: Timetable) -> None:
        """Tell every server the optimizer's options, also one that is started again later."""
        with self._turn:
            self.timetable = msgspec.msgpack.encode(timetable)
            for number in range(len(self.links)):
                self._insist(number, Link.schedule, self.timetable)

    def states(self) -> list[tuple[Tensor, OptimizerState, list[dict[str, Any]]]]:
        """Every server's values, the state of its optimizer, and its options."""
        with self._turn:
            return [self._insist(number, Link.state) for number in range(len(self.links))]

    def end(self) -> list[SpartitoError]:
        """Tell every server that the job has ended; answers why some could not be told."""
        failed = []
        with self._turn:
            for number in range(len(self.links)):
                try:
                    self._ask(number, End())
                except SpartitoError as error:
                    failed.append(error)
        return failed

    def close(self) -> None:
        """Leave all."""
        with self._turn:
            for link in self.links:
                link.close()

    def _ask(self, number: int, message: Message) -> Any:
        return self._insist(number, Link.ask, message)

    def _insist(self, number: int, ask: Callable[..., T], *what: Any) -> T:
        """What ``ask`` answers for a server, however often that is started again meanwhile."""
        link, forgetful = self.links[number], False
        while True:
            try:
                if forgetful and self.timetable:
                    link.schedule(self.timetable)
                for told in (*self._lost, Fence(self._generations)) if forgetful else ():
                    link.ask(told)
                return ask(link, *what)
            except Restarted:
                self.restarted.add(number)
                forgetful = True
