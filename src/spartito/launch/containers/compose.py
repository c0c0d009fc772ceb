"""The compose file of a job, as one would write it by hand; pure, from a job to its text."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from spartito.cluster.spec import Task
from spartito.cluster.tf_config import VARIABLE
from spartito.errors import UserError
from spartito.folders import make_folder
from spartito.launch.containers.file import RESTARTS_LABEL, SECRET
from spartito.launch.containers.plan import STORE, Containers, service
from spartito.launch.containers.secret import secret_name, write_secret
from spartito.launch.file_plan import print_file
from spartito.launch.processes.local import RUNTIME
from spartito.launch.yaml_text import MERGE, Anchored, List, Row, dump
from spartito.names import (
    ENV_PORTS,
    ENV_RECOVERY,
    ENV_RUN_DIR,
    ENV_SECRET_FILE,
    ENV_SNAPSHOT_DIR,
    ENV_STORE,
)
from spartito.wire.addresses import address

SHARED_MEMORY = "1g"
"""The size of /dev/shm, for gradients; an engine gives 64 MB by itself."""

TMP = "/tmp:exec,size=1g"
"""Where torch.compile puts what it loads as code; an engine's own default is noexec, and half of
the machine's memory."""

PROCESSES = 4096
"""Processes and threads of one container: a task that starts ever more of them harms no other."""

LOGS = {"max-size": "20m", "max-file": "5"}
"""What the engine keeps of the output of one container: a disk fills up otherwise."""

STOP_SECONDS = 30
"""From the request to stop to the kill: a task may write a last checkpoint."""

COMMENTS = {
    "x-task:": "What all tasks share: no root, no capability, nothing to write on but the volumes.",
    "x-environment:": "The environment of all tasks.",
    "secrets:": "By it the tasks know each other; 'spartito cluster up' makes it.",
    "services:": "The tasks. TF_CONFIG says who is in the job, and who each one is.",
}


def compose_file(job: Containers) -> str:
    """The file of a job on this machine."""
    return _file(job, job.roles.tasks, "compose.yaml")


def machine_files(job: Containers) -> dict[str, str]:
    """One file for each machine of the job, by the machine's name."""
    machines = {task: job.machine_of(task) for task in job.roles.tasks}
    return {
        machine: _file(
            job, [task for task in machines if machines[task] == machine], f"{machine}.yaml"
        )
        for machine in job.network.machines
    }


def write_files(job: Containers, into: Path | None) -> None:
    """Print the job's file; with ``into`` write one for each machine there, and the secret."""
    if into is None:
        print_file(compose_file(job))
        return
    make_folder(into, "--into")
    files = {into / f"{machine}.yaml": text for machine, text in machine_files(job).items()}
    for path in files:
        _check_own(path)
    for path, text in files.items():
        machine = path.stem
        path.write_text(text)
        print(f"{machine:<12} {path}")
    if job.meets:
        secret = into / secret_name(job.name)
        write_secret(secret)
        print(f"{'all':<12} {secret}")


def _check_own(path: Path) -> None:
    """Refuse to write over a file that is no job of ours."""
    if path.exists() and "spartito cluster up" not in path.read_text(errors="replace"):
        raise UserError(
            f"{path} was not written by Spartito, and would be replaced",
            "Name another folder, or move the file somewhere else.",
        )


def _file(job: Containers, tasks: Sequence[Task], name: str) -> str:
    heading = map(_on_one_line, _heading(job, tasks, name))
    # Compose reads $ as a variable; here it never is one.
    body = dump(_document(job, tasks)).replace("$", "$$")
    return "\n".join([*heading, "", *_airy(body)])


def _on_one_line(comment: str) -> str:
    """A name of a file may have line breaks, and other characters that no YAML may have."""
    return "".join(char if char.isprintable() else " " for char in comment)


