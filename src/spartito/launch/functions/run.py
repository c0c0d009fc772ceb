"""Functions as the tasks of a job: what ``sp.launch(function, ...)`` does."""

from __future__ import annotations

import json
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

from spartito.errors import UserError
from spartito.launch.functions import task
from spartito.launch.functions.call import packed
from spartito.launch.functions.outcome import Ending
from spartito.launch.job import JobSpec, Program
from spartito.launch.processes.fork_server import Forks
from spartito.launch.processes.local import Local
from spartito.names import nearest

TASK = "spartito.launch.functions.task"
FORKS = Forks(stays=True)
"""What tasks of this process's jobs are forked by: a notebook starts one after the other."""
OF_FILES = ("name", "out", "data")
"""What a job says to launchers that write a file."""


def run(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    strategy_options: Mapping[str, Any] | None,
    options: Mapping[str, Any],
    on_ray: bool = False,
) -> Any:
    """What ``sp.launch`` documents, or ``sp.launch.ray``."""
    check_caller()
    data, ending = packed(function, args, kwargs), Ending()
    if strategy_options is not None:
        options = {**options, "strategy_options": json.dumps(strategy_options)}
    return ending.result_of((_on_ray if on_ray else _here)(data, ending, options))


def _here(data: bytes, ending: Ending, options: Mapping[str, Any]) -> int:
    """The exit code of a job of this machine, whose tasks find the call in a folder."""
    of_job, of_local = divided({"nnodes": 1, **options}, JobSpec, Local)
    with tempfile.TemporaryDirectory(prefix="spartito-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        (folder / task.CALL).write_bytes(data)
        job = JobSpec(program=Program(TASK, (name,), "module"), **of_job)
        on_end = partial(ending.take, lambda task, file: _read(folder / file))
        return Local(on_end=on_end, private=(name,), forks=FORKS, **of_local).start(job)


def _on_ray(data: bytes, ending: Ending, options: Mapping[str, Any]) -> int:
    """That of a job of actors, which get the call."""
    from spartito.launch.on_ray.job import OnRay

    of_job, of_ray = divided(options, JobSpec, OnRay)
    job = JobSpec(program=Program(TASK, kind="module"), **of_job)
    return OnRay(call=data, ending=ending, **of_ray).start(job)


def _read(path: Path) -> bytes | None:
    return path.read_bytes() if path.exists() else None


def check_caller() -> None:
    """Raise `UserError` where no tasks can be started: in one of them, or in a second thread."""
    if task.is_task:
        raise UserError(
            "sp.launch in a task that sp.launch has started",
            'Write it in the script under: if __name__ == "__main__":',
        )
    if threading.current_thread() is not threading.main_thread():
        raise UserError(
            f"sp.launch in the thread {threading.current_thread().name!r}",
            "Call it from the main thread, where Ctrl-C arrives.",
        )


def divided(options: Mapping[str, Any], *kinds: type) -> list[dict[str, Any]]:
    """``options`` as the keyword arguments of each of ``kinds``; raises `UserError`."""
    known = {
        one.name: one
        for kind in kinds
        for one in fields(kind)
        if "option" in one.metadata and one.name not in OF_FILES
    }
    for name in options:
        if name not in known:
            servers = "Parameter servers are ps=1, or more." if "server" in name else ""
            raise UserError(f"sp.launch has no option {name!r}", servers or nearest(name, known))
    given = {
        name: Path(value) if "Path" in str(known[name].type) else value
        for name, value in options.items()
        if value is not None
    }
    return [
        {one.name: given[one.name] for one in fields(kind) if one.name in given} for kind in kinds
    ]
