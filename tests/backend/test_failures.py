"""A rank that is gone, stopped or at another call is named; nobody hangs, and nothing is left."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from spartito.errors import EXIT_TASK_LOST, PREFIX
from tests.backend import failing, jobs
from tests.collectives.group import Group, running
from tests.commands import commands_in, free_port, nothing_left
from tests.replicas import Replicas

LONG = 60.0  # a limit that no passing test comes near
CALLS = ("all_reduce", "large", "barrier", "objects", "all_to_all", "ring", "any_source", "ddp")
DIFFERENT = ("shape", "large shape", "small and large", "dtype", "operation", "reduction")
DIFFERENT_PARTS = ("gathered", "scattered", "message", "sources")


def together(group: Group, size: int, job: Any, limit: float, *args: Any) -> list[Any]:
    """Start so many ranks; what each sends when all have met."""
    port = free_port()
    for rank in range(size):
        group.start(rank, job, size, port, limit, *args)
    return [group.result(rank) for rank in range(size)]


def lost(outcome: Any, names: str) -> None:
    """The outcome of a call is an error of ours, which torch's own handlers know too."""
    kinds, text = outcome
    assert {"TaskLostError", "RuntimeError"} <= set(kinds), text
    assert names in text


@pytest.mark.usefixtures("no_segments_left")
@pytest.mark.parametrize("call", CALLS)
def test_a_killed_rank_is_named(call: str) -> None:
    with running() as group:
        together(group, 2, failing.waits, LONG, call)
        group.tell(0)
        group.signal(1, signal.SIGKILL)
        lost(group.result(0, LONG / 2), "rank 1 is gone")


PROGRAM = """
import os, signal
import torch, torch.distributed as dist

dist.init_process_group("spartito")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 3))
for step in range(3):
    if step == 1 and dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    model(torch.ones(2, 3)).sum().backward()
"""


@pytest.mark.usefixtures("no_segments_left")
def test_programs_say_on_their_stderr_who_was_lost(tmp_path: Path) -> None:
    """Though torch has replaced the exception hook by one that drops what ours prints."""
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    with commands_in(tmp_path) as commands:
        script = commands.write("train.py", PROGRAM)
        programs = [
            commands.start(sys.executable, script, env={**meeting, "RANK": str(rank)})
            for rank in range(2)
        ]
        other, killed = (program.end() for program in programs)
    assert killed.code == -signal.SIGKILL, killed.text
    assert other.code == EXIT_TASK_LOST, other.text
    assert other.err.count(f"{PREFIX}rank 1 is gone") == 1, other.text
    assert "Traceback" not in other.err


@pytest.mark.usefixtures("no_segments_left")
@pytest.mark.parametrize("victim", [0, 2])
def test_all_others_name_it(victim: int) -> None:
    with running() as group:
        together(group, 3, failing.waits, LONG, "all_reduce")
        others = [rank for rank in range(3) if rank != victim]
        for rank in others:
            group.tell(rank)
        group.signal(victim, signal.SIGKILL)
        for rank in others:
            lost(group.result(rank, LONG / 2), f"rank {victim} is gone")


@pytest.mark.usefixtures("no_segments_left")
@pytest.mark.parametrize("job", [failing.loads, failing.forks])
def test_processes_that_it_has_forked_do_not_hide_its_death(job: Any) -> None:
    with running() as group:
        told = together(group, 2, job, LONG)
        try:
            group.tell(0)
            group.signal(1, signal.SIGKILL)
            lost(group.result(0, LONG / 2), "rank 1 is gone")
        finally:
            for child in told:
                if child != "together":
                    os.kill(child, signal.SIGKILL)


@pytest.mark.usefixtures("no_segments_left")
@pytest.mark.parametrize("call", ["all_reduce", "ring"])
def test_a_stopped_rank_is_named_at_the_limit(call: str) -> None:
    with running() as group:
        together(group, 2, failing.waits, 1.0, call)
        group.signal(1, signal.SIGSTOP)
        group.tell(0)
        lost(group.result(0), "rank 1 did not come within 1 s")
        group.signal(1, signal.SIGCONT)


@pytest.mark.usefixtures("no_segments_left")
@pytest.mark.parametrize("early", [0, 1])
def test_a_rank_that_leaves_early_is_named(early: int) -> None:
    with running() as group:
        found = together(group, 2, failing.leaves, LONG, early)
        assert found[early] == "left"
        lost(found[1 - early], f"rank {early} is gone")