def _heading(job: Containers, tasks: Sequence[Task], name: str) -> Iterator[str]:
    """The comments at the top."""
    commands = {
        f"up {name}": "start it and follow it; ends with the job's exit code",
        f"status {name}": "how each task goes",
        f"down {name}": "end it, and remove all but the run folder",
    }
    width = max(map(len, commands))
    yield f"# {job.about} under {job.strategy}: {job.who}."
    if job.network.machines:
        here = ", ".join(service(task) for task in tasks)
        yield f"# Machines: {', '.join(job.network.machines)}. On this one: {here}."
        yield f"# Containers use their machine's own network, and listen at {_ports(job, tasks)}."
    if job.insecure:
        yield "# Insecure: what tasks send is not encrypted (--insecure)."
    yield "#"
    for command, what in commands.items():
        yield f"#   spartito cluster {command:<{width}}   # {what}"
    yield "#"
    paths = "the same on every machine" if job.network.machines else "relative to this file"
    yield f"# Paths are {paths}. Model and report: {job.out}"


def _ports(job: Containers, tasks: Sequence[Task]) -> str:
    """The ports of ``tasks``, of one machine: GPUs use others, which the system draws."""
    found = [job.address(task)[1] for task in tasks if task.type != "evaluator"]
    drawn = ", its GPUs at ports that the system draws" if job.limits.gpus else ""
    return f"{min(found)} to {max(found)}{drawn}"


def _document(job: Containers, tasks: Sequence[Task]) -> dict[str, Any]:
    task, environment = Anchored("task", _shared(job)), Anchored("environment", _variables(job))
    document: dict[str, Any] = {"name": job.name, "x-task": task, "x-environment": environment}
    document["services"] = {
        service(one): {MERGE: task, **_service(job, one, tasks, environment)} for one in tasks
    }
    if not job.network.host:
        document["networks"] = {"job": {"driver": "bridge"}}
    if job.meets:
        document["secrets"] = {SECRET: {"file": f"./{secret_name(job.name)}"}}
    volumes: dict[str, Any] = {}
    if any(one.type == "ps" for one in tasks):
        volumes["snapshots"] = {}
    if job.store is not None and tasks[0] == job.leader:
        document["services"][STORE] = {MERGE: task, **_store(job, *job.store)}
        volumes[STORE] = {}
    if volumes:
        document["volumes"] = volumes
    return document


def _store(job: Containers, host: str, port: int) -> dict[str, Any]:
    """The service of the store, which outlives every task."""
    words = ["python", "-m", "spartito.cluster.store", address(host, port), "/snapshots/journal"]
    found: dict[str, Any] = {} if job.network.host else {"hostname": STORE}
    return found | {
        "command": List(words),
        "environment": {
            ENV_SECRET_FILE: f"/run/secrets/{SECRET}",
            **job.tls,
        },
        "restart": "always",
        "volumes": [Row(type="volume", source=STORE, target="/snapshots")],
    }


def _shared(job: Containers) -> dict[str, Any]:
    """What the services of all tasks have in common."""
    volumes = [Row(type="bind", source=job.out, target="/runs")]
    for source, target in ((job.scripts, "/scripts"), (job.data, "/data")):
        if source is not None:
            volumes.append(Row(type="bind", source=source, target=target, read_only=True))
    shared: dict[str, Any] = {
        "image": job.image,
        "command": List(job.command),
        "working_dir": "/runs",
        "user": job.user,
        "init": True,
        "read_only": True,
        "tmpfs": List([TMP]),
        "cap_drop": List(["ALL"]),
        "security_opt": List(["no-new-privileges:true"]),
        "stop_grace_period": f"{STOP_SECONDS}s",
        "pids_limit": PROCESSES,
        "logging": Row(driver="json-file", options=Row(LOGS)),
    }
    if job.network.host:
        shared["network_mode"] = "host"
    else:
        shared["networks"] = List(["job"])
    if not job.network.ipc:
        shared["shm_size"] = SHARED_MEMORY
    if job.limits.memory is not None:
        shared["mem_limit"] = job.limits.memory
    if job.meets:
        shared["secrets"] = List([SECRET])
    return shared | {"volumes": volumes}


