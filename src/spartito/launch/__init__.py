"""Start the processes of a job on this machine and watch over them."""

from __future__ import annotations

from spartito.launch.local import launch
from spartito.launch.pace import slow_tasks
from spartito.launch.process import Process
from spartito.launch.supervisor import supervise

__all__ = ["Process", "launch", "slow_tasks", "supervise"]
