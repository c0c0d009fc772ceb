"""Where a process computes, and with how many threads."""

from __future__ import annotations

import os

import torch

from spartito.cluster.spec import ClusterSpec
from spartito.device import available_cores
from spartito.errors import UserError


def choose_device(name: torch.device | str | None, cluster: ClusterSpec) -> torch.device:
    """The device that a user named, or this process's own.

    Args:
        name: As torch takes it; None is this process's own GPU, else the CPU.
        cluster: The tasks of the job.

    Returns:
        The device.

    Raises:
        UserError: If torch knows no such device.
    """
    if name is None and torch.cuda.is_available():
        return torch.device("cuda", cluster.local_rank % torch.cuda.device_count())
    try:
        return torch.device("cpu" if name is None else name)
    except (RuntimeError, TypeError) as error:
        raise UserError(f"device={name!r} is none of torch's", "As 'cpu' or 'cuda:0'.") from error


def divide_cores(cluster: ClusterSpec) -> None:
    """Divide the cores among the replicas of this machine, unless the user has done so.

    Args:
        cluster: The tasks of the job.
    """
    if cluster.local_size > 1 and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, available_cores() // cluster.local_size))
