"""The tasks that live go on when one is lost, with its replacement or without."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

from spartito import life
from spartito.cluster.recovery import Recovery
from spartito.cluster.store.server import Server
from spartito.collectives.membership.rendezvous import Rendezvous
from spartito.errors import SpartitoError, TaskLostError
from spartito.wire.secret import NO_SECRET
from tests.collectives.group import Group, running, spec
from tests.commands import free_port

LONG = 60.0  # a limit that no passing test comes near
WAYS = ["auto", "sockets", "on aab"]


@contextmanager
def kept() -> Iterator[str]:
    """A store that outlives every task, as a launcher keeps one."""
    server = Server(socket.create_server(("127.0.0.1", 0)), NO_SECRET)
    try:
        yield "{}:{}".format(*server.address)
    finally:
        server.close()


def train(
    pipe: Connection,
    rank: int,
    size: int,
    port: int,
    store: str,
    way: str,
    recovery: Recovery,
    limit: float = LONG,
    is_hidden: bool = False,
) -> Any:
    """Add up ones until the job has `size` tasks and has lost somebody, or for ever.

    With ``is_hidden`` no process can tell by the kernel whether another one lives.
    """
    if is_hidden:
        vars(life)["process_space"] = lambda: f"machine {rank}"
    os.environ["SPARTITO_STORE"] = store
    kind, _, letters = way.partition(" ")
    meeting = Rendezvous(
        spec(rank, size, port), torch.device("cpu"), limit, "auto" if kind == "on" else way,
        f"machine {letters[rank]}" if kind == "on" else None, recovery=recovery,
    )  # fmt: skip
    joined = meeting.joins
    if joined:
        meeting.regroup(None)
    meeting.training_begins()
    told = 0
    while True:
        try:
            group = meeting.group()
            found = group.all_reduce(torch.tensor([1.0, float(meeting.somebody_waits()), told]))
        except TaskLostError as error:
            meeting.regroup(error)
            continue
        if found[0] != told:
            told = int(found[0])
            pipe.send_bytes(_said(meeting, joined, told))
        if found[1]:
            meeting.regroup(None)
        if pipe.poll():
            told = pipe.recv() or told
            if told < 0:
                return "done"


def _said(meeting: Rendezvous, joined: bool, total: int) -> bytes:
    import pickle

    names = [meeting.cluster.name_of(rank) for rank in range(meeting.cluster.world_size)]
    return pickle.dumps((total, meeting.generation, joined, meeting.cluster.rank, names))


def start(group: Group, ranks: range, *args: Any) -> None:
    for rank in ranks:
        group.start(rank, train, *args)


@pytest.mark.usefixtures("no_segments_left")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("victim", [0, 2])
def test_a_task_that_is_killed_is_replaced(way: str, victim: int) -> None:
    names = [f"worker {rank}" for rank in range(3)]
    with kept() as store, running() as group:
        args = (3, free_port(), store, way, Recovery(wait=LONG))
        start(group, range(3), *args)
        for rank in range(3):
            assert group.result(rank) == (3, 0, False, rank, names)
        group.signal(victim, signal.SIGKILL)
        group.start(victim, train, *args)
        assert group.result(victim) == (3, 1, True, victim, names)


@pytest.mark.usefixtures("no_segments_left")
def test_the_others_go_on_without_it_and_it_comes_back() -> None:
    with kept() as store, running() as group:
        args = (3, free_port(), store, "auto", Recovery(min_workers=2, wait=0.2))
        start(group, range(3), *args)
        for rank in range(3):
            assert group.result(rank)[0] == 3
        group.signal(0, signal.SIGKILL)
        for rank in (1, 2):
            assert group.result(rank) == (2, 1, False, rank - 1, ["worker 1", "worker 2"])
        group.start(0, train, *args)
        for rank in range(3):
            total, generation, joined, own, names = group.result(rank)
            assert (total, generation, joined, own) == (3, 2, rank == 0, rank)
            assert names == ["worker 0", "worker 1", "worker 2"]


@pytest.mark.usefixtures("no_segments_left")
def test_the_store_tells_of_the_death_of_a_task_that_others_cannot_see() -> None:
    """Also of the one with the lowest rank of two, whose other half could not go on alone."""
    with kept() as store, running() as group:
        args = (2, free_port(), store, "sockets", Recovery(min_workers=1, wait=0.2), LONG, True)
        start(group, range(2), *args)
        for rank in range(2):
            assert group.result(rank)[0] == 2
        group.signal(0, signal.SIGKILL)
        assert group.result(1) == (1, 1, False, 0, ["worker 1"])
        group.start(0, train, *args)
        for rank in range(2):
            assert group.result(rank)[:2] == (2, 2)


@pytest.mark.usefixtures("no_segments_left")
def test_one_that_was_frozen_comes_back_as_a_newcomer() -> None:
    """The others have gone on: nothing that it does reaches them before it is let in."""
    with kept() as store, running() as group:
        args = (3, free_port(), store, "sockets", Recovery(min_workers=2, wait=0.2), 5.0)
        start(group, range(3), *args)
        for rank in range(3):
            assert group.result(rank)[0] == 3
        group.signal(1, signal.SIGSTOP)
        for rank in (0, 2):
            assert group.result(rank)[:2] == (2, 1)
        group.signal(1, signal.SIGCONT)
        for rank in (0, 2):
            assert group.result(rank)[:2] == (3, 2)


def test_too_few_end_with_those_who_are_missing() -> None:
    with kept() as store, running() as group:
        args = (2, free_port(), store, "auto", Recovery(wait=0.2))
        start(group, range(2), *args)
        for rank in range(2):
            assert group.result(rank)[0] == 2
        group.signal(1, signal.SIGKILL)
        kind, text = group.result(0)
        assert kind == "TaskLostError"
        assert "worker 1 did not come back within" in text
        assert "all have to be there" in text


def test_without_recovery_the_cause_ends_the_job() -> None:
    cause = TaskLostError("worker 1 is gone")
    with Rendezvous(spec(0, 2, free_port()), torch.device("cpu")) as meeting:
        assert not meeting.joins
        with pytest.raises(SpartitoError, match="worker 1 is gone"):
            meeting.regroup(cause)


def some_then_all(pipe: Connection, rank: int, port: int, store: str) -> float:
    """The sum of ones of three tasks, after two of them have met at a store of their own."""
    os.environ["SPARTITO_STORE"] = store
    if rank:
        some = Rendezvous(spec(rank - 1, 2, port), torch.device("cpu"), LONG, keeper=1)
        with some:
            some.group().barrier()
    with Rendezvous(spec(rank, 3, port), torch.device("cpu"), LONG) as meeting:
        return float(meeting.group().all_reduce(torch.ones(1)))


def test_all_meet_after_some_have_met() -> None:
    with kept() as store, running() as group:
        port = free_port()
        for rank in range(3):
            group.start(rank, some_then_all, port, store)
        assert [group.result(rank) for rank in range(3)] == [3.0] * 3
