"""What this machine lends to one process: cores, and the device that computes."""

from __future__ import annotations

import math
import os
from pathlib import Path

_CGROUP_V2 = Path("/sys/fs/cgroup/cpu.max")
_CGROUP_V1 = Path("/sys/fs/cgroup/cpu/cpu.cfs_quota_us")


def available_cores() -> int:
    """How many cores this process may use: the smaller of its affinity and its cgroup's quota."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, math.ceil(min(affinity or 1, cgroup_quota())))


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
        return math.inf  # no cgroup, or one that we may not read: nobody limits us
