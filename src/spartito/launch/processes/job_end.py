"""When the tasks of a job have done their work, and what is said when one has not."""

from __future__ import annotations

from collections.abc import Sequence

from spartito.launch.processes.output import Sink
from spartito.launch.processes.process import Failure, Running


def done_at(tasks: Sequence[Running]) -> float | None:
    """When the last of the tasks that count ended well; None as long as one has not.

    The vital ones count that were not started again, as such a one may have come too late; where
    the others go on without a task, all that were not.
    """
    there = [task for task in tasks if not task.let_go]
    counts = [
        task
        for task in there
        if task.starts == 1 and (task.process.vital or task.process.gives_up is not None)
    ] or [task for task in there if task.code == 0 and task.process.gives_up is not None]
    if not counts or any(task.code != 0 for task in counts):
        return None
    return max(task.ended_at for task in counts)


def done_beside(task: Running, tasks: Sequence[Running]) -> bool:
    """Whether the others had done their work when ``task`` was lost, or started again."""
    if not task.process.vital and done_at(tasks) is not None:
        return True
    others = [other for other in tasks if other is not task and not other.let_go]
    return task.starts > 1 and bool(others) and all(other.code == 0 for other in others)


def failure_of(cause: Running) -> Failure:
    """How the task that failed first did, and what it printed of its error."""
    held = cause.errors.held if cause.errors is not None else []
    return Failure(cause.name, cause.how_it_failed, b"".join(held).decode(errors="replace"))


def report_failure(cause: Running, tasks: Sequence[Running], err: Sink, shows: bool) -> None:
    """Say which of ``tasks`` failed first, whom that stopped, and if it ``shows`` its error."""
    errors = cause.errors
    if shows and errors is not None and errors.is_own_error:
        err.write(errors.held)
        return
    if others := [t.name for t in tasks if t.code and not t.let_go and t is not cause]:
        verb = "was" if len(others) == 1 else "were"
        why = f"{cause.name} {cause.how_it_failed}"
        err.say(f"{', '.join(others)} {verb} stopped because {why}")
    elif shows and (errors is not None or cause.missed or (cause.code or 0) < 0):
        err.say(f"{cause.name} {cause.how_it_failed}")  # else its own words suffice
    if shows and errors is not None:
        err.write(errors.held)
