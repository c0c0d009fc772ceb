"""All parameter servers of a job as one: for those who compute, and for the chief."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from typing import TypeVar

import torch
from msgspec.structs import replace

from spartito.ps.client.link import Link, Restarted
from spartito.ps.client.vector import Vector
from spartito.ps.protocol.layout import unused
from spartito.ps.protocol.messages import (
    Message,
    Pull,
    Push,
    Release,
    Values,
)

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
