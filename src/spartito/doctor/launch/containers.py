"""The doctor of a job in containers: on every task of a compose file, in its own container."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from spartito.doctor.examination import TIMEOUT, checked
from spartito.errors import SpartitoError, TaskLostError, UserError
from spartito.launch.containers import job as cluster_job
from spartito.launch.containers.engine import ASK_SECONDS, Engine, TaskState, run
from spartito.launch.containers.file import JobFile, read_job
from spartito.launch.containers.secret import make_secret
from spartito.launch.yaml_text import dump
from spartito.notes import say

START_SECONDS = 30.0
"""How long after its time limit a doctor may end: a fraction of a CPU starts Python slowly."""

STOP_SECONDS = 1
"""From the request to stop to the kill: a doctor has nothing to save."""

LEFT_OUT = ("depends_on", "ports", "container_name", "stop_grace_period")
"""What a service says of its start, and names and ports that the running job may have."""

ITS_OWN = frozenset({0, 1, 69})
"""Exit codes by which a doctor says how the cluster is; others say how it went itself."""


def examine_containers(path: Path, seconds: float = TIMEOUT, *, as_json: bool = False) -> int:
    """Examine the tasks of the compose file ``path``, each in a container as the job's.

    Prints what the first task prints (see `examine`) and returns its exit code; removes all
    that it made. A running job of the file goes on. Ends within ``seconds``, and what the
    engine takes to start and to remove the containers. Raises `UserError` where the file, the
    engine, an image or a folder is missing, `TaskLostError` where the first task never ends.
    """
    job = doctor_job(read_job(path), checked(seconds), as_json)
    cluster_job.check_folders(job)
    engine = Engine.find()
    cluster_job.check_images(engine, job)
    if any(not state.ended for state in engine.states(job)):
        raise UserError(
            f"a doctor of this job is at work already: {job.name}",
            "Wait for its end: it has a time limit.",
        )
    try:
        with cluster_job.interrupts() as ignore, _folders(job):
            try:
                try:
                    # What a killed doctor has left is replaced.
                    engine.run_compose(job, "up", "--detach", "--no-build", "--force-recreate")
                    return _result(engine, job, seconds)
                finally:
                    ignore()
            finally:
                engine.down(job, STOP_SECONDS)
    except cluster_job.Interrupted as stop:
        say(f"stopped by {stop.signal.name}")
        return 128 + stop.signal


def doctor_job(job: JobFile, seconds: float, as_json: bool) -> JobFile:
    """``job`` with a doctor in place of each task, under a name of its own."""
    document = doctor_document(yaml.safe_load(job.text), seconds, as_json)
    name = f"{job.name}-doctor"
    return replace(job, name=name, services=document["services"], text=dump(document))


def doctor_document(
    document: Mapping[str, Any], seconds: float, as_json: bool = False
) -> dict[str, Any]:
    """The compose file ``document`` with a doctor as the command of every service.

    Environment, limits, networks and volumes stay. What would meet a running job of the same
    file is left out: names and published ports.
    """
    command = ["python", "-m", "spartito", "doctor", "--no-config", f"--timeout={seconds:g}"]
    command += ["--json"] if as_json else []
    own: dict[str, Any] = {
        "command": command,
        "restart": "no",
        "healthcheck": {"disable": True},
    }
    services = {
        name: {key: value for key, value in service.items() if key not in LEFT_OUT} | own
        for name, service in document["services"].items()
    }
    others = {
        key: value
        for key, value in document.items()
        if key not in ("name", "services") and not key.startswith("x-")
    }
    for kind in ("networks", "volumes"):
        if others.get(kind):
            others[kind] = {name: _unnamed(given) for name, given in others[kind].items()}
    return {**others, "services": services}


def _unnamed(given: Any) -> Any:
    """A network or volume of the job's own has a name by its job; one from outside keeps its."""
    if not isinstance(given, dict) or given.get("external"):
        return given
    return {key: value for key, value in given.items() if key != "name"}


@contextmanager
def _folders(job: JobFile) -> Iterator[None]:
    """The folders and the secret that the job needs, new ones only for this time."""
    made = cluster_job.make_folders(job)
    secret = make_secret(job)
    try:
        yield
    finally:
        if secret is not None:
            secret.unlink(missing_ok=True)
        for folder in sorted(made, key=lambda path: len(path.parts), reverse=True):
            with suppress(OSError):  # somebody has put something in: it stays
                folder.rmdir()


def _result(engine: Engine, job: JobFile, seconds: float) -> int:
    """Print what the first task prints, once it has ended; returns its exit code."""
    first = next(iter(job.services))
    states = {state.service: state for state in engine.states(job)}
    if first not in states:
        raise TaskLostError(f"the container of {first} is gone", "Is it removed by somebody?")
    limit = seconds + START_SECONDS
    with suppress(SpartitoError):  # what it said until then is worth to be seen
        engine.ask("wait", states[first].id, limit=limit)
    _show(engine, states[first])
    states = {state.service: state for state in engine.states(job)}
    if first not in states or not states[first].ended:
        raise TaskLostError(
            f"the doctor of {first} did not end within {limit:g} s",
            "Give its container more of a CPU, or --timeout more seconds.",
        )
    for state in states.values():
        if state.ended and state.code not in ITS_OWN:
            why = "ran out of memory" if state.out_of_memory else f"ended with {state.code}"
            say(f"the doctor of {state.name} {why}")
            if state.service != first:
                _show(engine, state)
    return states[first].code


def _show(engine: Engine, state: TaskState) -> None:
    """Pass on what a container has printed."""
    sys.stdout.flush()
    run([engine.docker, "logs", state.id], ASK_SECONDS, shown=True)
