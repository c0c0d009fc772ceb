"""What is done to which task at which step: faults as values, their text form, seeded draws."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from spartito.errors import UserError
from spartito.names import nearest

LAUNCHER = "launcher"
"""The task that is the command ``spartito run`` itself."""

COMPUTING, SERVING = frozenset({"worker", "chief"}), frozenset({"ps", "evaluator"})
ALL_TASKS = COMPUTING | SERVING


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of fault.

    Args:
        about: what happens, for people.
        roles: the tasks that it can happen to.
        inside: whether the task does it to itself, in a step of `fit`.
        network: whether the tasks need machines of their own for it.
    """

    about: str
    roles: frozenset[str]
    inside: bool = False
    network: bool = False


KINDS = {
    "kill": Kind("SIGKILL", ALL_TASKS | {LAUNCHER}),
    "stop": Kind("SIGSTOP, and nobody continues it", ALL_TASKS),
    "pause": Kind("SIGSTOP, and SIGCONT two seconds later", ALL_TASKS | {LAUNCHER}),
    "term": Kind("SIGTERM", ALL_TASKS | {LAUNCHER}),
    "exception": Kind("an exception in a step", COMPUTING, inside=True),
    "spin": Kind("an endless loop that holds the interpreter's lock", COMPUTING, inside=True),
    "nan": Kind("a gradient that is not a number", COMPUTING, inside=True),
    "clock": Kind("the time of day jumps by an hour", COMPUTING, inside=True),
    "disk": Kind("no space left on the disk, for 130 steps", COMPUTING, inside=True),
    "slow": Kind("the task runs a tenth of the time", ALL_TASKS),
    "memory": Kind("the task may take no more memory", ALL_TASKS),
    "torn": Kind("SIGKILL, and half of the newest checkpoint is gone", COMPUTING),
    "corrupt": Kind("a file of the data holds something else", COMPUTING),
    "loss": Kind(
        "a fifth of what the task sends is lost, for five seconds", ALL_TASKS, network=True
    ),
    "cut": Kind("nothing that the task sends arrives", ALL_TASKS, network=True),
    "partition": Kind("the task is off the network for three seconds", ALL_TASKS, network=True),
}
"""All kinds, by the names that people write."""

FORM = re.compile(r"(?P<kind>[a-z]+)@(?P<task>launcher|[a-z]+:\d+)#(?P<step>\d+)")


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault: as text, ``kill@worker:1#40``.

    Args:
        kind: a name of `KINDS`.
        task: ``worker:1``, or ``launcher``.
        step: the global step after which it happens.

    Raises:
        UserError: the kind is unknown, or cannot happen to such a task.
    """

    kind: str
    task: str
    step: int

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UserError(f"{self.kind!r} is not a fault", nearest(self.kind, KINDS))
        if self.role not in KINDS[self.kind].roles:
            raise UserError(
                f"{self}: {self.kind} cannot happen to {self.task}",
                f"It can to: {', '.join(sorted(KINDS[self.kind].roles))}.",
            )

    @property
    def role(self) -> str:
        """``worker`` of ``worker:1``."""
        return self.task.partition(":")[0]

    @property
    def title(self) -> str:
        """The task as messages name it, ``worker 1``."""
        return self.task.replace(":", " ")

    def __str__(self) -> str:
        return f"{self.kind}@{self.task}#{self.step}"

    @classmethod
    def parse(cls, text: str) -> Fault:
        """The fault that ``text`` says.

        Args:
            text: as ``kill@worker:1#40``.

        Returns:
            It.

        Raises:
            UserError: it says none.
        """
        found = FORM.fullmatch(text.strip())
        if found is None:
            raise UserError(
                f"{text!r} is not a fault", "Write KIND@TASK#STEP, as kill@worker:1#40."
            )
        return cls(found["kind"], found["task"], int(found["step"]))


Schedule = tuple[Fault, ...]
"""What happens in one run, in this order."""


def parse_schedules(text: str) -> list[Schedule]:
    """The schedules that ``text`` says.

    Args:
        text: one a line, or with commas between; the faults of one run are joined by ``+``. What
            follows ``;`` on a line is a remark.

    Returns:
        At least one.

    Raises:
        UserError: it says none.
    """
    lines = [line.partition(";")[0] for line in text.splitlines()]
    runs = [run for line in lines for run in line.split(",") if run.strip()]
    if not runs:
        raise UserError("a schedule without faults", "Write one, as kill@worker:1#40.")
    return [tuple(Fault.parse(one) for one in run.split("+")) for run in runs]


def written(schedule: Schedule) -> str:
    """The text form of one run's faults; `parse_schedules` reads it."""
    return "+".join(map(str, schedule))


def needs_network(schedule: Schedule) -> bool:
    """Whether its faults need a machine for each task."""
    return any(KINDS[fault.kind].network for fault in schedule)


def drawn(
    seed: int, rounds: int, kinds: Sequence[str], tasks: Sequence[str], steps: range
) -> list[Schedule]:
    """One fault for each of so many rounds, by chance.

    Args:
        seed: the same seed draws the same; a round does not depend on how many there are.
        rounds: how many runs.
        kinds: what may happen.
        tasks: to whom.
        steps: when.

    Returns:
        The runs.

    Raises:
        UserError: none of it goes together.
    """
    possible = matched(kinds, tasks)
    if not possible or not steps:
        raise UserError(
            f"none of {', '.join(kinds)} can happen to {', '.join(tasks)}",
            "Choose other --faults or --tasks.",
        )
    runs: list[Schedule] = []
    for number in range(rounds):
        draw = random.Random(f"{seed}/{number}")
        kind, task = draw.choice(possible)
        runs.append((Fault(kind, task, draw.choice(steps)),))
    return runs


def matched(kinds: Iterable[str], tasks: Iterable[str]) -> list[tuple[str, str]]:
    """Each of ``kinds`` with each of ``tasks`` that it can happen to.

    Args:
        kinds: names of `KINDS`; a `UserError` for others.
        tasks: as ``worker:1``.

    Returns:
        The pairs, in order.
    """
    tasks = list(tasks)
    pairs = []
    for kind in kinds:
        if kind not in KINDS:
            raise UserError(f"{kind!r} is not a fault", nearest(kind, KINDS))
        roles = KINDS[kind].roles
        pairs += [(kind, task) for task in tasks if task.partition(":")[0] in roles]
    return pairs
