"""Plays the nodes of a file for SkyPilot or dstack here: a tool of the tests, and no cloud.

Each node is a network namespace with an address. What the tool would do is done with real
processes: folders come along, ``setup`` runs once, then ``run`` (dstack's ``commands``) on all
nodes at the same time, with the variables by which the tool tells a node who it is. There is no
container: where one would see a volume, the folder here is named instead. It rents nothing,
installs nothing and retries nothing.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spartito.launch.lines.network import Machine

LIMIT = 240.0


@dataclass(frozen=True)
class Ended:
    """How a node ended, and all that it printed."""

    code: int
    text: str


def variables(
    tool: str, rank: int, addresses: Sequence[str], secrets: Mapping[str, str]
) -> dict[str, str]:
    """What the tool tells a node; see ``tests/cluster/environments.py``."""
    listed, nodes = "\n".join(addresses), str(len(addresses))
    if tool == "sky":
        return {
            "SKYPILOT_NODE_RANK": str(rank),
            "SKYPILOT_NUM_NODES": nodes,
            "SKYPILOT_NODE_IPS": listed,
            "SKYPILOT_NUM_GPUS_PER_NODE": "0",
            **secrets,
        }
    return {
        "DSTACK_NODE_RANK": str(rank),
        "DSTACK_NODES_NUM": nodes,
        "DSTACK_NODES_IPS": listed,
        "DSTACK_MASTER_NODE_IP": addresses[0],
    }


def play(
    task: Mapping[str, Any], machines: Sequence[Machine], folder: Path, secrets: Mapping[str, str]
) -> list[Ended]:
    """Run a file's nodes on ``machines``, which have a home each below ``folder``.

    Args:
        task: the file.
        machines: one for each node.
        folder: where the file was written, and paths in it begin.
        secrets: what was given at the launch, by name.
    """
    tool = "dstack" if task.get("type") == "task" else "sky"
    addresses = [machine.address for machine in machines]
    started: list[tuple[subprocess.Popen[bytes], Path]] = []
    try:
        for rank, machine in enumerate(machines):
            home = folder / f"node-{rank}"
            home.mkdir()
            said = task["envs"] if tool == "sky" else _listed(task["env"], secrets)
            env = {
                "PATH": os.environ["PATH"],
                "HOME": str(home),
                "OMP_NUM_THREADS": "1",  # the nodes share the cores of this machine
                **{name: str(value) for name, value in said.items()},
            }
            told = variables(tool, rank, addresses, secrets)
            if tool == "sky":
                _carry(task, folder, home)
                _setup(task["setup"], machine, home, env)
                script = ["bash", "-c", task["run"]]
            else:
                mounts = _mounts(task, folder)
                env = {name: _seen(value, mounts) for name, value in env.items()}
                env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"
                lines = " && ".join(_commands(task, rank))  # as its server joins them
                script = ["sh", "-c", _seen(lines, mounts)]
            output = folder / f"node-{rank}.txt"
            with output.open("wb") as file:
                popen = subprocess.Popen(
                    [*machine.enters, *script],
                    cwd=home,
                    env={**env, **told},
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            started.append((popen, output))
        return [Ended(popen.wait(LIMIT), output.read_text()) for popen, output in started]
    finally:
        for popen, _ in started:
            if popen.poll() is None:
                popen.kill()
                popen.wait()


def _listed(lines: Sequence[str], shell: Mapping[str, str]) -> dict[str, str]:
    """dstack's variables; one without a value is that of the shell where it is applied."""
    pairs = [line.partition("=") for line in lines]
    return {name: value if is_given else shell[name] for name, is_given, value in pairs}


def _carry(task: Mapping[str, Any], folder: Path, home: Path) -> None:
    """Copy the folder of the script and what is mounted from here."""
    if "workdir" in task:
        shutil.copytree(folder / task["workdir"], home / "sky_workdir", ignore=_no_nodes)
    for target, source in task.get("file_mounts", {}).items():
        there = home / target.removeprefix("~/")
        if isinstance(source, str):
            copy = shutil.copytree if (folder / source).is_dir() else shutil.copy
            there.parent.mkdir(parents=True, exist_ok=True)
            copy(folder / source, there)
        else:  # a bucket: a folder that all nodes share
            bucket = folder / source["source"].partition("://")[2].replace("/", "-")
            bucket.mkdir(exist_ok=True)
            there.symlink_to(bucket)


def _no_nodes(_: str, names: list[str]) -> list[str]:
    return [name for name in names if name.startswith("node-")]


def _setup(script: str, machine: Machine, home: Path, env: Mapping[str, str]) -> None:
    words = [*machine.enters, "bash", "-e", "-c", script]
    done = subprocess.run(words, cwd=home, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def _mounts(task: Mapping[str, Any], folder: Path) -> dict[str, Path]:
    """What would be mounted into a container of dstack: where, and which folder here it is."""
    kept = [one.split(":") for one in task.get("volumes", [])]
    sent = [one.split(":") for one in task.get("files", [])]
    found = {target: folder / source.lstrip("/") for source, target in kept}
    found |= {target: (folder / source).resolve() for source, target in sent}
    for path in found.values():
        path.mkdir(parents=True, exist_ok=True)
    return found


def _seen(text: str, mounts: Mapping[str, Path]) -> str:
    """``text`` with the folders here for those of a container, which is none here."""
    for target, path in mounts.items():
        text = re.sub(rf"(?<![\w/.-]){re.escape(target)}(?![\w.-])", str(path), text)
    return text


def _commands(task: Mapping[str, Any], rank: int) -> list[str]:
    if "commands" in task:
        return list(task["commands"])
    groups = [group for group in task["groups"] for _ in range(group["nodes"])]
    return list(groups[rank]["commands"])
