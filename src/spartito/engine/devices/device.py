"""Where a process computes, and with how many threads."""

from __future__ import annotations

import os

import torch
from torch import nn
from torch.optim import Optimizer

from spartito.accelerators import kind_of, own_device
from spartito.cluster.spec import ClusterSpec
from spartito.engine.updates.optimizers import move_state
from spartito.errors import UserError
from spartito.system.capacity import available_cores


def choose_device(name: torch.device | str | None, cluster: ClusterSpec) -> torch.device:
    """The device that a user named, or this process's own.

    Args:
        name: As torch takes it; None is this task's own accelerator, else the CPU. Parameter
            servers compute on CPUs.
        cluster: The tasks of the job.

    Returns:
        The device.

    Raises:
        UserError: If torch knows no such device, or this machine has too few.
    """
    computes = cluster.task.type != "ps"
    return own_device(name, *_among_those_here(cluster), computes=computes)


def _among_those_here(cluster: ClusterSpec) -> tuple[int, int]:
    """Which one this task is of those that train on its machine, and how many these are.

    A chief that hands out work evaluates alone: it uses the first one's device.
    """
    hands_out = "chief" in cluster.addresses and bool(cluster.addresses.get("ps"))
    if hands_out and cluster.task.type == "chief":
        return 0, 1
    beside = hands_out and cluster.rank == cluster.local_rank  # on the machine of rank 0
    return cluster.local_rank - beside, cluster.local_size - beside


def move(model: nn.Module, device: torch.device, optimizer: object = None) -> None:
    """Have a model on a device, with its optimizer.

    On some devices torch makes new parameters of a model that it moves, apart for each module that
    shares one: they are shared again, have the hooks, and the optimizer gets them.

    Args:
        model: The user's; what has no values yet stays.
        device: Where it is to compute.
        optimizer: Of its parameters, if there is one already.

    Raises:
        UserError: For numbers in fp64, where the device has none.
    """
    _check_dtypes(model, device)
    before = list(model.named_parameters(remove_duplicate=False))
    if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        model._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device))
    else:
        model.to(device)
    moved: dict[int, nn.Parameter] = {}
    for name, old in before:
        path, _, own = name.rpartition(".")
        parameters = model.get_submodule(path)._parameters
        new = parameters[own]
        if isinstance(new, nn.Parameter) and new is not old:
            parameters[own] = kept = moved.setdefault(id(old), new)
            _hand_over(old, kept)
    for module in model.modules() if moved else ():
        if isinstance(module, nn.RNNBase):  # it has a list of them too
            module._init_flat_weights()
    if isinstance(optimizer, Optimizer):
        for group in optimizer.param_groups:
            group["params"] = [moved.get(id(p), p) for p in group["params"]]
        for known in list(optimizer.state):
            optimizer.state[moved.get(id(known), known)] = optimizer.state.pop(known)
        move_state(optimizer)


def _check_dtypes(model: nn.Module, device: torch.device) -> None:
    """Refuse numbers in fp64 by name where a device has none."""
    if kind_of(device).has_doubles:
        return
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.dtype == torch.float64:
            raise UserError(
                f"the model's {name!r} is in fp64, which devices of type {device.type} do not have",
                "Call model.float() first, or take device='cpu'.",
            )


def _hand_over(old: nn.Parameter, new: nn.Parameter) -> None:
    """Give a parameter the hooks and marks of the one before, by the handles that the user has."""
    for name, value in vars(old).items():
        vars(new).setdefault(name, value)
    for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        if getattr(old, hooks, None):
            setattr(new, hooks, getattr(old, hooks))


def divide_cores(cluster: ClusterSpec) -> None:
    """Divide the cores among the replicas of this machine, unless the user has done so.

    Args:
        cluster: The tasks of the job.
    """
    if cluster.local_size > 1 and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, available_cores() // cluster.local_size))
