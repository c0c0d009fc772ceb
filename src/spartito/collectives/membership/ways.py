"""Which way tensors go between the tasks of a job, by the devices that they compute on.

=================================== ======================================================
CPUs                                shared memory, sockets; gloo where that is asked for
accelerators, one for each task     torch's process group for them, as NCCL, and what the host
                                    has to know as between CPUs
accelerators that tasks share,      as between CPUs, through the host's memory
that torch has no process group
for, or of several kinds; or where
a training is to outlive a loss
=================================== ======================================================
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
from msgspec import structs

from spartito.accelerators import gloo_takes, group_backend, is_set
from spartito.collectives.membership.placement import PROCESS_GROUP
from spartito.errors import UserError
from spartito.names import ENV_MIXED

THROUGH_HOST = "through the host"
"""What ``communication`` is for a strategy that keeps something in memory of the host."""
BY_HOST = ("sockets", THROUGH_HOST)


class DeviceOfTask(msgspec.Struct, frozen=True):
    """What a task tells of its device: type, number, and whether tasks beside it have the same."""

    type: str = "cpu"
    is_shared: bool = False
    index: int = 0


def compared(devices: Sequence[DeviceOfTask], hosts: Sequence[str]) -> list[DeviceOfTask]:
    """The devices of tasks, once each knows those of the others.

    Args:
        devices: What each has told: it counts the tasks beside it, and not which device they chose.
        hosts: The machine of each.

    Returns:
        The same; two tasks of a machine that chose one share it.
    """
    chosen = [
        (host, device.type, device.index) for host, device in zip(hosts, devices, strict=True)
    ]
    counts = Counter(chosen)
    return [
        structs.replace(device, is_shared=device.is_shared or counts[key] > 1)
        for device, key in zip(devices, chosen, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class Way:
    """How groups move tensors.

    Attributes:
        group: The type of device that torch's process group is for; None: it is none of these.
        shares_memory: Whether tasks of a machine share memory.
        stages: Whether tensors of devices go through the host's memory.
    """

    group: str | None
    shares_memory: bool
    stages: bool


def way_of(devices: Sequence[DeviceOfTask], communication: str, recovers: bool) -> Way:
    """The way between tasks; the same on all of them.

    Args:
        devices: Those of all tasks.
        communication: As under `spartito.collectives.membership.rendezvous.Rendezvous`.
        recovers: Whether groups are to be left and made anew.

    Returns:
        How they move tensors.
    """
    types = {device.type for device in devices}
    asks = communication in PROCESS_GROUP
    if types == {"cpu"}:
        return Way("cpu" if asks else None, communication in ("auto", THROUGH_HOST), False)
    alone = len(types) == 1 and not any(device.is_shared for device in devices)
    (first, *_) = types
    if alone and not recovers and group_backend(first) and communication not in BY_HOST:
        return Way(first, True, False)
    if asks:
        return Way("cpu", False, not all(map(gloo_takes, types)))
    return Way(None, communication != "sockets", True)


def check_devices(devices: Mapping[str, DeviceOfTask]) -> None:
    """Refuse tasks that update together on devices of several kinds, unless that is asked for.

    Args:
        devices: Those of all tasks, by the tasks' names.

    Raises:
        UserError: On all of them; it names who has what.
    """
    types = {device.type for device in devices.values()}
    if len(types) > 1 and not is_set(ENV_MIXED):
        have = ", ".join(f"{name} on {device.type}" for name, device in devices.items())
        raise UserError(
            f"tasks that update together compute on devices of several kinds: {have}",
            f"They would wait for the slowest. If that is meant: --mixed, or {ENV_MIXED}=1. Else "
            "give all a device='cpu', or take parameter_server, where nobody waits for another.",
        )
