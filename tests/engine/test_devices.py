"""Which device a task of a job gets, by its role and its number on its machine."""

from __future__ import annotations

import pytest

import spartito as sp
from spartito.cluster.spec import ClusterSpec, Task
from spartito.engine.devices import device as devices
from spartito.errors import UserError


def spec(role: str, index: int, *, workers: int, chief: bool, ps: int = 1) -> ClusterSpec:
    addresses = {"worker": tuple(f"a:{n + 1}" for n in range(workers))}
    if chief:
        addresses["chief"] = ("a:100",)
    if ps:
        addresses["ps"] = ("a:200",) * ps
    rank = -1 if role == "ps" else index + (chief and role == "worker")
    count = workers + chief
    return ClusterSpec(addresses, Task(role, index), rank, count, rank, count, "a:1", "a test")


@pytest.mark.parametrize(
    ("task", "found"),
    [
        (spec("worker", 0, workers=2, chief=True), (0, 2)),
        (spec("worker", 1, workers=2, chief=True), (1, 2)),
        (spec("chief", 0, workers=2, chief=True), (0, 1)),
        (spec("worker", 1, workers=2, chief=False), (1, 2)),
        (spec("worker", 1, workers=2, chief=True, ps=0), (2, 3)),  # this chief trains too
    ],
)
def test_a_chief_that_hands_out_work_takes_no_device_of_a_worker(
    task: ClusterSpec, found: tuple[int, int]
) -> None:
    assert devices._among_those_here(task) == found


def test_servers_compute_on_cpus() -> None:
    assert devices.choose_device("sim", spec("ps", 0, workers=2, chief=True)).type == "cpu"


def test_a_tpu_that_torch_does_not_know() -> None:
    for ask in (lambda: sp.TPUStrategy(), lambda: sp.OneDeviceStrategy(device="tpu:1")):
        with pytest.raises(UserError, match="torch sees none on this machine") as told:
            ask()
        assert "spartito[tpu]" in str(told.value)
