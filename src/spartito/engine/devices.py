"""Where a process computes, and with how many threads."""

from __future__ import annotations

import os

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

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


def move(model: nn.Module, device: torch.device, optimizer: object = None) -> None:
    """Have a model on a device, with its optimizer.

    On some devices torch makes new parameters of a model that it moves, apart for each module that
    shares one: they are shared again, and the optimizer gets them.

    Args:
        model: The user's.
        device: Where it is to compute.
        optimizer: Of its parameters, if there is one already.
    """
    before = list(model.named_parameters(remove_duplicate=False))
    model.to(device)
    moved: dict[int, nn.Parameter] = {}
    for name, old in before:
        path, _, own = name.rpartition(".")
        parameters = model.get_submodule(path)._parameters
        new = parameters[own]
        if isinstance(new, nn.Parameter) and new is not old:
            parameters[own] = moved.setdefault(id(old), new)
    if not moved:
        return
    for module in model.modules():
        if isinstance(module, nn.RNNBase):  # it has a list of them too
            module._init_flat_weights()
    if isinstance(optimizer, Optimizer):
        for group in optimizer.param_groups:
            group["params"] = [moved.get(id(p), p) for p in group["params"]]
        for known in [p for p in optimizer.state if id(p) in moved]:
            state = optimizer.state.pop(known)
            optimizer.state[moved[id(known)]] = {
                key: value.to(device) if isinstance(value, Tensor) and value.dim() else value
                for key, value in state.items()
            }


def divide_cores(cluster: ClusterSpec) -> None:
    """Divide the cores among the replicas of this machine, unless the user has done so.

    Args:
        cluster: The tasks of the job.
    """
    if cluster.local_size > 1 and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, available_cores() // cluster.local_size))
