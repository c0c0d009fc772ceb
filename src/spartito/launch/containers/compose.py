"""The compose file of a job, as one would write it by hand; pure, from a job to its text."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from spartito.cluster.listed import address
from spartito.cluster.spec import Task
from spartito.cluster.tf_config import VARIABLE
from spartito.launch.containers.file import SECRET
from spartito.launch.containers.plan import Containers, service
from spartito.launch.containers.secret import secret_name, write_secret
from spartito.launch.local import RUNTIME
from spartito.names import (
    ENV_PORTS,
    ENV_RUN_DIR,
    ENV_SECRET_FILE,
    ENV_SNAPSHOT_DIR,
    ENV_STRATEGY,
    ENV_STRATEGY_OPTIONS,
    ENV_TIMEOUT,
)

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
        sys.stdout.write(compose_file(job))
        return
    into.mkdir(parents=True, exist_ok=True)
    for machine, text in machine_files(job).items():
        path = into / f"{machine}.yaml"
        path.write_text(text)
        print(f"{machine:<12} {path}")
    if job.meets:
        secret = into / secret_name(job.name)
        write_secret(secret)
        print(f"{'all':<12} {secret}")


def dump(document: Mapping[str, Any]) -> str:
    """``document`` as YAML in which a string is a string to every composer.

    PyYAML reads YAML 1.1 (docker-compose 1), Go's yaml.v3 rather YAML 1.2 (docker compose 2).
    """
    text: str = yaml.dump(
        document,
        Dumper=_Dumper,
        sort_keys=False,
        default_flow_style=False,
        allow_unicode=True,
        width=1 << 20,
    )
    return text


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
    roles = job.roles
    counts = {"chief": int(roles.chief), "worker": roles.workers, "parameter server": roles.ps}
    counts["evaluator"] = int(roles.evaluator)
    who = ", ".join(f"{n} {what}{'s' if n > 1 else ''}" for what, n in counts.items() if n)
    commands = {
        f"up {name}": "start it and follow it; ends with the job's exit code",
        f"status {name}": "how each task goes",
        f"down {name}": "end it, and remove all but the run folder",
    }
    width = max(map(len, commands))
    yield f"# {job.about} under {job.strategy}: {who}."
    if job.network.machines:
        here = ", ".join(service(task) for task in tasks)
        yield f"# Machines: {', '.join(job.network.machines)}. On this one: {here}."
        yield f"# Containers use their machine's own network, and listen at {_ports(job, tasks)}."
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
    task, environment = _Anchored("task", _shared(job)), _Anchored("environment", _variables(job))
    document: dict[str, Any] = {"name": job.name, "x-task": task, "x-environment": environment}
    document["services"] = {
        service(one): {_MERGE: task, **_service(job, one, tasks, environment)} for one in tasks
    }
    if not job.network.host:
        document["networks"] = {"job": {"driver": "bridge"}}
    if job.meets:
        document["secrets"] = {SECRET: {"file": f"./{secret_name(job.name)}"}}
    if any(one.type == "ps" for one in tasks):
        document["volumes"] = {"snapshots": {}}
    return document


def _shared(job: Containers) -> dict[str, Any]:
    """What the services of all tasks have in common."""
    volumes = [_Row(type="bind", source=job.out, target="/runs")]
    for source, target in ((job.scripts, "/scripts"), (job.data, "/data")):
        if source is not None:
            volumes.append(_Row(type="bind", source=source, target=target, read_only=True))
    shared: dict[str, Any] = {
        "image": job.image,
        "command": _List(job.command),
        "working_dir": "/runs",
        "user": job.user,
        "init": True,
        "read_only": True,
        "tmpfs": _List([TMP]),
        "cap_drop": _List(["ALL"]),
        "security_opt": _List(["no-new-privileges:true"]),
        "stop_grace_period": f"{STOP_SECONDS}s",
        "pids_limit": PROCESSES,
        "logging": _Row(driver="json-file", options=_Row(LOGS)),
    }
    if job.network.host:
        shared["network_mode"] = "host"
    else:
        shared["networks"] = _List(["job"])
    if not job.network.ipc:
        shared["shm_size"] = SHARED_MEMORY
    if job.limits.memory is not None:
        shared["mem_limit"] = job.limits.memory
    if job.meets:
        shared["secrets"] = _List([SECRET])
    return shared | {"volumes": volumes}


def _variables(job: Containers) -> dict[str, str]:
    """The environment that is the same for all tasks."""
    variables = {ENV_STRATEGY: job.strategy}
    if job.strategy_options is not None:
        variables[ENV_STRATEGY_OPTIONS] = job.strategy_options
    variables |= {ENV_TIMEOUT: f"{job.timeout:g}", ENV_RUN_DIR: "/runs"}
    if job.ports is not None:
        variables[ENV_PORTS] = f"{job.ports[0]}-{job.ports[-1]}"
    if job.roles.ps:
        variables[ENV_SNAPSHOT_DIR] = "/snapshots"
    if job.meets:
        variables[ENV_SECRET_FILE] = f"/run/secrets/{SECRET}"
    return variables | RUNTIME


def _service(
    job: Containers, task: Task, here: Sequence[Task], environment: dict[str, str]
) -> dict[str, Any]:
    """What the service of ``task`` has for itself; ``here`` are the tasks of the same file."""
    first = here[0]
    found: dict[str, Any] = {}
    if not job.network.host:
        found["hostname"] = service(task)
    found["environment"] = {
        _MERGE: environment,
        "OMP_NUM_THREADS": str(job.threads(task)),
        **({"CUDA_VISIBLE_DEVICES": ""} if task.type == "ps" else {}),
        VARIABLE: _tf_config(job, task),
    }
    restarts = job.roles.restarts(task)
    found["restart"] = f"on-failure:{restarts}" if restarts else "no"
    if task != first:
        found["depends_on"] = {service(first): _Row(condition="service_started")}
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
        own = _Row(type="volume", source="snapshots", target="/snapshots")
        found["volumes"] = [*_shared(job)["volumes"], own]
    return found


def _tf_config(job: Containers, task: Task) -> str:
    cluster: dict[str, list[str]] = {}
    for one in job.roles.tasks:
        cluster.setdefault(one.type, []).append(address(*job.address(one)))
    return json.dumps({"cluster": cluster, "task": {"type": task.type, "index": task.index}})


def _health(job: Containers, task: Task) -> dict[str, Any]:
    """Healthy is a task that reaches the rendezvous of the job; a server, which listens."""
    host, port = job.address(task if task.type == "ps" else job.leader)
    look = f"import socket; socket.create_connection(({json.dumps(host)}, {port}), 3)"
    return {
        "test": _List(["CMD", "python", "-c", look]),
        "interval": "30s",
        "timeout": "5s",
        "retries": 3,
        "start_period": "60s",
    }


def _gpu(number: int) -> dict[str, Any]:
    device = _Row(driver="nvidia", device_ids=[str(number)], capabilities=["gpu"])
    return {"resources": {"reservations": {"devices": [device]}}}


class _List(list[Any]):
    """A list on one line."""


class _Row(dict[str, Any]):
    """A mapping on one line."""


class _Anchored(dict[str, Any]):
    """A mapping that others refer to by ``name``."""

    def __init__(self, name: str, items: dict[str, Any]) -> None:
        super().__init__(items)
        self.name = name


class _Merge(str):
    """The key that merges another mapping in."""


_MERGE = _Merge("<<")


class _Dumper(yaml.SafeDumper):
    """Writes YAML as people do: lists indented, anchors with names, text on one line."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        """Lists stand further in than their key."""
        super().increase_indent(flow, False)

    def generate_anchor(self, node: yaml.Node) -> str:
        """The name that the mapping has, if it has one, instead of a number."""
        return self._names.get(id(node)) or super().generate_anchor(node)

    @property
    def _names(self) -> dict[int, str]:
        kept = self.object_keeper
        return {
            id(self.represented_objects[id(one)]): one.name
            for one in kept
            if isinstance(one, _Anchored)
        }


def _mapping(dumper: yaml.SafeDumper, data: dict[str, Any]) -> yaml.Node:
    return dumper.represent_mapping("tag:yaml.org,2002:map", data.items(), flow_style=False)


def _row(dumper: yaml.SafeDumper, data: dict[str, Any]) -> yaml.Node:
    return dumper.represent_mapping("tag:yaml.org,2002:map", data.items(), flow_style=True)


def _list(dumper: yaml.SafeDumper, data: list[Any]) -> yaml.Node:
    return dumper.represent_sequence("tag:yaml.org,2002:seq", data, flow_style=True)


def _merge(dumper: yaml.SafeDumper, data: _Merge) -> yaml.Node:
    return dumper.represent_scalar("tag:yaml.org,2002:merge", "<<")


# What PyYAML takes for a string and yaml.v3 does not (its resolve.go), underscores left out.
_NUMBER = re.compile(
    r"""[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)(e[-+]?[0-9]+)?
    | [-+]?0(x[0-9a-f]+|o[-+]?[0-7]+|b[-+]?[01]+)""",
    re.VERBOSE | re.IGNORECASE,
)
_TIME = re.compile(
    r"""[0-9]{4}-[0-9]{1,2}-[0-9]{1,2}
    ((t|\ +)[0-9]{1,2}:[0-9]{1,2}:[0-9]{1,2}([.,][0-9]+)?(z|[-+][0-9]{2}:[0-9]{2})?)?""",
    re.VERBOSE | re.IGNORECASE,
)
_LINE_BREAK = re.compile("[\n\x85\u2028\u2029]")


def _string(dumper: yaml.SafeDumper, data: str) -> yaml.Node:
    style = None  # quotes only where PyYAML itself needs them
    if _LINE_BREAK.search(data):
        style = '"'
    elif _NUMBER.fullmatch(data[:1] + data[1:].replace("_", "")) or _TIME.fullmatch(data):
        style = "'"
    return dumper.represent_scalar("tag:yaml.org,2002:str", data, style)


_Dumper.add_representer(str, _string)
_Dumper.add_representer(_Anchored, _mapping)
_Dumper.add_representer(_Row, _row)
_Dumper.add_representer(_List, _list)
_Dumper.add_representer(_Merge, _merge)


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
