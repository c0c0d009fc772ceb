"""Whole jobs in virtual time, with faults by seed: see `tests.ps.simulation`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from msgspec.structs import replace

from spartito.ps.client.control import Control
from spartito.ps.protocol.keys import Keys
from spartito.ps.protocol.messages import Copying
from spartito.ps.scheduler.queue import WorkQueue
from spartito.ps.server.copies import BackupLink
from spartito.ps.server.replica import Replica
from spartito.ps.server.store import Store
from tests.ps.simulation.world import World, simulate

SCHEDULES = 200
"""The others are run by themselves: see .ci/run."""
KNOWN = (
    729, 925, 1051, 7935, 9429,  # the simulation itself was wrong
    2188,  # a push that waited in a round was applied again, after another worker's of its work
)  # fmt: skip
"""Seeds whose schedules once went wrong."""
KNOWN_OF_TWO = (
    295, 8062,  # a server that died while others were given their values had none afterwards
    5474,  # the chief waited for a primary that stood still
    9674,  # the simulation itself was wrong
)  # fmt: skip
"""The same with every value on two servers."""


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("first", range(0, SCHEDULES, SCHEDULES // 4))
def test_jobs_end_well_whatever_happens(first: int) -> None:
    seeds = range(first, first + SCHEDULES // 4)
    assert {seed: why for seed in seeds if (why := simulate(seed))} == {}


@pytest.mark.parametrize(
    ("first", "count"), [(0, 40), pytest.param(40, 260, marks=pytest.mark.slow)]
)
def test_jobs_whose_values_are_on_two_servers_end_well_too(first: int, count: int) -> None:
    seeds = range(first, first + count)
    assert {seed: why for seed in seeds if (why := simulate(seed, 2))} == {}


def test_schedules_that_went_wrong_once_do_not_again() -> None:
    assert {seed: why for seed in KNOWN if (why := simulate(seed))} == {}
    assert {seed: why for seed in KNOWN_OF_TWO if (why := simulate(seed, 2))} == {}


def test_a_schedule_is_the_same_every_time() -> None:
    ends = []
    for _ in range(2):
        world = World(11)
        world.run()
        ends.append((world.simulation.now, world.restarts, [disk.log for disk in world.disks]))
    assert ends[0] == ends[1]


def fails(seeds: range, replicas: int = 1) -> bool:
    return any(simulate(seed, replicas) for seed in seeds)


@pytest.mark.slow
def test_what_it_would_find(monkeypatch: pytest.MonkeyPatch) -> None:
    """It fails where a rule is taken away: known work, fences, losses of servers."""
    with monkeypatch.context() as without:
        without.setattr(Keys, "__contains__", lambda self, key: False)
        assert fails(range(40))
    with monkeypatch.context() as without:
        without.setattr(Store, "check", lambda self, worker, generation: None)
        assert fails(range(300, 600))
    with monkeypatch.context() as without:
        without.setattr(WorkQueue, "reopen", lambda self, lost: 0)
        assert fails(range(100))
    with monkeypatch.context() as without:
        without.setattr(Control, "lose", lambda self, lost: None)
        assert fails(range(50, 200))


@pytest.mark.slow
def test_what_it_would_find_of_two_servers_with_the_same_values(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It fails where a reply is sent too early, by a wrong server, or work items are not told."""
    with monkeypatch.context() as without:
        without.setattr(BackupLink, "has", lambda self, mark, whole=False: True)
        assert fails(range(40), 2)
    with monkeypatch.context() as without:  # a primary decides on its own that it is alone
        alone = Copying.LOST
        has = BackupLink.has
        without.setattr(
            BackupLink, "has", lambda self, *what: self.state is alone or has(self, *what)
        )
        assert fails(range(100, 400), 2)  # one in 75 does
    with monkeypatch.context() as without:
        without.setattr(Replica, "_is_able", lambda self, asked: True)
        assert fails(range(40), 2)
    with monkeypatch.context() as without:
        update = BackupLink.update
        without.setattr(
            BackupLink,
            "update",
            lambda self, one, gradient: update(self, replace(one, keys=[]), gradient),
        )
        assert fails(range(40), 2)
