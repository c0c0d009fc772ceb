"""What collectives take: by memory inside of a machine, by sockets between them.

As `spartito.collectives` makes them: the tasks of a machine join what they have, one of each
machine exchanges that with the others, and each machine's tasks take the result.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log2

from spartito.errors import UserError
from spartito.launch.lines.line import Link
from spartito.planning.costs.parts import LINK, MEMORY, Situation
from spartito.planning.profile import Machine

SMALL = 64 << 10
"""Bytes that a task sends at most to have a tensor added up by all, in one meeting; as
`spartito.collectives.sockets.tcp.SMALL`."""
FRAMES = (1514 + 66) / 1448
"""Bytes on a line for each that is sent: Ethernet's frames, with TCP's headers in them, and a frame
for each that comes from the other side, which sends as much at the same time."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """What one collective takes: seconds inside of a machine and at its line, bytes sent there."""

    memory: float = 0.0
    link: float = 0.0
    sent: float = 0.0

    def __add__(self, other: Exchange) -> Exchange:
        return Exchange(self.memory + other.memory, self.link + other.link, self.sent + other.sent)

    def __mul__(self, times: float) -> Exchange:
        return Exchange(self.memory * times, self.link * times, self.sent * times)

    @property
    def seconds(self) -> dict[str, float]:
        """As a step has them."""
        return {MEMORY: self.memory, LINK: self.link}


def in_memory(machine: Machine, nbytes: float, ranks: float, cores: float) -> float:
    """Seconds of a sum by shared memory.

    Each rank writes what others add up, adds up its slice, and reads the slices of the others:
    2 (n - 1) / n of all bytes. Two ranks were measured, for which that is 1.

    Args:
        machine: What was measured.
        nbytes: Of what is summed.
        ranks: Of the group.
        cores: Of the machine.
    """
    if ranks <= 1:
        return 0.0
    turns = max(1.0, ranks / cores)
    moved = 2 * (ranks - 1) / ranks * nbytes
    return (machine.shared.start * log2(ranks) + machine.shared.each * moved) * turns


def sent_by_sockets(nbytes: float, ranks: float) -> float:
    """Bytes that each of so many sends, for a sum by sockets.

    Args:
        nbytes: Of what is summed.
        ranks: Of the group.
    """
    if ranks <= 1:
        return 0.0
    whole = nbytes * (ranks - 1)
    return whole if whole <= SMALL else 2 * whole / ranks


def on_a_line(link: Link, nbytes: float) -> float:
    """Seconds in which a line takes so many bytes.

    Args:
        link: The line.
        nbytes: That are sent.
    """
    return nbytes * FRAMES * 8 / link.rate


def beside(work: float, on_line: float) -> float:
    """Seconds in which a task sends and takes in, while the line brings it.

    What came is added up before the sum is sent: half of the shorter one is beside the longer one
    (measured with sums of 1 to 16 MB at 0.1, 1 and 10 Gbit/s, off by 8% at most).

    Args:
        work: Seconds of the task.
        on_line: Seconds of the line.
    """
    return max(work, on_line) + min(work, on_line) / 2


def between(
    machine: Machine, link: Link | None, nbytes: float, ranks: float, turns: float = 1.0
) -> Exchange:
    """A sum by sockets between machines, of which one task each takes part.

    Args:
        machine: What its own work for a byte was measured to take.
        link: The line of each; None: as fast as the machine is.
        nbytes: Of what is summed.
        ranks: How many machines.
        turns: How many of them share a core.
    """
    if ranks <= 1:
        return Exchange()
    sent = sent_by_sockets(nbytes, ranks)
    meetings = 1 if nbytes * (ranks - 1) <= SMALL else 2
    work = machine.sockets.each * 2 * (ranks - 1) / ranks * nbytes * turns
    on_line = 0.0 if link is None else on_a_line(link, sent)
    delay = 0.0 if link is None else link.delay
    meeting = machine.sockets.start * turns + delay
    return Exchange(0.0, meetings * meeting + beside(work, on_line), sent)


def all_reduce(situation: Situation, nbytes: float, tasks: int, machines: int) -> Exchange:
    """A sum over tasks of several machines.

    Args:
        situation: What is planned.
        nbytes: Of what is summed.
        tasks: That take part.
        machines: On which they are, evenly.
    """
    machine, cluster = situation.profile.machine, situation.cluster
    inside = in_memory(machine, nbytes, tasks / machines, cluster.cores)
    return Exchange(inside) + between(machine, cluster.link, nbytes, machines, cluster.turns)


def coded(
    situation: Situation, nbytes: float, tasks: int, machines: int, compress: str | None
) -> Exchange:
    """A sum that leaves machines in fewer bits: each gets what all have packed, and unpacks it.

    Args:
        situation: What is planned.
        nbytes: Of what is summed.
        tasks: That take part.
        machines: On which they are, evenly.
        compress: The name of the code; None: all bits are sent.

    Raises:
        UserError: It was not measured.
    """
    if compress is None:
        return all_reduce(situation, nbytes, tasks, machines)
    machine, link = situation.profile.machine, situation.cluster.link
    code = machine.codes.get(str(compress))
    if code is None:
        raise UserError(
            f"a plan does not know what compress={compress!r} costs",
            f"Known: {', '.join(machine.codes)}. Or run it: spartito compare.",
        )
    if machines <= 1 or link is None:
        raise UserError(
            f"compress={compress!r} on one machine: no sum leaves it", "Leave compress out."
        )
    inside = in_memory(machine, nbytes, tasks / machines, situation.cluster.cores)
    sent = nbytes * code.bytes * (machines - 1)
    own = (code.pack + code.unpack * machines) * nbytes
    on_line = beside(machine.sockets.each * sent, on_a_line(link, sent))
    return Exchange(inside + own, machine.sockets.start + link.delay + on_line, sent)


def all_gather(situation: Situation, nbytes: float, tasks: int, machines: int) -> Exchange:
    """Every task gets the parts of all: half of what a sum moves; so does a reduce-scatter.

    Args:
        situation: What is planned.
        nbytes: Of all parts together.
        tasks: That have one each.
        machines: On which they are, evenly.
    """
    return all_reduce(situation, nbytes, tasks, machines) * 0.5


def message(situation: Situation, nbytes: float, crosses: bool) -> Exchange:
    """One task sends another one something.

    Args:
        situation: What is planned.
        nbytes: Of it.
        crosses: Whether it goes from machine to machine.
    """
    machine, link = situation.profile.machine, situation.cluster.link
    if not crosses or link is None:
        return Exchange(machine.shared.start + machine.copy * nbytes)
    work, on_line = machine.sockets.each * nbytes, on_a_line(link, nbytes)
    return Exchange(0.0, machine.sockets.start + link.delay + beside(work, on_line), nbytes)


def machines_of(situation: Situation, tasks: int) -> int:
    """On how many machines so many neighbouring tasks are.

    Args:
        situation: What is planned.
        tasks: Consecutive ones.
    """
    cluster = situation.cluster
    return max(1, min(cluster.machines, -(-tasks // cluster.workers)))


def between_models(situation: Situation, nbytes: float, size: int) -> Exchange:
    """A sum over replicas that several tasks have each: all tasks of a machine take part at once.

    Args:
        situation: What is planned.
        nbytes: Of the gradients that a task has.
        size: The tasks of a replica.
    """
    cluster = situation.cluster
    replicas, machines = cluster.tasks // size, cluster.machines // machines_of(situation, size)
    summed = all_reduce(situation, nbytes, replicas, min(replicas, machines))
    return summed * (min(size, cluster.workers) / situation.profile.accumulate)
