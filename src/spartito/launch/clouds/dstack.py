"""The task of dstack, as one would write it by hand; pure, from a job to its text."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import Any

from spartito.launch.clouds.plan import Nodes, text_of
from spartito.launch.fetch import path_of
from spartito.launch.images import names_no_registry
from spartito.launch.yaml_text import List, Row
from spartito.names import ENV_RUN_DIR, ENV_SECRET

FETCHED = "/tmp/data"
"""Where fetched data is in a container."""

ABOUT = {
    "nodes:": "A node has one task, which finds the others by DSTACK_NODES_IPS.",
    "groups:": "A node has one task, which finds the others by DSTACK_NODES_IPS. Workers have a "
    "GPU.",
    "files:": "The folder of the script, as it is when this is applied.",
    "volumes:": "What outlives the containers.",
    "retry:": "Not after an error: dstack cannot tell a mistake (exit code 2) from a lost task "
    "(69), or one that was told to end (75).",
}
"""What stands above a line."""


def dstack_file(job: Nodes) -> str:
    """The file that ``dstack apply`` takes."""
    document = _document(job)
    above = {key: text for key, text in ABOUT.items() if key.rstrip(":") in document}
    above[f"- {ENV_SECRET}"] = "Its value is that of the shell, as above."
    return text_of(_heading(job), document, above)


def image_of_nobody(job: Nodes) -> str:
    """What is to be done about an image that names no registry; empty where it names one."""
    if job.image is None or not names_no_registry(job.image):
        return ""
    return (
        f"the image {job.image} names no registry: the machines ask docker.io/library for it. Push "
        "it where they can pull it, and name that: --image registry.example/team/spartito:1.0"
    )


def data_of(url: str | None) -> str:
    """Where the data is in a container."""
    return "/data" if url is None else path_of(url, FETCHED)


def _heading(job: Nodes) -> Iterator[str]:
    yield f"{job.about} under {job.strategy}: {job.who}, each on a node of dstack."
    if job.insecure:
        yield "Insecure: what tasks send is not encrypted (--insecure)."
    if wrong := image_of_nobody(job):
        yield f"{wrong[0].upper()}{wrong[1:]}."
    yield ""
    if job.meets:
        yield "By a secret the tasks know each other, and encrypt what they send."
        yield f"  export {ENV_SECRET}=$(openssl rand -hex 32)"
    yield "  dstack apply -f .dstack.yml"
    yield ""
    told = f"Model and report: the folder {job.name} in {job.out}, which stays. A recipe that "
    told += "finds a backup there goes on from it: take another --name to begin anew."
    yield told


def _document(job: Nodes) -> dict[str, Any]:
    found: dict[str, Any] = {"type": "task", "name": job.name, "image": job.image}
    uneven = job.gpus and len(job.roles.tasks) > job.roles.workers
    if not uneven and len(job.roles.tasks) > 1:
        found["nodes"] = len(job.roles.tasks)
    found["working_dir"] = "/runs"
    told = {**job.environment, ENV_RUN_DIR: job.run, **job.snapshots}
    found["env"] = [f"{name}={value}".replace("\n", " ") for name, value in told.items()]
    if job.meets:
        found["env"].append(ENV_SECRET)  # from the shell where it is applied
    if job.scripts is not None:
        found["files"] = [f"{job.scripts}:/scripts"]
    found["volumes"] = list(_volumes(job))
    if uneven:
        found["groups"] = list(_groups(job))
    else:
        found["commands"] = list(_commands(job))
        found["resources"] = _resources(job, job.gpus)
    found["spot_policy"] = "spot" if job.spot else "on-demand"
    found["retry"] = {"on_events": List(["no-capacity", "interruption"]), "duration": "4h"}
    return found


def _groups(job: Nodes) -> Iterator[dict[str, Any]]:
    """Nodes of one role each, in the order of the tasks."""
    counts: dict[str, int] = {}
    for task in job.roles.tasks:
        counts[task.type] = counts.get(task.type, 0) + 1
    for role, count in counts.items():
        yield {
            "name": role,
            "nodes": count,
            "commands": list(_commands(job)),
            "resources": _resources(job, role == "worker"),
        }


def _volumes(job: Nodes) -> Iterator[str]:
    yield f"{job.out}:/runs"
    if data := job.data.folder or job.data.store:
        yield f"{data}:/data"


def _commands(job: Nodes) -> Iterator[str]:
    yield from job.setup
    if job.data.url is not None:
        fetch = "python -m spartito.launch.fetch"
        yield f"mkdir -p {FETCHED}"
        yield f"{fetch} {shlex.quote(job.data.url)} {FETCHED}"
    yield f"exec {job.line}"


def _resources(job: Nodes, gpu: bool) -> dict[str, Any]:
    found: dict[str, Any] = {"cpu": f"{job.cpus}..", "memory": f"{job.memory}GB.."}
    if gpu:
        count = Row(count=1) if job.gpu_type is None else Row(name=job.gpu_type, count=1)
        found["gpu"] = count
    found["shm_size"] = "1GB"
    return found
