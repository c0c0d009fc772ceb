"""A Slurm of a test's own: its daemons run, each node in namespaces of its own, in one folder.

A node has its own network, host name, process table and ``/etc/hosts``; a pair of virtual
network cards joins the two. The first process of each node is the parent of all that ever
runs there, so that its end is the end of them all.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.commands import LEAN, SPARTITO, commands_in, eventually
from tests.skips import refused

PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "srun", "unshare", "nsenter", "ip")
ADDRESSES = {"node1": "10.211.7.1", "node2": "10.211.7.2"}
LIMIT = 240.0
OVER = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED")
OF_A_CLUSTER = ("SPARTITO_", "SLURM", "TF_CONFIG", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_")

CONFIG = """
ClusterName=test
SlurmctldHost=node1
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge/socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0,bf_interval=1
KillWait=5
MpiDefault=none
NodeName=node[1-2] CPUs=4 RealMemory=1000
PartitionName=batch Nodes=ALL Default=YES MaxTime=60
"""


@dataclass(frozen=True)
class Job:
    """How a job ended: Slurm's words, its exit code, what it printed, how often it came again."""

    state: str
    code: int
    text: str
    restarts: int = 0


@dataclass(frozen=True)
class Node:
    """A node by the first process of its namespaces."""

    first: subprocess.Popen[bytes]

    def enter(self, *words: str) -> list[str]:
        """The command line that runs ``words`` there."""
        inside = ("nsenter", "--net", "--uts", "--mount", "--pid")
        return [*inside, f"--target={_children(self.first.pid)[0]}", *words]


