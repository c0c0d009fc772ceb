"""The processes of a job, as anybody can see them: Linux shows them as files."""

from __future__ import annotations

import json
import os
import signal
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from spartito.chaos.inside import ENV
from spartito.system import PROC


@dataclass(frozen=True, slots=True)
class Seen:
    """One process that carries the mark of a job.

    Args:
        pid: its id.
        parent: that of the process which started it.
        task: ``worker:1`` where its environment makes it one, else empty.
        state: one letter of the kernel: R, S, D, T, Z.
    """

    pid: int
    parent: int
    task: str
    state: str


def marked(folder: Path) -> list[Seen]:
    """The processes of a run; no zombies.

    Args:
        folder: the run's, which all of them have in their environment.

    Returns:
        Those that could be looked at.
    """
    wanted = f"{ENV}={folder}".encode()
    found = []
    for one in PROC.iterdir():
        if one.name.isdigit():
            with suppress(OSError, IndexError, ValueError):
                variables = (one / "environ").read_bytes().split(b"\0")
                state, parent = (one / "stat").read_text().rpartition(")")[2].split()[:2]
                if wanted in variables and state != "Z":
                    task = _task_of(dict(_pairs(variables)))
                    found.append(Seen(int(one.name), int(parent), task, state))
    return found


def tasks_of(seen: list[Seen]) -> dict[str, int]:
    """The process of each task: of several in its environment, the one that started the others."""
    pids = {one.pid: one for one in seen if one.task}
    return {
        one.task: one.pid
        for one in pids.values()
        if one.parent not in pids or pids[one.parent].task != one.task
    }


def end_all(folder: Path) -> None:
    """End every process of a run, as `marked` finds it, and what these start."""
    while found := marked(folder):
        for one in found:
            with suppress(ProcessLookupError):
                os.kill(one.pid, signal.SIGKILL)


def _pairs(variables: list[bytes]) -> list[tuple[str, str]]:
    texts = [one.decode(errors="replace").partition("=") for one in variables]
    return [(key, value) for key, _, value in texts]


def _task_of(env: dict[str, str]) -> str:
    """Who a process is, by the variables that launchers set."""
    if "TF_CONFIG" in env:
        task = json.loads(env["TF_CONFIG"])["task"]
        return f"{task['type']}:{task['index']}"
    return f"worker:{env['RANK']}" if "RANK" in env else ""