@pytest.mark.usefixtures("no_segments_left")
@pytest.mark.parametrize("how", [*DIFFERENT, *DIFFERENT_PARTS])
def test_calls_that_differ_are_named_on_all_ranks(how: str) -> None:
    with running() as group:
        for kinds, text in together(group, 2, failing.differs, LONG, how):
            assert "RuntimeError" in kinds, text
            assert "rank 0" in text or "rank 1" in text


def test_ranks_of_another_version_are_named_on_all_ranks() -> None:
    with running() as group:
        for kinds, text in together(group, 2, failing.joins, LONG, "spartito", "0.0.1"):
            assert "UserError" in kinds, text
            assert "different versions of Spartito" in text
            assert "0.0.1 on rank 1" in text


def test_another_backend_beside_ours_is_refused_on_all_ranks() -> None:
    with running() as group:
        for kinds, text in together(group, 2, failing.joins, LONG, "cpu:spartito,cuda:nccl", ""):
            assert "RefusedCallError" in kinds, text
            assert "cpu:spartito,cuda:nccl" in text


@pytest.mark.parametrize("call", ["large", "any_source"])
def test_between_machines_a_killed_rank_is_named(call: str) -> None:
    with running() as group:
        together(group, 2, failing.placed, LONG, "ab", failing.waits, call)
        group.tell(0)
        group.signal(1, signal.SIGKILL)
        lost(group.result(0, LONG / 2), "rank 1 is gone")


@pytest.mark.usefixtures("no_segments_left")
@pytest.mark.parametrize(("machines", "victim"), [("abc", 0), ("aabb", 0), ("aabb", 3)])
def test_between_machines_all_others_name_it(machines: str, victim: int) -> None:
    size = len(machines)
    with running() as group:
        together(group, size, failing.placed, LONG, machines, failing.waits, "all_reduce")
        others = [rank for rank in range(size) if rank != victim]
        for rank in others:
            group.tell(rank)
        group.signal(victim, signal.SIGKILL)
        for rank in others:
            lost(group.result(rank, LONG / 2), f"rank {victim} is gone")


@pytest.mark.parametrize(("machines", "victim"), [("ab", 1), ("aabb", 3)])
def test_between_machines_a_stopped_rank_is_named_at_the_limit(machines: str, victim: int) -> None:
    size = len(machines)
    with running() as group:
        together(group, size, failing.placed, 1.0, machines, failing.waits, "all_reduce")
        group.signal(victim, signal.SIGSTOP)
        others = [rank for rank in range(size) if rank != victim]
        for rank in others:
            group.tell(rank)
        for rank in others:
            lost(group.result(rank), f"rank {victim} did not come within 1 s")
        group.signal(victim, signal.SIGCONT)


@pytest.mark.parametrize(
    ("how", "machines"),
    [
        ("large shape", "abc"),
        ("operation", "ab"),
        ("message", "ab"),
        ("sources", "ab"),
        ("large shape", "aab"),
    ],
)
def test_between_machines_calls_that_differ_are_named(how: str, machines: str) -> None:
    with running() as group:
        size = len(machines)
        for kinds, text in together(
            group, size, failing.placed, LONG, machines, failing.differs, how
        ):
            assert "RuntimeError" in kinds, text
            assert "rank 0" in text or "rank 1" in text


REFUSED = {
    "meta": "meta",
    "bitwise": "BAND",
    "complex": "",
    "float8": "float8",
    "sizes": "",
    "splits": "",
    "list": "",
    "root": "root 6 in a group of 2 ranks",
}


def test_what_cannot_be_done_is_refused_and_the_group_works_on(replicas: Replicas) -> None:
    for found in replicas(jobs.refusals, 2, "spartito"):
        for name, word in REFUSED.items():
            kinds, text = found[name]
            assert {"RuntimeError", "ValueError", "TypeError"} & set(kinds), (name, text)
            assert word in text


@pytest.mark.usefixtures("no_segments_left")
def test_nothing_is_left_where_all_ranks_are_killed() -> None:
    with running() as group:
        together(group, 2, failing.waits, LONG, "all_reduce")
        for rank in (0, 1):
            group.signal(rank, signal.SIGKILL)


def test_nothing_is_left_of_a_group(replicas: Replicas) -> None:
    with nothing_left():
        assert replicas(jobs.steps, 2, "spartito", []) == [[], []]
