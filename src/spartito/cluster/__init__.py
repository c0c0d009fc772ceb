"""Who is in the job: the tasks, their addresses, and which of them this process is."""

from __future__ import annotations

from spartito.cluster.resolver import resolve
from spartito.cluster.spec import ClusterSpec, Task

__all__ = ["ClusterSpec", "Task", "resolve"]
