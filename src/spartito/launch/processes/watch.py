"""What the launcher says of tasks that stand still, are slow, or are not there: pure rules.

Nothing is ended here but a job whose tasks wait for one that has ended: a debugger, a first
batch that is compiled, or a long evaluation look from outside like a task that hangs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from spartito.cluster.limits import NOTICE
from spartito.heartbeat import Beat, Life
from spartito.names import duration

LOOKS = 10
"""Looks at the tasks within that time."""
STANDS = 0.6
"""The fraction of that time after which a task that stands still is named."""
LONG = 12
"""Times that limit for what may take long: a first step, an evaluation, a checkpoint."""
USUAL = 10
"""Times its usual step after which a task that is in one is named."""
AGAIN = 10
"""Times as long until the same is said again."""
SLOW = 2.0
"""Times the others' own time for a step that makes a straggler, in `ROW` windows in a row."""
ROW = 2
WINDOW = 2
"""Times the limit: the time over which steps are compared."""
LEAST_STEPS = 3
LEAST_SECONDS = 0.001
"""What a straggler loses with each step at least."""
WAITING = ("exchange", "connect", "recover")
"""Where a task waits for others."""
ALONE = ("start", "connect", "recover", "serve", "end")
"""Where the others do not wait for a task's next step."""
MISSED = 2.0
"""Seconds for which others wait before a task that ended without them is missed."""


@dataclass(frozen=True, slots=True)
class Seen:
    """A task as it is seen once.

    Attributes:
        name: What it is called.
        start: Which start of the task this is, from 1.
        beat: What it said last; None if it never said anything.
        life: What the kernel says of its process; None where that has ended.
        code: Its exit code, None while it runs.
        vital: Whether the others cannot do without it.
        gives_up: Seconds for which the others wait for it, where it may be replaced then.
    """

    name: str
    start: int = 1
    beat: Beat | None = None
    life: Life | None = None
    code: int | None = None
    vital: bool = True
    gives_up: float | None = None


@dataclass(frozen=True, slots=True)
class Notice:
    """Something to say about a task.

    Attributes:
        name: The task.
        text: What it does, without its name.
        stacks: Whether its stacks would tell more.
        ends: Whether the job cannot go on.
        is_lost: Whether it is to be ended, so that it is started again.
    """

    name: str
    text: str
    stacks: bool = False
    ends: bool = False
    is_lost: bool = False


@dataclass(slots=True)
class _Known:
    """What was seen of one start of a task."""

    start: int
    cpu: float = -1.0
    state: str = ""
    still_since: float = 0.0
    told_still: bool = False
    steps: int = -1
    step_time: float = 0.0
    usual: float | None = None
    quiet_of: float = -1.0  # the beat of which something was said
    quiet_after: float = 0.0  # seconds until it is said
    told_quiet: bool = False
    mark: Beat | None = None  # at the beginning of the window
    own: float | None = None  # of a step in the last window
    data: float = 0.0  # how much of it went for data
    slow: int = 0  # windows in a row
    slow_after: int = ROW  # such windows until it is said


