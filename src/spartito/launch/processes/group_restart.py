"""Tasks that end when one of them is lost, and are started again as one: the members of a group."""

from __future__ import annotations

from collections.abc import Sequence

from spartito.launch.processes.heartbeats import Heartbeats
from spartito.launch.processes.process import Running


def fallen(tasks: Sequence[Running], beats: Heartbeats) -> list[Running]:
    """The tasks that ended as they should not have, and may be done without or started again.

    Args:
        tasks: All tasks of the job.
        beats: Where each of them says which group it is in.
    """
    ended = [task for task in tasks if task.code and not task.let_go]
    for task in ended:
        _bereave(task, tasks, beats)
    return [task for task in ended if not task.holds_all]


def _bereave(task: Running, tasks: Sequence[Running], beats: Heartbeats) -> None:
    """Have the other members of its group share what becomes of a task that was lost.

    They end by themselves, with the code of those who lost another. Where one of them cannot be
    started again, the job fails with the task. A member that stands still, so that the others have
    given it up, is lost as well: it is ended.
    """
    group = task.last_beat.group if task.last_beat else 0
    mates = [other for other in tasks if other is not task and _group(other, beats) == group]
    if not group or not mates:
        return
    if task.lost_a_peer and not task.lost_mate:
        for mate in mates:
            if mate.code is None and beats.stands(mate.name):
                mate.end()
    elif task.was_lost or task.was_preempted:
        task.holds_all = any(mate.process.restarts == 0 for mate in mates)
        for_good = task.was_preempted or task.starts > task.process.restarts
        for mate in mates if not task.holds_all else ():
            mate.lost_mate, mate.stays_out = task.name, mate.stays_out or task.stays_out or for_good


def _group(task: Running, beats: Heartbeats) -> int:
    beat = task.last_beat if task.code is not None else beats.beat_of(task.name)
    return 0 if beat is None or task.let_go else beat.group
