"""The operations of a group with several ranks on some of its machines: in two layers.

The ranks of a machine share memory, and one rank of each machine, its agent, has a connection to
those of the other machines. A reduction is taken on each machine in rank order, then over the
machines in the order of their first ranks: ``(0 + 1) + (2 + 3)``. All get what the agents made of
it, so all ranks have the same bits, and a byte crosses the line once for each machine that has to
know it. Messages, and the parts of an all-to-all, go to other machines by a connection from rank
to rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import wraps
from typing import Any, TypeVar, cast

import numpy as np

from spartito.backend.alarm import RankAlarm
from spartito.backend.errors import DifferentCallsError, LostRankError
from spartito.backend.machines import SeveralMachines
from spartito.backend.operations import Alone
from spartito.backend.wire import NOTHING, Wire
from spartito.collectives.arithmetic import Arithmetic
from spartito.collectives.membership.placement import Placement
from spartito.collectives.membership.store import Membership
from spartito.collectives.memory.memory_operations import SharedMemoryOperations, add_up
from spartito.collectives.memory.rank_memory import Bytes, Memory

Call = TypeVar("Call", bound=Callable[..., None])

CHUNK = 2 << 20  # bytes that cross the line at once
PATIENCE = 5.0  # seconds that each layer waits longer than the one below it, whose error it tells


class _OneRank(Alone):
    """A machine of one rank: there is nobody to tell."""

    def wait_longer(self, seconds: float) -> None:
        pass


class _Neighbours(SharedMemoryOperations):
    """Several ranks; messages go by the connections."""

    address = ""

    def __init__(self, memory: Memory) -> None:
        super().__init__(memory)
        self.begin = memory.begin

    def wait_longer(self, seconds: float) -> None:
        self.memory.patience = seconds


def _told(call: Call) -> Call:
    """A call of all ranks, which all learn of what ended it."""

    @wraps(call)
    def made(self: TwoLayers, *args: Any) -> None:
        try:
            self._wire.swap({}, {})  # who sends nothing counts the call too
            call(self, *args)
        except (LostRankError, DifferentCallsError) as error:
            self._inside.leave(error)
            self._wire.leave(error)
            raise

    return cast(Call, made)


class TwoLayers:
    """Collective operations by memory inside a machine and by an agent's connections between.

    Args:
        group: The ranks, and the store where they meet.
        placement: Which of them are on one machine.
        wire: The connections between all of them.
        spins: Whether there is a core for each rank of this machine.
    """

    def __init__(self, group: Membership, placement: Placement, wire: Wire, spins: bool) -> None:
        self._wire, self._placement = wire, placement
        self._rank, self._machine = wire.rank, placement.machine_of(wire.rank)
        self._here = placement.machines[self._machine]
        self._away = [rank for rank in range(wire.size) if rank not in self._here]
        self._joints: dict[tuple[int, ...], SeveralMachines] = {}
        self._scratch = NOTHING
        self.address, self.send, self.receive = wire.address, wire.send, wire.receive
        wire.limit_to(group.timeout, PATIENCE)
        self._inside: _OneRank | _Neighbours = _OneRank()
        try:
            if len(self._here) > 1:
                names = [group.names[rank] for rank in self._here]
                neighbours = replace(group, rank=self._here.index(wire.rank), names=names)
                neighbours = neighbours.under(f"machine/{self._machine}")
                memory = Memory(neighbours, spins, RankAlarm(neighbours))
                self._inside = _Neighbours(memory)
            wire.meet()  # so that no other machine goes on where one has no memory
        except BaseException:
            self.close()
            raise

    def begin(self, tag: int) -> None:
        """Begin the call that ``tag`` says: ranks in different ones get an error."""
        self._wire.begin(tag)
        self._inside.begin(tag)

    @_told
    def barrier(self) -> None:
        """Wait until all ranks are here."""
        self._inside.barrier()
        if self._is_agent():
            self._joint().barrier()
        self._hand_out(NOTHING)

    @_told
    def all_reduce(self, row: Bytes, way: Arithmetic) -> None:
        """Replace ``row`` by the reduction of all ranks' rows, the same on all."""
        for part in _chunks(row):
            self._inside.reduce(part, 0, way)
            if self._is_agent():
                self._joint().all_reduce(part, way)
            self._hand_out(part)

    @_told
    def reduce(self, row: Bytes, root: int, way: Arithmetic) -> None:
        """As `all_reduce`; only rank ``root`` gets the result."""
        target, agent = self._placement.machine_of(root), self._agent(root)
        if self._is_agent(root) and self._rank != root:
            row = row.copy()
        for part in _chunks(row):
            self._inside.reduce(part, agent, way)
            if self._is_agent(root):
                self._joint(root).reduce(part, target, way)

    @_told
    def broadcast(self, row: Bytes, root: int) -> None:
        """Give all ranks the row of rank ``root``."""
        source = self._placement.machine_of(root)
        for part in _chunks(row):
            if source == self._machine:
                self._hand_out(part, root)
            if self._is_agent(root):
                self._joint(root).broadcast(part, source)
            if source != self._machine:
                self._hand_out(part)

    @_told
    def all_gather(self, row: Bytes, into: Sequence[Bytes]) -> None:
        """Put the row of each rank into its entry of ``into``."""
        machines, own = self._placement.machines, [into[rank] for rank in self._here]
        self._inside.all_gather(row, own)
        for turn in range(max(map(len, machines))):
            come = {
                machine: into[members[turn]]
                for machine, members in enumerate(machines)
                if machine != self._machine and turn < len(members)
            }
            if self._is_agent():
                out = dict.fromkeys(self._others(), own[turn]) if turn < len(own) else {}
                self._joint().swap(out, come)
            for row in come.values():
                self._hand_out(row)

    @_told
    def reduce_scatter(self, rows: Sequence[Bytes], into: Bytes, way: Arithmetic) -> None:
        """Reduce the ``rows``, one for each rank: ``into`` becomes the result of our own."""
        size, machines, here = len(into), self._placement.machines, len(self._here)
        total = self._kept(size * len(rows))
        blocks, start = [], 0
        for members in machines:
            block = total[start : start + size * len(members)]
            np.concatenate([rows[rank] for rank in members], out=block)
            blocks.append(block)
            start += len(block)
        self._inside.reduce(total, 0, way)
        parts, results = [NOTHING] * here, [into, *[NOTHING] * (here - 1)]
        if self._is_agent():
            own = blocks[self._machine]
            come = {machine: np.empty_like(own) for machine in self._others()}
            self._joint().swap({machine: blocks[machine] for machine in self._others()}, come)
            add_up([come.get(machine, own) for machine in range(len(machines))], own, way)
            parts = [own[index * size :][:size] for index in range(here)]
        self._inside.wait_longer(2 * PATIENCE)
        self._inside.exchange(parts, results, size)
        self._inside.wait_longer(0.0)

    @_told
    def exchange(self, out: Sequence[Bytes], into: Sequence[Bytes], largest: int) -> None:
        """Send row ``out[r]`` to each rank ``r``, and put what it sends into ``into[r]``."""
        here, away = self._here, self._away
        self._inside.exchange([out[rank] for rank in here], [into[rank] for rank in here], largest)
        self._wire.swap(
            {rank: out[rank] for rank in away if len(out[rank])},
            {rank: into[rank] for rank in away if len(into[rank])},
        )

    def limit_to(self, seconds: float) -> None:
        """Let each wait for another rank take no longer than ``seconds`` from now on."""
        self._inside.limit_to(seconds)
        self._wire.limit_to(seconds)

    def leave(self, error: BaseException) -> None:
        """Make no more calls: who waits for this rank raises ``error``."""
        self._inside.leave(error)
        self._wire.leave(error)

    def close(self) -> None:
        """Leave the group. May be called again."""
        self._inside.close()
        self._wire.close()

    def _agents(self, root: int) -> tuple[int, ...]:
        """The rank of each machine that has the connections: ``root`` where it is one of them."""
        return tuple(
            root if root in members else members[0] for members in self._placement.machines
        )

    def _agent(self, root: int) -> int:
        """The index of the agent among the ranks of this machine."""
        return self._here.index(root) if root in self._here else 0

    def _is_agent(self, root: int = 0) -> bool:
        return self._here[self._agent(root)] == self._rank

    def _joint(self, root: int = 0) -> SeveralMachines:
        """The agents."""
        agents = self._agents(root)
        if agents not in self._joints:
            self._joints[agents] = SeveralMachines(self._wire, agents)
        return self._joints[agents]

    def _others(self) -> list[int]:
        """The other machines."""
        count = len(self._placement.machines)
        return [machine for machine in range(count) if machine != self._machine]

    def _hand_out(self, row: Bytes, root: int = 0) -> None:
        """Give the ranks of this machine a row of its agent, who may itself wait for another."""
        self._inside.wait_longer(2 * PATIENCE)
        self._inside.broadcast(row, self._agent(root))
        self._inside.wait_longer(0.0)

    def _kept(self, size: int) -> Bytes:
        """Memory that the next call gets too."""
        if size > len(self._scratch):
            self._scratch = np.empty(size, dtype=np.uint8)
        return self._scratch[:size]


def _chunks(row: Bytes) -> list[Bytes]:
    """The parts of a row; one without bytes has one, so that all meet."""
    return [row[start : start + CHUNK] for start in range(0, max(1, len(row)), CHUNK)]
