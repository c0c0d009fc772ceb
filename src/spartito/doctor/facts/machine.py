"""What this task knows about itself and its machine, asked without importing torch."""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from spartito.cluster.resolver import remarks
from spartito.cluster.spec import NO_RANK, ClusterSpec
from spartito.collectives.placement import PROCESS_GROUP
from spartito.device import available_cores, cgroup_memory, cgroup_quota
from spartito.doctor.transport.messages import Facts, Memory, Space
from spartito.names import ENV_STRATEGY, ENV_STRATEGY_OPTIONS
from spartito.registry import default_name

PACKAGES = ("spartito", "torch")
BOOT = Path("/proc/sys/kernel/random/boot_id")
NETWORK = Path("/proc/self/ns/net")
CGROUP_SPACE = Path("/proc/self/ns/cgroup")
CGROUP = Path("/proc/self/cgroup")
MEMINFO = Path("/proc/meminfo")
CGROUPS = Path("/sys/fs/cgroup")
SHM = Path("/dev/shm")


def collect(spec: ClusterSpec, env: Mapping[str, str], seconds: float) -> Facts:
    """All that needs no network; listing the GPUs may take so many ``seconds``."""
    machine = _text(BOOT).strip() or platform.node()
    quota = cgroup_quota()
    gpus = gpu_names(env, seconds)
    told = communication(env)
    return Facts(
        task=str(spec.task),
        host=socket.gethostname(),
        machine=machine,
        network=f"{machine}/{_link(NETWORK)}",
        shares=_shares(machine, quota),
        ipc=f"{machine}/{SHM.stat().st_dev if SHM.is_dir() else 0}",
        source=spec.source,
        would=would_do(spec, env, len(gpus)),
        remarks=list(remarks(spec, env)),
        cluster={role: list(tasks) for role, tasks in spec.addresses.items()},
        python=platform.python_version(),
        versions={name: _version(name) for name in PACKAGES},
        cores=available_cores(),
        quota=None if math.isinf(quota) else quota,
        omp=env.get("OMP_NUM_THREADS"),
        memory=memory(),
        shm=space(SHM) if SHM.is_dir() else None,
        disks=[space(Path.cwd()), space(Path(tempfile.gettempdir()))],
        gpus=gpus,
        group=bool(gpus) or told in PROCESS_GROUP,
        share=told == "auto",
    )


def communication(env: Mapping[str, str]) -> str:
    """How replicas are told to talk, by the options of the strategy in ``env``; "auto" if not."""
    try:
        options = json.loads(env.get(ENV_STRATEGY_OPTIONS) or "{}")
    except ValueError:
        return "auto"  # training says what is wrong with them
    found = options.get("communication") if isinstance(options, dict) else None
    return found if isinstance(found, str) else "auto"


def would_do(spec: ClusterSpec, env: Mapping[str, str], gpus: int) -> str:
    """What training would make of this environment, and who told it, in one sentence."""
    strategy = env.get(ENV_STRATEGY) or _strategy_of(spec)
    if spec.source == ClusterSpec.alone().source:
        here = f"{gpus} workers, one per GPU" if gpus > 1 else "1 worker"
        return f"nothing describes a cluster, so spartito run would start {here} on this machine"
    place = f"rank {spec.rank} of {spec.num_replicas}" if spec.rank != NO_RANK else "not training"
    meeting = f", they meet at {spec.rendezvous}" if spec.rendezvous else ""
    return f"{spec.source} said who we are: {spec.task}, {place}, strategy {strategy}{meeting}"


def memory(meminfo: Path = MEMINFO, cgroups: Path = CGROUPS, own: Path = CGROUP) -> Memory:
    """The machine's memory in bytes, what is available to us, and our cgroup's limit."""
    lines = (line.split() for line in _text(meminfo).splitlines())
    figures = {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if len(words) > 1}
    total = figures.get("MemTotal", 0)
    available = figures.get("MemAvailable", total)
    limits = cgroup_memory(cgroups, own)
    if not limits:
        return Memory(total, available)
    for limit, used in limits:
        available = min(available, max(0, limit - used))
    return Memory(total, available, min(limit for limit, _ in limits))


def space(path: Path) -> Space:
    """Size and free bytes of the file system at ``path``."""
    usage = shutil.disk_usage(path)
    return Space(str(path), usage.total, usage.free)


def gpu_names(env: Mapping[str, str], seconds: float) -> list[str]:
    """The GPUs that nvidia-smi lists; none where ``env`` hides them all."""
    if env.get("CUDA_VISIBLE_DEVICES", "all").strip() in {"", "-1"}:
        return []
    if shutil.which("nvidia-smi") is None:
        return []
    try:
        answer = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, timeout=seconds
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    lines = [line for line in answer.stdout.splitlines() if line.startswith("GPU ")]
    return [line.partition(": ")[2].partition(" (UUID")[0] for line in lines]


def _strategy_of(spec: ClusterSpec) -> str:
    return default_name(spec.num_replicas, len(spec.addresses.get("ps", ())))


def _shares(machine: str, quota: float) -> str:
    """Tasks share a quota with their own cgroup, and cores without one with all who have them."""
    if math.isinf(quota):
        return _digest(machine, _affinity())
    # Inside of containers the cgroup's path may be the same for all.
    own = _text(CGROUP) + _link(CGROUP_SPACE)
    return _digest(machine, _affinity(), str(quota), own)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _affinity() -> str:
    return str(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else ""


def _digest(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _link(path: Path) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def _text(path: Path) -> str:
    """What the system says there, "" where it says nothing."""
    try:
        return path.read_text()
    except OSError:
        return ""