@dataclass(frozen=True)
class Slurm:
    """A running Slurm; commands are given on its first node, in the folder ``work``."""

    folder: Path
    work: Path
    node: Node

    def run(self, *words: str, env: Mapping[str, str] | None = None, limit: float = LIMIT) -> str:
        """What a command prints; `AssertionError` with all of it when it fails."""
        ended = subprocess.run(
            self.node.enter("env", f"--chdir={self.work}", *words),
            env=self._environment() | dict(env or {}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=limit,
        )
        assert ended.returncode == 0, f"{words} ended with {ended.returncode}:\n{ended.stdout}"
        return ended.stdout

    def submit(self, *words: str, env: Mapping[str, str] | None = None) -> int:
        """Submit a job by ``sbatch``; returns its number."""
        return int(self.run("sbatch", "--parsable", *words, env=env))

    def wait(self, job: int | str, limit: float = LIMIT) -> Job:
        """How ``job`` ended, which may come again in between."""
        end, restarts = time.monotonic() + limit, 0
        while True:
            shown = self.run("scontrol", "show", "job", str(job))
            state = _field("JobState", shown)
            if state in OVER and _field("EndTime", shown) != "Unknown":
                break
            again = int(_field("Restarts", shown))
            if again > restarts and state == "PENDING":
                # It would wait two minutes, so that its end is known to all nodes; here they know.
                restarts = again
                self.run("scontrol", "update", f"jobid={job}", "StartTime=now+2seconds")
            if time.monotonic() > end:
                raise AssertionError(f"job {job} is {state} after {limit} s:\n{self.logs()}")
            time.sleep(0.1)
        output = Path(_field("StdOut", shown))
        text = output.read_text(errors="replace") if output.exists() else ""
        code = int(_field("ExitCode", shown).partition(":")[0])
        return Job(state, code, text, int(_field("Restarts", shown)))

    def logs(self) -> str:
        """What the daemons wrote."""
        return "\n".join(path.read_text(errors="replace") for path in self.folder.glob("*.log"))

    def _environment(self) -> dict[str, str]:
        plain = {k: v for k, v in os.environ.items() if not k.startswith(OF_A_CLUSTER)}
        own = {"SLURM_CONF": str(self.folder / "slurm.conf"), "PYTHONPATH": str(LEAN)}
        return plain | own | {"OMP_NUM_THREADS": "1"}


def write_and_submit(slurm: Slurm, name: str, target: str, *words: str) -> int:
    """Submit the file that the command writes; the job's run folder is ``runs/NAME``."""
    with commands_in(slurm.work) as commands:
        options = [f"--name={name}", f"--out=runs/{name}", "--partition=batch"]
        written = commands.start(*SPARTITO, "cluster", "slurm", target, *options, *words).end()
    assert written.code == 0, written.err
    (slurm.work / f"{name}.sbatch").write_text(written.out)
    return slurm.submit(f"{name}.sbatch")


def missing() -> str | None:
    """Why no Slurm can be started here; None where it can."""
    absent = [name for name in PROGRAMS if shutil.which(name) is None]
    if absent:
        return f"not installed: {', '.join(absent)}"
    if os.getuid() != 0:
        return "only root may start Slurm's daemons and namespaces"
    tried = subprocess.run(
        ["unshare", "--net", "--uts", "--mount", "--pid", "--fork", "true"], capture_output=True
    )
    if tried.returncode:
        return "this machine gives no namespaces"
    return refused(os.environ).get("slurm")


@contextlib.contextmanager
def slurm_in(folder: Path) -> Iterator[Slurm]:
    """A Slurm of two nodes with four CPUs each, all of whose files are in ``folder``."""
    for name in ("state", "munge", "work", *ADDRESSES):
        (folder / name).mkdir()
    (folder / "slurm.conf").write_text(CONFIG.format(folder=folder))
    hosts = "".join(f"{address} {name}\n" for name, address in ADDRESSES.items())
    (folder / "hosts").write_text(f"127.0.0.1 localhost\n{hosts}")
    with contextlib.ExitStack() as stack:
        stack.enter_context(_munge(folder / "munge"))
        nodes = {name: stack.enter_context(_node(folder, name)) for name in ADDRESSES}
        _join(nodes)
        for name, node in nodes.items():
            if name == "node1":
                _start(node.enter("slurmctld", "-f", f"{folder}/slurm.conf"))
            _start(node.enter("slurmd", "-f", f"{folder}/slurm.conf"))
        slurm = Slurm(folder, folder / "work", nodes["node1"])
        _await_nodes(slurm)
        yield slurm


@contextlib.contextmanager
def _munge(folder: Path) -> Iterator[None]:
    key = folder / "key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o600)
    folder.chmod(0o755)
    files = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log"}
    options = [f"--{option}={folder / name}" for option, name in files.items()]
    # --force: the socket's folder is below one that is not root's alone.
    words = ["munged", "--foreground", "--force", f"--seed-file={folder}/seed", *options]
    daemon = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        assert eventually((folder / "socket").exists), "munged did not start"
        yield
    finally:
        _end(daemon)


@contextlib.contextmanager
def _node(folder: Path, name: str) -> Iterator[Node]:
    prepare = (
        f"mount --bind {folder}/hosts /etc/hosts && hostname {name} && ip link set lo up && "
        "echo ready && exec sleep infinity"
    )
    spaces = ("--net", "--uts", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child")
    first = subprocess.Popen(
        ["unshare", *spaces, "sh", "-c", prepare], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE
    )
    try:
        assert first.stdout is not None
        assert first.stdout.readline() == b"ready\n", f"{name} has no namespaces"
        yield Node(first)
    finally:
        for child in _children(first.pid):
            os.kill(child, signal.SIGKILL)  # and with it all that ever ran there
        _end(first)


def _join(nodes: Mapping[str, Node]) -> None:
    pids = [str(_children(node.first.pid)[0]) for node in nodes.values()]
    cards = ["netns", pids[0], "type", "veth", "peer", "name", "eth0", "netns", pids[1]]
    _start(["ip", "link", "add", "eth0", *cards])
    for name, node in nodes.items():
        _start(node.enter("ip", "address", "add", f"{ADDRESSES[name]}/24", "dev", "eth0"))
        _start(node.enter("ip", "link", "set", "eth0", "up"))


def _start(words: list[str]) -> None:
    """Run what ends at once; a daemon goes on in the background."""
    subprocess.run(
        words, check=True, timeout=LIMIT, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
    )


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()  # unshare ignores it, and ends with its child
    process.wait(LIMIT)
    if process.stdout is not None:
        process.stdout.close()


def _children(pid: int) -> list[int]:
    """The child of ``unshare``, which is the first process of the new process table."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _await_nodes(slurm: Slurm) -> None:
    end = time.monotonic() + LIMIT
    said = ""
    while time.monotonic() < end:
        with contextlib.suppress(AssertionError):  # the controller does not reply yet
            said = slurm.run("sinfo", "--noheader", "--Node", "--format=%N %T")
            if said.split() == ["node1", "idle", "node2", "idle"]:
                return
        time.sleep(0.1)
    raise AssertionError(f"Slurm did not start: {said}\n{slurm.logs()}")


def _field(name: str, shown: str) -> str:
    found = re.search(rf"\b{name}=(\S+)", shown)
    assert found is not None, f"no {name} in:\n{shown}"
    return str(found[1])
