"""A network that is cut and heals: never do two sides of a job both train."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from spartito.launch.lines.network import Machine, NoNamespacesError, network
from tests.commands import Commands, Program, commands_in
from tests.skips import need, skip

PORT = 29517
SCRIPT = """
import sys, time
import torch
import spartito as sp
from spartito.cluster.recovery import Recovery
from spartito.cluster.resolver import resolve
from spartito.collectives.membership.rendezvous import Rendezvous
from spartito.errors import TaskLostError, install_excepthook

install_excepthook()
with Rendezvous(
    resolve(), torch.device("cpu"), 15.0, recovery=Recovery(min_workers=1, wait=1.0)
) as meeting:
    if meeting.joins:
        meeting.regroup(None)
    meeting.training_begins()
    told = ""
    while True:
        try:
            waits = float(meeting.somebody_waits())
            total, waits = meeting.group().all_reduce(torch.tensor([1.0, waits])).tolist()
        except TaskLostError as error:
            meeting.regroup(error)
            continue
        said = f"generation {meeting.generation} of {total:.0f}"
        if said != told:
            told = said
            print(said, flush=True)
        if waits:
            meeting.regroup(None)
        time.sleep(0.01)
"""


@pytest.fixture
def commands(tmp_path: Path) -> Iterator[Commands]:
    with commands_in(tmp_path) as started:
        started.write("train.py", SCRIPT)
        yield started


@pytest.fixture
def machines() -> Iterator[list[Machine]]:
    need("netns")
    try:
        with network("alpha", "beta") as made:
            yield made
    except NoNamespacesError as error:
        skip("netns", error)


def start(commands: Commands, machines: list[Machine], rank: int, where: int) -> Program:
    """A task of three: the first two on one machine."""
    local = rank if where == 0 else 0
    env = {
        "RANK": str(rank),
        "WORLD_SIZE": "3",
        "LOCAL_RANK": str(local),
        "LOCAL_WORLD_SIZE": "2" if where == 0 else "1",
        "GROUP_RANK": str(where),
        "MASTER_ADDR": machines[0].address,
        "MASTER_PORT": str(PORT),
        "SPARTITO_SECRET": "the secret of this test",
        "OMP_NUM_THREADS": "1",
    }
    return commands.start(*machines[where].enters, sys.executable, "train.py", env=env)


@pytest.mark.slow
def test_one_side_goes_on_and_the_other_ends_and_comes_back_when_it_heals(
    commands: Commands, machines: list[Machine]
) -> None:
    first, second, third = tasks = [
        start(commands, machines, rank, where) for rank, where in ((0, 0), (1, 0), (2, 1))
    ]
    for task in tasks:
        task.wait_for("generation 0 of 3")
    machines[1].cut()
    for task in (first, second):
        task.wait_for("generation 1 of 2")
    alone = third.end()  # it reaches nobody, and one of three is no majority
    assert alone.code == 69
    assert re.findall("generation .*", alone.out) == ["generation 0 of 3"]
    machines[1].join()
    back = start(commands, machines, 2, 1)
    for task in (first, second, back):
        task.wait_for("generation 2 of 3")
    for task in (first, second, back):
        task.kill()
