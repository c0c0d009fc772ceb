"""What goes on inside of a group of several workers over parameter servers.

Towards the coordinator and the servers a group is one worker: its first member asks them, and tells
the others what came of it. So all members do the same, each with its rows of what is leased.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import wait
from contextlib import contextmanager, suppress
from dataclasses import replace
from math import inf

import torch

from spartito.cluster.spec import ClusterSpec, Task
from spartito.collectives.collective import Collective, IdentityCollective
from spartito.collectives.membership.liveness import LivenessCheck
from spartito.collectives.membership.rendezvous import Rendezvous
from spartito.collectives.membership.store import error_from_text, error_to_text
from spartito.collectives.memory.shared_memory import SharedMemoryCollective
from spartito.errors import SpartitoError, TaskLostError, UserError
from spartito.heartbeat import resume, waits
from spartito.steps.groups import Groups
from spartito.threads import in_thread
from spartito.wire.addresses import machine_of, split_address

NAME = "group"
"""Of its collective, in errors."""
BEAT = 1.0
"""Seconds after which a member that waits for the first one hears that it is at work."""
AGAIN, RESULT, ERROR = range(3)
"""What the first member says before anything else."""


class Inside:
    """The members of one's own group, of which the first speaks for all.

    Args:
        group: Joins them.
        leave: Ends that.
        silent: Seconds after which a member of the same machine that stands still is given up.
        liveness: Where a member leaves word of why it does no more; None: nowhere.
        others: What else some of the members exchange something by.
    """

    def __init__(
        self,
        group: Collective,
        leave: Callable[[], None],
        silent: float = inf,
        liveness: LivenessCheck | None = None,
        others: Sequence[Collective] = (),
    ) -> None:
        self.group, self._leave, self._liveness = group, leave, liveness
        self.gave_up = False
        """Whether this one does no more of what the others wait for, though its process lives."""
        self._left = threading.Event()
        every = {id(each): each for each in (group, *others)}.values()
        self._here = [each for each in every if isinstance(each, SharedMemoryCollective)]
        if self._here:
            # Who is at work shows it, however long that takes: who does not stands still.
            for each in self._here:
                each.timeout = min(each.timeout, silent)
            threading.Thread(target=self._beat, name="spartito-group", daemon=True).start()

    @classmethod
    def alone(cls) -> Inside:
        """A group of one member, or a task that is in none."""
        return cls(IdentityCollective(), lambda: None)

    @classmethod
    def connect(cls, groups: Groups, rendezvous: Rendezvous, silent: float) -> Inside:
        """Meet the other members of one's own group, who all call this.

        Args:
            groups: Those of the members, inside of it.
            rendezvous: Where they meet.
            silent: As for `Inside`.

        Raises:
            TaskLostError: If a member does not come in time.
        """
        group = groups.world
        ends = rendezvous.members(f"{NAME} ends", range(group.world_size))[0]
        return cls(group, groups.close, silent, LivenessCheck(ends), list(groups.values()))

    @property
    def several(self) -> bool:
        """Whether there is anybody to tell."""
        return self.group.world_size > 1

    @property
    def is_first(self) -> bool:
        """Whether this member speaks for the group."""
        return self.group.rank == 0

    def tell(self, work: Callable[[], bytes]) -> bytes:
        """What ``work`` returns to the first member, on all, who all call this.

        However long it takes, nobody is given up meanwhile. What it raises is raised on all.

        Args:
            work: Is done on the first member alone, in another thread.
        """
        if not self.several:
            return work()
        return self._ask(work) if self.is_first else self._hear()

    @contextmanager
    def at_work(self) -> Generator[None]:
        """A block of long work of the first member, whose result it is going to `tell`.

        The others, who are in `tell` soon, hear meanwhile that it is at work.
        """
        over = threading.Event()

        def say() -> None:
            with suppress(SpartitoError):  # `tell` finds it as well
                while not over.wait(BEAT):
                    self._say(AGAIN, b"")

        thread = threading.Thread(target=say, name="spartito-at-work", daemon=True)
        if self.several:
            thread.start()
        try:
            yield
        except Exception:
            self._end(thread, over)
            raise
        except BaseException:  # an interrupt waits for nobody
            over.set()
            raise
        self._end(thread, over)

    def agree(self, found: bool) -> bool:
        """What the first member has found; all call this.

        Args:
            found: What this one has.
        """
        return bool(self.tell(lambda: b"y" if found else b""))

    def any(self, found: bool) -> bool:
        """Whether any member has found it; all call this.

        Args:
            found: What this one has.
        """
        with self._quiet():
            return self.group.all_reduce(torch.tensor([float(found)])).item() > 0

    def leave(self, together: bool) -> None:
        """Leave the group; may be called again.

        Args:
            together: Whether all of it do so now: then they wait for each other.
        """
        if not self._left.is_set():
            try:
                if together and sys.exc_info()[1] is None:
                    self.group.barrier()
            except SpartitoError:
                pass  # it has nothing more to do for us
            finally:
                self._left.set()
                self._leave()

    def fail(self, error: TaskLostError) -> None:
        """Leave the group because of an ``error``, which the others raise too in `naming`."""
        if not self._left.is_set():
            self._left.set()
            if self._liveness is None:
                self._leave()
            else:
                self._liveness.leave(error, self._leave)

    @contextmanager
    def naming(self) -> Generator[None]:
        """A block in which the loss of a member is what that one left word of, if it did."""
        try:
            yield
        except TaskLostError as error:
            found = None if self._liveness is None else self._liveness.reason(error, grace=0.0)
            if found is None:
                raise
            raise found from error

    def _end(self, thread: threading.Thread, over: threading.Event) -> None:
        over.set()
        if self.several:
            thread.join()

    def _ask(self, work: Callable[[], bytes]) -> bytes:
        before = waits()
        reply = in_thread(work, "spartito-asking")
        while not wait([reply], BEAT).done:
            self._say(AGAIN, b"")
        try:
            found = reply.result()
        except SpartitoError as error:
            self._say(ERROR, error_to_text(error).encode())
            raise
        self._say(RESULT, found)
        resume(before)
        return found

    def _say(self, kind: int, payload: bytes) -> None:
        self.group.broadcast(torch.tensor([kind, len(payload)]))
        if payload:
            self.group.broadcast(torch.frombuffer(bytearray(payload), dtype=torch.uint8))

    def _hear(self) -> bytes:
        kind = AGAIN
        with self._quiet():
            while kind == AGAIN:
                kind, length = self.group.broadcast(torch.zeros(2, dtype=torch.int64)).tolist()
        payload = torch.zeros(length, dtype=torch.uint8)
        data = self.group.broadcast(payload).numpy().tobytes() if length else b""
        if kind == ERROR:
            raise error_from_text(data.decode(), UserError)
        return data

    @contextmanager
    def _quiet(self) -> Generator[None]:
        """A wait for one who may wait, or evaluate, for long: that is nothing to tell."""
        self.group.waiting.enabled = False
        try:
            yield
        finally:
            self.group.waiting.enabled = True

    def _beat(self) -> None:
        """Show the others that this one is at work, whatever it does, until it has given up."""
        while not self._left.wait(BEAT):
            for each in () if self.gave_up else self._here:
                each.heartbeat()


def cluster_of(cluster: ClusterSpec, own: Sequence[int]) -> ClusterSpec:
    """The cluster that the members of a group are for each other.

    Args:
        cluster: The job.
        own: The indices of the workers, in rising order, this one included.

    Raises:
        UserError: If the address of the second one is not known.
    """
    if len(own) == 1:
        return cluster.part([cluster.rank])
    listed, rank = [*cluster.addresses["worker"]], own.index(cluster.task.index)
    where = listed[own[1]]
    if not where:
        raise UserError(
            f"a group of the workers {', '.join(map(str, own))}, and no address of worker {own[1]}",
            "Its members meet there: list the addresses of all workers.",
        )
    hosts = [machine_of(split_address(address)[0]) for address in (listed[i] for i in own)]
    listed[own[1]] = ""  # it draws another port for all else
    here = [number for number, host in enumerate(hosts) if host == hosts[rank]]
    return replace(
        cluster,
        addresses={"worker": tuple(listed)},
        rank=rank,
        world_size=len(own),
        local_rank=here.index(rank),
        local_size=len(here),
        rendezvous=where,
        absent=tuple(Task("worker", i) for i in range(len(listed)) if i not in own),
    )
