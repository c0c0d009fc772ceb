"""``spartito cluster status JOBID``: a job of Slurm, and its tasks by their run folder."""

from __future__ import annotations

from pathlib import Path

from spartito.cli.top import show
from spartito.errors import EXIT_TASK_LOST
from spartito.launch.slurm.status import job_states
from spartito.status import statuses


def status(number: str) -> int:
    """Print how a job of Slurm and its tasks go.

    Args:
        number: The job, a run of an array (``12_3``) or a component (``12+1``).

    Returns:
        The exit code of a job that has ended; before that 0, or 69 where a task says nothing.

    Raises:
        UserError: Slurm is not here, or does not know the job.
    """
    jobs = job_states(number)
    shown: set[Path] = set()
    silent = False
    for job in jobs:
        print("\n".join(job.lines()), flush=True)
        run = job.run_dir
        if run is None or job.waits or run in shown:
            continue
        found = [one for one in statuses(run) if job.ended or one.age <= job.seconds]
        if not found:  # nothing yet, or only what an earlier turn of the job left
            continue
        shown.add(run)
        silent |= not job.ended and any(one.shown_phase == "silent" for one in found)
        show(run)
    code = next((job.exit_code for job in jobs if job.exit_code), 0)
    return code or (EXIT_TASK_LOST if silent else 0)
