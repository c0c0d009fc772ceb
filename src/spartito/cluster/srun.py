"""What ``srun`` says to a process: whether it is a task of a step, which one, and of how many."""

from __future__ import annotations

from collections.abc import Mapping

SHELLS = ("bash", "csh", "dash", "fish", "ksh", "sh", "tcsh", "zsh")
"""Names of jobs in which a person types. Not ``interactive``, salloc's name: where its shell is
on a node, all that ``srun`` starts from it looks like a shell of ``srun --pty``."""

REAL_STEPS = 0xFFFFFFF0
"""Step numbers from here on are Slurm's own: the batch script, an interactive shell."""


def in_step(env: Mapping[str, str]) -> bool:
    """Whether this is a task of a step that somebody started by ``srun``."""
    step = env.get("SLURM_STEP_ID") or env.get("SLURM_STEPID") or ""
    return bool(env.get("SLURM_PROCID")) and step.isdecimal() and int(step) < REAL_STEPS


def is_typed(env: Mapping[str, str]) -> bool:
    """Whether ``srun --pty`` opened a shell, and this runs in it (a later step does not)."""
    terminal = "SLURM_PTY_PORT" in env or "SLURM_PTY_WIN_COL" in env
    first = (env.get("SLURM_STEP_ID") or env.get("SLURM_STEPID")) == "0"
    return terminal and first and env.get("SLURM_JOB_NAME") in SHELLS


def tasks(env: Mapping[str, str]) -> str:
    """The number of tasks of the step, as it is written."""
    names = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS")
    return next((env[name].strip() for name in names if env.get(name)), "")


def says(env: Mapping[str, str], rank: str, size: str) -> bool:
    """Whether we are this task of a step of so many; an empty ``size`` is any."""
    return in_step(env) and env["SLURM_PROCID"].strip() == rank and size in ("", tasks(env))
