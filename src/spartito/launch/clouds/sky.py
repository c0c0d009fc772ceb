"""The task of SkyPilot, as one would write it by hand; pure, from a job to its text."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import Any

from spartito.errors import EXIT_PREEMPTED
from spartito.launch.clouds.package import is_wheel, of_no_index
from spartito.launch.clouds.plan import Nodes, text_of
from spartito.launch.fetch import path_of
from spartito.launch.yaml_text import Block, List, Row
from spartito.names import ENV_RUN_DIR, ENV_SECRET, ENV_SNAPSHOT_DIR

HOME = "~/spartito-env"
"""Where a node has Spartito; python -m would take a folder named spartito for the package."""

WORKDIR = "~/sky_workdir"
"""Where SkyPilot puts the folder of the script."""

PACKAGES = "~/packages"
DATA = "~/data"

ABOUT = {
    "num_nodes:": "A node has one task, which finds the others by SKYPILOT_NODE_IPS.",
    "accelerators:": "Nodes are all alike: those without a worker have one too.",
    "job_recovery:": f"For 'sky jobs launch'. A node that is lost is replaced; {EXIT_PREEMPTED} "
    "(told to end, all is saved) starts again, however often.",
    "workdir:": "The folder of the script, as it is when this is launched.",
    "file_mounts:": "What the nodes see.",
    "secrets:": "Given when this is launched, as above.",
    "setup:": "Once on each node.",
    "run:": "On each node, when all are there.",
}
"""What stands above a line."""


def sky_file(job: Nodes) -> str:
    """The file that ``sky launch`` takes."""
    above = dict(ABOUT)
    if len(job.roles.tasks) == job.roles.workers:
        del above["accelerators:"]
    if len(job.roles.tasks) > 1:
        above["~/runs:"] = "To the other nodes files come one by one, some seconds later."
    if job.installed_from:
        above["setup:"] += f" {of_no_index(job.package)}."
    if job.restarts:
        above["job_recovery:"] += f" Any other code, a mistake too, is tried {job.restarts} times."
    return text_of(_heading(job), _document(job), above)


def data_of(url: str | None) -> str:
    """Where the data is on a node."""
    return DATA if url is None else path_of(url, DATA)


def _heading(job: Nodes) -> Iterator[str]:
    secret = f" --secret {ENV_SECRET}" if job.meets else ""
    yield f"{job.about} under {job.strategy}: {job.who}, each on a node of SkyPilot."
    if job.insecure:
        yield "Insecure: what tasks send is not encrypted (--insecure)."
    yield ""
    if job.meets:
        yield "By a secret the tasks know each other, and encrypt what they send."
        yield f"  export {ENV_SECRET}=$(openssl rand -hex 32)"
    if job.out is not None:
        yield f"  sky jobs launch sky.yaml{secret}"
        yield ""
        told = f"Model and report: {job.out}/{job.name}, which stays. A recipe that finds a backup "
        told += "there goes on from it: take another --name to begin anew."
    else:
        yield f"  sky launch -c {job.name} sky.yaml{secret}"
        yield f"  rsync -r {job.name}:runs/{job.name} runs/"
        yield f"  sky down {job.name}"
        yield ""
        told = "Model and report are on the first node, until it is taken down: fetch them first."
    yield told


def _document(job: Nodes) -> dict[str, Any]:
    found: dict[str, Any] = {"name": job.name, "num_nodes": len(job.roles.tasks)}
    found["resources"] = _resources(job)
    if job.scripts is not None:
        found["workdir"] = job.scripts
    if mounts := _mounts(job):
        found["file_mounts"] = mounts
    found["envs"] = job.environment
    if job.meets:
        found["secrets"] = {ENV_SECRET: None}
    found["setup"] = Block("".join(f"{line}\n" for line in _setup(job)))
    found["run"] = Block("".join(f"{line}\n" for line in _run(job)))
    return found


def _resources(job: Nodes) -> dict[str, Any]:
    found: dict[str, Any] = {"cpus": f"{job.cpus}+", "memory": f"{job.memory}+"}
    if job.gpus:
        found["accelerators"] = Row({str(job.gpu_type): 1})
    if job.image is not None:
        found["image_id"] = f"docker:{job.image}"
    if job.spot:
        found["use_spot"] = True
    if job.out is not None:
        found["job_recovery"] = {
            "max_restarts_on_errors": job.restarts,
            "recover_on_exit_codes": List([EXIT_PREEMPTED]),
        }
    return found


def _mounts(job: Nodes) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if is_wheel(job.package):
        found[PACKAGES + "/" + job.package.rpartition("/")[2]] = job.package
    if job.data.folder is not None:
        found[DATA] = job.data.folder
    if job.data.store is not None:
        found[DATA] = Row(source=job.data.store, mode="MOUNT")
    if job.out is not None:
        found["~/runs"] = Row(source=job.out, mode="MOUNT_CACHED")
    return found


def _setup(job: Nodes) -> Iterator[str]:
    """The lines of ``setup``."""
    if job.setup:
        yield from job.setup
    elif job.image is None:
        wheel = f"{PACKAGES}/{shlex.quote(job.package.rpartition('/')[2])}"
        package = wheel if is_wheel(job.package) else shlex.quote(job.package)
        yield "export PATH=~/.local/bin:$PATH"
        yield f"uv venv --allow-existing --python 3.12 {HOME}"
        yield f"uv pip install --python {HOME}/bin/python {package}"
    if job.data.url is not None:
        yield f"mkdir -p {DATA}"
        fetch = "python -m spartito.launch.fetch"
        yield f"PATH={_path(job)} {fetch} {shlex.quote(job.data.url)} {DATA}"
    yield f"mkdir -p {job.run}"


def _path(job: Nodes) -> str:
    return f"{HOME}/bin:$PATH" if job.image is None else "/opt/spartito/bin:$PATH"


def _run(job: Nodes) -> Iterator[str]:
    """The lines of ``run``."""
    yield f"export PATH={_path(job)}"
    yield f"export {ENV_RUN_DIR}={job.run}"
    if folder := job.snapshots.get(ENV_SNAPSHOT_DIR):
        yield f"export {ENV_SNAPSHOT_DIR}={folder}"
    yield "cd ~"
    yield f"exec {job.line}"
