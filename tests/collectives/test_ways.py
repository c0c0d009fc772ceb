"""Which way tensors go, by the devices of the tasks."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from spartito.collectives.membership.ways import (
    THROUGH_HOST,
    DeviceOfTask,
    Way,
    check_devices,
    compared,
    way_of,
)
from spartito.errors import UserError
from spartito.names import ENV_MIXED

CPU, GPU, MAC = DeviceOfTask(), DeviceOfTask("cuda"), DeviceOfTask("mps")
SHARED = DeviceOfTask("cuda", is_shared=True)
BY_MEMORY, BY_SOCKETS = Way(None, True, True), Way(None, False, True)


@pytest.mark.parametrize(
    ("devices", "communication", "recovers", "way"),
    [
        ([CPU, CPU], "auto", False, Way(None, True, False)),
        ([CPU, CPU], "sockets", False, Way(None, False, False)),
        ([CPU, CPU], "ddp", False, Way("cpu", False, False)),
        ([CPU, CPU], THROUGH_HOST, False, Way(None, True, False)),
        ([GPU, GPU], "auto", False, Way("cuda", True, False)),
        ([GPU, GPU], "process_group", False, Way("cuda", True, False)),
        ([GPU, GPU], "sockets", False, BY_SOCKETS),
        ([GPU, GPU], "auto", True, BY_MEMORY),  # NCCL's groups end with a task
        ([GPU, GPU], THROUGH_HOST, False, BY_MEMORY),
        ([GPU, SHARED], "auto", False, BY_MEMORY),  # NCCL wants a GPU for each
        ([SHARED, SHARED], "ddp", False, Way("cpu", False, False)),  # gloo takes tensors of GPUs
        ([MAC, MAC], "auto", False, BY_MEMORY),  # torch has no process group for it
        ([MAC, MAC], "process_group", False, Way("cpu", False, True)),
        ([GPU, CPU], "auto", False, BY_MEMORY),
        ([GPU, CPU], "process_group", False, Way("cpu", False, False)),
    ],
)
def test_the_way_follows_from_the_devices(
    devices: Sequence[DeviceOfTask], communication: str, recovers: bool, way: Way
) -> None:
    assert way_of(devices, communication, recovers) == way
    assert way_of(devices[::-1], communication, recovers) == way


def test_two_tasks_that_chose_one_device_share_it() -> None:
    """As by ``device="cuda:0"``, or in groups that know nothing of each other."""
    one, other = DeviceOfTask("cuda", index=0), DeviceOfTask("cuda", index=1)
    assert compared([one, other, one], ["a", "a", "b"]) == [one, other, one]
    found = compared([one, other, one, CPU, CPU], ["a"] * 5)
    assert [device.is_shared for device in found[:3]] == [True, False, True]
    assert way_of(found[:3], "auto", False) == BY_MEMORY
    assert way_of(compared([CPU, CPU], ["a", "a"]), "auto", False) == Way(None, True, False)


def test_a_mix_is_refused_unless_it_is_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    check_devices({"worker 0": GPU, "worker 1": SHARED})
    mix = {"worker 0": GPU, "worker 1": CPU}
    with pytest.raises(UserError, match=r"worker 0 on cuda, worker 1 on cpu(.|\n)*--mixed"):
        check_devices(mix)
    monkeypatch.setenv(ENV_MIXED, "1")
    check_devices(mix)
    monkeypatch.setenv(ENV_MIXED, "perhaps")
    with pytest.raises(UserError, match="SPARTITO_MIXED='perhaps'"):
        check_devices(mix)