def _variables(job: Containers) -> dict[str, str]:
    """The environment that is the same for all tasks."""
    variables = {**job.said, ENV_RUN_DIR: "/runs"}
    if job.ports is not None:
        variables[ENV_PORTS] = f"{job.ports[0]}-{job.ports[-1]}"
    if job.roles.ps:
        variables[ENV_SNAPSHOT_DIR] = "/snapshots"
    if job.recovery is not None and job.store is not None:
        variables |= {ENV_RECOVERY: job.recovery.text, ENV_STORE: address(*job.store)}
    if job.meets:
        variables[ENV_SECRET_FILE] = f"/run/secrets/{SECRET}"
    return variables | job.tls | RUNTIME


def _service(
    job: Containers, task: Task, here: Sequence[Task], environment: dict[str, str]
) -> dict[str, Any]:
    """What the service of ``task`` has for itself; ``here`` are the tasks of the same file."""
    first = here[0]
    found: dict[str, Any] = {}
    if not job.network.host:
        found["hostname"] = service(task)
    found["environment"] = {
        MERGE: environment,
        "OMP_NUM_THREADS": str(job.threads(task)),
        **({"CUDA_VISIBLE_DEVICES": ""} if task.type == "ps" else {}),
        VARIABLE: _tf_config(job, task),
    }
    restarts = job.roles.restarts(task)
    found["restart"] = f"on-failure:{restarts}" if restarts else "no"
    if job.recovery is not None:  # those who follow the job start it again
        found["labels"] = Row({RESTARTS_LABEL: str(job.restarts)})
    if job.store is not None and here[0] == job.leader:
        found["depends_on"] = {STORE: Row(condition="service_started")}
    elif task != first:
        found["depends_on"] = {service(first): Row(condition="service_started")}
    if job.meets:
        found["healthcheck"] = _health(job, task)
    if job.network.ipc:
        found["ipc"] = "shareable" if task == first else f"service:{service(first)}"
        if task == first:
            found["shm_size"] = SHARED_MEMORY
    if job.limits.cpus and task.type == "worker":
        found["cpus"] = job.limits.cpus[task.index]
    if job.limits.gpus and task.type == "worker":
        found["deploy"] = _gpu([one for one in here if one.type == "worker"].index(task))
    if task.type == "ps":  # merging replaces a list as a whole
        own = Row(type="volume", source="snapshots", target="/snapshots")
        found["volumes"] = [*_shared(job)["volumes"], own]
    return found


def _tf_config(job: Containers, task: Task) -> str:
    cluster = job.roles.cluster([address(*job.address(one)) for one in job.roles.tasks])
    return json.dumps({"cluster": cluster, "task": {"type": task.type, "index": task.index}})


def _health(job: Containers, task: Task) -> dict[str, Any]:
    """Healthy is a task that reaches the rendezvous of the job; a server, which listens."""
    host, port = job.store or job.address(task if task.type == "ps" else job.leader)
    look = f"import socket; socket.create_connection(({json.dumps(host)}, {port}), 3)"
    return {
        "test": List(["CMD", "python", "-c", look]),
        "interval": "30s",
        "timeout": "5s",
        "retries": 3,
        "start_period": "60s",
    }


def _gpu(number: int) -> dict[str, Any]:
    device = Row(driver="nvidia", device_ids=[str(number)], capabilities=["gpu"])
    return {"resources": {"reservations": {"devices": [device]}}}


def _airy(text: str) -> Iterator[str]:
    """The lines of ``text`` with a blank one before each section and each service."""
    section = ""
    follows = False
    for line in text.splitlines():
        if not line.startswith(" "):
            section = line.split()[0]
            if section != "name:":
                yield ""
            if section in COMMENTS:
                yield f"# {COMMENTS[section]}"
            follows = False
        elif section == "services:" and line[2] != " ":
            if follows:
                yield ""
            follows = True
        yield line
    yield ""
