"""What this task knows about itself and its machine, asked without importing torch."""

from __future__ import annotations

import hashlib
import math
import os
import platform
import shutil
import time
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from spartito.cluster.endpoints import check_drawn
from spartito.cluster.resolver import remarks, starter
from spartito.cluster.spec import NO_RANK, ClusterSpec
from spartito.collectives.membership.placement import PROCESS_GROUP
from spartito.declared import declared_by
from spartito.doctor.facts import network
from spartito.doctor.facts.devices import devices
from spartito.doctor.findings import Facts, Memory, Space
from spartito.errors import UserError
from spartito.launch.processes.gpus import count_gpus
from spartito.registry import default_name
from spartito.system import (
    CGROUPS,
    PROC,
    affinity,
    host_key,
    machine_memory,
    memory_folder,
    shares_memory,
)
from spartito.system.capacity import available_cores, available_memory, cgroup_memory, cgroup_quota
from spartito.system.files import temporary_folder
from spartito.system.texts import text_of
from spartito.wire.addresses import split_address
from spartito.wire.interfaces import own_name

PACKAGES = ("spartito", "torch")
BOOT = PROC / "sys/kernel/random/boot_id"
NETWORK = PROC / "self/ns/net"
CGROUP_SPACE = PROC / "self/ns/cgroup"
CGROUP = PROC / "self/cgroup"


def collect(spec: ClusterSpec, env: Mapping[str, str], seconds: float) -> Facts:
    """All that this task can tell alone; names and GPUs are looked up for so many ``seconds``."""
    addresses = [address for tasks in spec.addresses.values() for address in tasks if address]
    hosts = (split_address(address)[0] for address in addresses)
    names = network.resolve_names(hosts, time.monotonic() + seconds)
    machine = text_of(BOOT).strip() or platform.node()
    quota = cgroup_quota()
    found = devices(env, _version("torch"), seconds)
    communication = communication_of(env)
    process_group = bool(found.backend) or communication in PROCESS_GROUP
    return Facts(
        task=str(spec.task),
        host=own_name(),
        machine=machine,
        network=f"{machine}/{_link(NETWORK)}",
        cpus=_cpus(machine, quota),
        ipc=host_key(),
        source=starter(spec, env),
        plan=plan_of(spec, env, count_gpus(env)),
        remarks=[*remarks(spec, env), *([found.remark] if found.remark else [])],
        cluster={role: list(tasks) for role, tasks in spec.addresses.items()},
        python=platform.python_version(),
        versions={name: _version(name) for name in PACKAGES},
        cores=available_cores(),
        quota=None if math.isinf(quota) else quota,
        omp_num_threads=env.get("OMP_NUM_THREADS"),
        memory=memory(),
        shm=None if (memory_at := memory_folder()) is None else space(memory_at),
        disks=[space(Path.cwd()), space(temporary_folder())],
        gpus=list(found.names),
        backend=found.backend,
        process_group=process_group,
        shared_memory=communication == "auto" and shares_memory(),
        refusal=_refusal(env) if process_group else "",
        names=names,
        routes=network.routes(names),
    )


def communication_of(env: Mapping[str, str]) -> str:
    """How replicas are to exchange, by the options of the strategy in ``env``; "auto" if unset."""
    try:
        found = declared_by(env, default_name(2, 0)).options.get("communication")
    except UserError:
        return "auto"  # training says what is wrong with them
    return found if isinstance(found, str) else "auto"


def plan_of(spec: ClusterSpec, env: Mapping[str, str], gpus: int) -> str:
    """What training would make of this environment, in one sentence."""
    if spec.source == ClusterSpec.alone().source:
        here = f"{gpus} workers, one per GPU" if gpus > 1 else "1 worker"
        return f"Nothing describes a cluster, so spartito run would start {here} on this machine"
    servers = len(spec.addresses.get("ps", ()))
    try:
        strategy = str(declared_by(env, default_name(spec.world_size, servers)))
    except UserError as error:
        strategy = f"unknown: {str(error).splitlines()[0]}"
    rank = f"rank {spec.rank} of {spec.world_size}" if spec.rank != NO_RANK else "no replica"
    meeting = f", rendezvous at {spec.rendezvous}" if spec.rendezvous else ""
    return f"This is {spec.task} by {starter(spec, env)}: {rank}, strategy {strategy}{meeting}"


def memory(meminfo: Path | None = None, cgroups: Path = CGROUPS, own: Path = CGROUP) -> Memory:
    """The machine's memory in bytes, what is available to us, and our cgroup's limit."""
    total = machine_memory(meminfo).get("MemTotal", 0)
    free = available_memory(meminfo, cgroups, own)
    limits = [limit for limit, _ in cgroup_memory(cgroups, own)]
    return Memory(total, int(min(free, total)), min(limits) if limits else None)


def space(path: Path) -> Space:
    """Size and free bytes of the file system at ``path``."""
    usage = shutil.disk_usage(path)
    return Space(str(path), usage.total, usage.free)


def _refusal(env: Mapping[str, str]) -> str:
    """Why a process group would not begin to listen."""
    try:
        check_drawn(env)
    except UserError as error:
        return str(error)
    return ""


def _cpus(machine: str, quota: float) -> str:
    """Tasks share a quota with their own cgroup, and cores without one with all who have them."""
    # Inside of containers the cgroup's path may be the same for all.
    own = [] if math.isinf(quota) else [str(quota), text_of(CGROUP) + _link(CGROUP_SPACE)]
    return hashlib.sha256("\n".join([machine, str(sorted(affinity())), *own]).encode()).hexdigest()[
        :16
    ]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _link(path: Path) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""
