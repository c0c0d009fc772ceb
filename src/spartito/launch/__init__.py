"""Start jobs: on this machine, on others over ssh, in containers, under Slurm.

A `JobSpec` says what is to run, a launcher starts it:

    Local().start(JobSpec(program=Program("train.py"), workers=2))
"""

from typing import TYPE_CHECKING

from spartito._lazy import attach as _attach

if TYPE_CHECKING:
    from spartito.launch.containers.launcher import Compose
    from spartito.launch.hosts.job import Hosts
    from spartito.launch.job import JobSpec, Launcher, Program, option
    from spartito.launch.local import Local
    from spartito.launch.slurm import Slurm

__getattr__ = _attach(
    __name__,
    {
        "Compose": "spartito.launch.containers.launcher",
        "Hosts": "spartito.launch.hosts.job",
        "JobSpec": "spartito.launch.job",
        "Launcher": "spartito.launch.job",
        "Local": "spartito.launch.local",
        "Program": "spartito.launch.job",
        "Slurm": "spartito.launch.slurm",
        "option": "spartito.launch.job",
    },
)

__all__ = ["Compose", "Hosts", "JobSpec", "Launcher", "Local", "Program", "Slurm", "option"]
