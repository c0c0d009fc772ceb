"""The cores and the memory that one process may use."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from spartito.system import CGROUPS, PROC, affinity, machine_memory
from spartito.system.texts import text_of

_CGROUP_V2 = CGROUPS / "cpu.max"
_CGROUP_V1 = CGROUPS / "cpu/cpu.cfs_quota_us"
_OWN_CGROUP = PROC / "self/cgroup"
_CGROUP_NAMESPACE = PROC / "self/ns/cgroup"
_KERNEL = PROC / "vmstat"
_NO_LIMIT = 1 << 60
"""More than this means "no limit" in a cgroup of version 1."""


def available_cores() -> int:
    """How many cores this process may use: the smaller of its affinity and its cgroup's quota."""
    return max(1, math.ceil(min(len(affinity()), cgroup_quota())))


def own_cgroup() -> str:
    """An identifier of this process's cgroup: processes with the same one share its quota."""
    try:
        return f"{os.readlink(_CGROUP_NAMESPACE)} {text_of(_OWN_CGROUP)}"
    except OSError:
        return ""  # no cgroups: all are in the same


def cgroup_quota() -> float:
    """The CPUs that the container's quota grants, in cores; infinite where there is none."""
    try:
        if _CGROUP_V2.exists():
            quota, period = _CGROUP_V2.read_text().split()
            return math.inf if quota == "max" else int(quota) / int(period)
        quota = _CGROUP_V1.read_text()
        period = _CGROUP_V1.with_name("cpu.cfs_period_us").read_text()
        return math.inf if int(quota) <= 0 else int(quota) / int(period)
    except (OSError, ValueError):
        return math.inf  # no cgroup, or one that we may not read: there is no limit


def memory_limit() -> float:
    """Bytes that this process may use: the smaller of the machine's and its cgroups' limits."""
    machine = machine_memory().get("MemTotal", math.inf)
    return min([machine, *(limit for limit, _ in cgroup_memory())])


def available_memory(
    meminfo: Path | None = None, cgroups: Path = CGROUPS, own: Path = _OWN_CGROUP
) -> float:
    """Bytes that are free, or become so without harm, on the machine and in its cgroups."""
    free = machine_memory(meminfo).get("MemAvailable", math.inf)
    return min([free, *(max(0, limit - used) for limit, used in cgroup_memory(cgroups, own))])


def cgroup_memory(cgroups: Path = CGROUPS, own: Path = _OWN_CGROUP) -> list[tuple[int, int]]:
    """(limit, bytes in use that cannot be dropped) of each cgroup with a limit above us."""
    found = []
    for folder, version in _memory_groups(cgroups, own):
        if version == 1:
            names, cache = ("memory.limit_in_bytes", "memory.usage_in_bytes"), "total_inactive_file"
        else:
            names, cache = ("memory.max", "memory.current"), "inactive_file"
        limit, used = (text_of(folder / name).strip() for name in names)
        if limit.isdigit() and used.isdigit() and int(limit) < _NO_LIMIT:
            found.append((int(limit), int(used) - _counts(folder / "memory.stat").get(cache, 0)))
    return found


@dataclass(frozen=True, slots=True)
class MemoryKills:
    """How many processes the kernel has killed because memory had run out.

    ``group``: of this process's own cgroup, where its children are too; ``machine``: of all.
    """

    group: int
    machine: int

    def since(self, before: MemoryKills) -> MemoryKills:
        """Those that came after ``before``."""
        return MemoryKills(self.group - before.group, self.machine - before.machine)


def memory_kills() -> MemoryKills:
    """What the kernel counts so far; 0 where it does not count."""
    counted = [
        _counts(folder / ("memory.oom_control" if version == 1 else "memory.events"))
        for folder, version in _memory_groups(CGROUPS, _OWN_CGROUP)
    ]
    of_group = sum(counts.get("oom_kill", 0) for counts in counted)
    return MemoryKills(of_group, _counts(_KERNEL).get("oom_kill", 0))


def _memory_groups(cgroups: Path, own: Path) -> Iterator[tuple[Path, int]]:
    """The folders of the cgroups that count our memory, each with its version, 1 or 2."""
    for line in text_of(own).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers in ("memory", ""):
            root = cgroups / controllers
            # Inside of a container its own cgroup is the root, whatever the path says.
            for folder in {root, root / path.lstrip("/")}:
                yield folder, 1 if controllers else 2


def _counts(path: Path) -> dict[str, int]:
    """The lines ``name number`` of a file."""
    lines = (line.split() for line in text_of(path).splitlines())
    return {words[0]: int(words[1]) for words in lines if len(words) == 2 and words[1].isdigit()}