@dataclass
class Watch:
    """Remembers how tasks went, to say what is unusual.

    Args:
        limit: Seconds within which a task that stands still is to be named.
    """

    limit: float = NOTICE
    _known: dict[str, _Known] = field(default_factory=dict)
    _looked: float = float("-inf")
    _window: float = float("-inf")

    @property
    def every(self) -> float:
        """Seconds between two looks."""
        return self.limit / LOOKS

    def look(self, now: float, seen: Sequence[Seen]) -> list[Notice]:
        """What is to be said now.

        Args:
            now: Seconds of the machine's monotonic clock.
            seen: All tasks of the launcher.
        """
        asleep = now - self._looked > 3 * self.every + 1.0  # we stood still ourselves, or began
        self._looked = now
        running = [task for task in seen if task.code is None]
        for task in running:
            known = self._known.get(task.name)
            if known is None or known.start != task.start:
                known = self._known[task.name] = _Known(task.start)
            if asleep and not known.told_still:  # what was said of it holds until it moves
                known.state, known.still_since = "", now
        notices = [notice for task in running for notice in self._of(task, now)]
        lost = [
            Notice(task.name, "does not move, and the others miss it: it is ended", is_lost=True)
            for task in running
            if is_given_up(now, task, running, self.stands(task.name), self.limit)
        ]
        return [*notices, *self._stragglers(now, running), *missed(now, seen), *lost]

    def stands(self, name: str) -> bool:
        """Whether it was said of a task that it stands still or does not move, and holds yet.

        Args:
            name: The task.
        """
        known = self._known.get(name)
        return known is not None and (known.told_still or known.told_quiet)

    def _of(self, task: Seen, now: float) -> list[Notice]:
        known = self._known[task.name]
        still = self._still(task, known, now)
        if still or known.told_still or task.life is None or task.life.stands:
            return still
        return [] if task.beat is None else self._quiet(task, known, task.beat, now)

    def _still(self, task: Seen, known: _Known, now: float) -> list[Notice]:
        """A process that a signal or a debugger has stopped; a throttled one computes meanwhile."""
        life = task.life
        if life is None:
            return []
        if not life.stands or (life.state, life.cpu) != (known.state, known.cpu):
            was, since = known.told_still, known.still_since
            known.state, known.cpu, known.still_since, known.told_still = (
                life.state, life.cpu, now, False,
            )  # fmt: skip
            return [Notice(task.name, f"goes on after {now - since:.0f} s")] if was else []
        if known.told_still or now - known.still_since < STANDS * self.limit:
            return []
        known.told_still = True
        where = f" ({task.beat})" if task.beat else ""
        pid = (
            f": kill -CONT {task.beat.pid} lets it go on" if task.beat and life.state == "T" else ""
        )
        return [Notice(task.name, f"{life.stands}{where}{pid}")]

    def _quiet(self, task: Seen, known: _Known, beat: Beat, now: float) -> list[Notice]:
        """A task that has said nothing for long, and does not wait for others."""
        if beat.steps > known.steps > 0:
            known.usual = (beat.time - known.step_time) / (beat.steps - known.steps)
        if beat.steps > known.steps:
            known.steps, known.step_time = beat.steps, beat.time
        silent = now - beat.time
        if beat.time != known.quiet_of:
            told, known.told_quiet, known.quiet_of = known.told_quiet, False, beat.time
            known.quiet_after = self._patience(beat, known.usual)
            if told:
                return [Notice(task.name, f"goes on ({beat})")]
        if silent < known.quiet_after:
            return []
        known.told_quiet, known.quiet_after = True, AGAIN * silent
        usual = f"; a step takes {known.usual:.2g} s otherwise" if known.usual else ""
        return [Notice(task.name, f"has not moved for {silent:.0f} s ({beat}{usual})", stacks=True)]

    def _patience(self, beat: Beat, usual: float | None) -> float:
        """Seconds of silence that are as usual."""
        if beat.phase in ("connect", "exchange", "start", "end"):  # it waits, or is not ours
            return float("inf")
        if beat.phase in ("data", "step") and usual is not None:
            return max(self.limit, USUAL * usual)
        return LONG * self.limit

    def _stragglers(self, now: float, running: Sequence[Seen]) -> list[Notice]:
        """Tasks whose own time for a step, without waits for others, is that of no other."""
        if now < self._window + WINDOW * self.limit:
            return []
        self._window = now
        own: dict[str, float] = {}
        for task in running:
            known, beat = self._known[task.name], task.beat
            before, known.mark = known.mark, beat
            if beat is None or before is None or beat.steps - before.steps < LEAST_STEPS:
                continue
            count = beat.steps - before.steps
            known.data = (beat.read - before.read) / count
            own[task.name] = (beat.computed - before.computed) / count + known.data
        slow = stragglers(own)
        notices = []
        for name in own:
            known = self._known[name]
            known.slow = known.slow + 1 if name in slow else 0
            if known.slow != known.slow_after:
                known.slow_after = known.slow_after if known.slow else ROW
                continue
            known.slow_after *= AGAIN
            data = f", {duration(known.data)} of it for data" if known.data else ""
            notices.append(
                Notice(
                    name,
                    f"is slower than the others: {duration(own[name])} of its own for a step"
                    f"{data}; theirs take {duration(slow[name])}",
                )
            )
        return notices


def stragglers(own: Mapping[str, float]) -> dict[str, float]:
    """The tasks that take `SLOW` times as long as the others, with the median of those.

    Args:
        own: Seconds of each task for a step, without waits for others.
    """
    found = {}
    for name, seconds in own.items():
        others = [other for each, other in own.items() if each != name]
        if others and seconds > max(SLOW * median(others), median(others) + LEAST_SECONDS):
            found[name] = median(others)
    return found


def is_given_up(
    now: float, task: Seen, running: Sequence[Seen], stands: bool, limit: float
) -> bool:
    """Whether the others miss a task that does not move, so that it has to be replaced.

    One that is stopped by a signal, when another one has waited ``limit`` seconds; one that runs,
    when they have given it up by their own time limit. Where none of the others is seen from
    here, what it says itself has to do.

    Args:
        now: Seconds of the machine's monotonic clock.
        task: It.
        running: All tasks of the launcher that run.
        stands: Whether it was named as one that stands still or does not move.
        limit: Seconds within which such a task is named.
    """
    if task.gives_up is None or task.beat is None or task.life is None or task.life.state == "t":
        return False
    beats = [other.beat for other in running if other.name != task.name and other.beat is not None]
    silent = now - task.beat.time
    if task.life.state == "T":
        missed = any(b.phase in WAITING and now - b.time >= limit for b in beats)
        return stands and (missed if beats else silent >= 2 * limit)
    stands = stands or silent >= task.gives_up
    if task.beat.phase in ALONE or not stands:
        return False
    if beats:
        return any(b.phase == "recover" and now - b.time >= limit for b in beats)
    return task.beat.phase != "exchange" and silent >= task.gives_up + 2 * limit


def missed(now: float, seen: Sequence[Seen]) -> list[Notice]:
    """Tasks that ended with 0 before they met the others, who wait for them.

    Args:
        now: Seconds of the machine's monotonic clock.
        seen: All tasks of the launcher.
    """
    waiting = [
        task.name
        for task in seen
        if task.code is None
        and task.beat is not None
        and task.beat.phase == "connect"
        and now - task.beat.time > MISSED
    ]
    if not waiting:
        return []
    verb = "waits" if len(waiting) == 1 else "wait"
    text = (
        f"ended with exit code 0 before it met the others: {', '.join(waiting)} {verb} for it. "
        "All tasks run the same program up to the strategy"
    )
    return [
        Notice(task.name, text, ends=True)
        for task in seen
        if task.code == 0 and task.vital and (task.beat is None or task.beat.phase == "start")
    ]
