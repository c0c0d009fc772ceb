"""Sockets between tasks: what is cut and sent, who is let in, and what a broken transfer says."""

from __future__ import annotations

import os
import socket
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import HashStore

from spartito.collectives.calls import encode
from spartito.collectives.membership.store import KeyValues, Membership
from spartito.collectives.membership.torch_store import OfTorch
from spartito.collectives.sockets.links import HEAD, PART
from spartito.collectives.sockets.peers import RANK, connect_all
from spartito.collectives.sockets.tcp import SMALL, SocketCollective, slices
from spartito.errors import MismatchedCallsError, TaskLostError, UserError
from spartito.wire.addresses import DRAWN, Endpoint
from spartito.wire.secret import Key
from spartito.wire.streams import rest
from tests.callers import call, read_to_end
from tests.collectives.group import join, running
from tests.collectives.result_jobs import values
from tests.commands import free_port

LONG = 60.0  # a limit that no passing test comes near
NAMES = ["worker 0", "worker 1"]
HERE = Endpoint("worker 1", "127.0.0.1", (DRAWN,))


@given(st.integers(0, 10**9), st.integers(1, 99))
def test_slices_cover_everything_once_and_are_nearly_equal(numel: int, world_size: int) -> None:
    cut = slices(numel, world_size)
    assert len(cut) == world_size
    assert cut[0].start == 0
    assert cut[-1].stop == numel
    assert all(one.stop == other.start for one, other in pairwise(cut))
    sizes = [part.stop - part.start for part in cut]
    assert max(sizes) - min(sizes) <= 1


@given(st.lists(st.binary(min_size=1, max_size=9), max_size=6), st.data())
def test_the_rest_is_all_behind_what_is_done(parts: list[bytes], data: st.DataObject) -> None:
    whole = b"".join(parts)
    count = data.draw(st.integers(0, len(whole)))
    left = rest([memoryview(part) for part in parts], count)
    assert b"".join(left) == whole[count:]
    assert all(left)  # nothing empty, for which a system call would wait


def test_uneven_slices_around_the_limit_of_small_tensors() -> None:
    port = free_port()
    with running() as group:
        for rank in range(3):
            group.start(rank, odd_sums, 3, port)
        first, *others = [group.result(rank, LONG) for rank in range(3)]
        assert first[0] == []
        for other in others:
            assert other[0] == []
            for one, same in zip(first[1], other[1], strict=True):
                assert torch.equal(one, same)


def odd_sums(_: Connection, rank: int, world_size: int, port: int) -> Any:
    """The sizes whose sums are wrong, and sums whose last bits depend on the order."""
    group = join(rank, world_size, port, LONG, "sockets")
    wrong: list[str] = []
    sums: list[torch.Tensor] = []
    noise = torch.Generator().manual_seed(rank)
    for dtype in (torch.float64, torch.bfloat16, torch.int16):
        edge = SMALL // (world_size - 1) // dtype.itemsize
        for numel in (0, 1, 2, edge - 1, edge, edge + 1, edge + 2, 3 * edge + 1):
            mine, beside = values(rank, numel, dtype), torch.full((2,), float(rank))
            group.reduce_all(mine, beside)
            everyone = [values(other, numel, dtype) for other in range(world_size)]
            if not torch.equal(mine, sum(everyone[1:], everyone[0])) or beside[1] != 3.0:
                wrong.append(f"{numel} of {dtype}")
            if dtype.is_floating_point:
                sums.append(group.all_reduce(torch.randn(numel, generator=noise).to(dtype)))
    group.close()
    return wrong, sums


def half_a_transfer(pipe: Connection, rank: int, port: int, victim: int) -> Any:
    """All but the victim reduce; that one sends some of its part, and ends."""
    group = join(rank, 3, port, LONG, "sockets")
    assert isinstance(group, SocketCollective)
    pipe.send("together")
    pipe.recv()
    word = encode("all_reduce", 1 << 20, torch.float32)
    if rank == victim:
        step = group._connections._step + 1
        for peer, link in group._connections._links.items():
            part = slices(1 << 20, 3)[peer]
            head = HEAD.pack(PART, step, 0, word, 4 * (part.stop - part.start))
            link._connection.sendall(head + b"\x00" * 1000)
        os._exit(1)
    try:
        group.all_reduce(torch.ones(1 << 20))
    except TaskLostError as error:
        return str(error)
    finally:
        group.close()
    return "met"


@pytest.mark.parametrize("victim", [1, 2])
def test_who_ends_in_the_middle_of_a_transfer_is_named(victim: int) -> None:
    port = free_port()
    with running() as group:
        for rank in range(3):
            group.start(rank, half_a_transfer, port, victim)
        assert [group.result(rank) for rank in range(3)] == ["together"] * 3
        for rank in range(3):
            group.tell(rank)
        for rank in {0, 1, 2} - {victim}:
            assert f"worker {victim} is gone: " in group.result(rank)


@pytest.mark.parametrize("unread", [b"", b"some"])
def test_a_peer_that_left_because_of_another_call_is_no_loss(unread: bytes) -> None:
    """``unread`` is what the peer did not read, for which the system resets its connection."""
    store = OfTorch(HashStore())
    with ThreadPoolExecutor() as pool:
        peer, late = pool.map(lambda rank: SocketCollective(_member(rank, store), HERE), range(2))
    late._connections._links[0]._connection.sendall(unread)
    step = peer._connections._step + 1
    peer._connections._links[1].push(PART, step, 0, encode("barrier", 0, None), [], 0)
    peer.close()
    with pytest.raises(MismatchedCallsError, match="worker 0 is at barrier, worker 1 at all_red"):
        late.all_reduce(torch.ones(3))


def _member(rank: int, store: KeyValues) -> Membership:
    return Membership(rank, NAMES, store, LONG)


def test_unknown_peers_at_the_port_are_disconnected() -> None:
    """We are worker 0; before our hello come those who say something else, or nothing."""
    store = OfTorch(HashStore())
    key = Key(b"the secret of this job")
    with ThreadPoolExecutor() as pool:
        meeting = pool.submit(connect_all, Membership(1, NAMES, store, LONG), HERE, key)
        store.set("0", b"nowhere")  # nobody calls the first rank
        _, text, word = store.get("1").decode().split()
        port, purpose = int(text), f"sockets 0 {word}"
        silent = socket.create_connection(("127.0.0.1", port), LONG)
        with pytest.raises(UserError, match="does not know the secret"):
            call(port, purpose)  # has read the store
        with pytest.raises(UserError, match="does not know the secret"):
            call(port, "sockets 0 00", key)  # is of another meeting
        with socket.create_connection(("127.0.0.1", port), LONG) as other:
            other.sendall(b"GET / HTTP/1.1\r\n\r\n and more")
            assert read_to_end(other) == b""
        for rank in (1, 2):  # knows the secret, but is nobody that is missing
            with call(port, purpose, key) as wrong:
                wrong.sendall(RANK.pack(rank))
                assert read_to_end(wrong) == b""
        with call(port, purpose, key) as ours:
            ours.sendall(RANK.pack(0)[:3])
            ours.sendall(RANK.pack(0)[3:])
            (theirs,) = meeting.result(LONG).values()
            with theirs, silent:
                assert read_to_end(silent) == b""
                ours.sendall(b"here")
                theirs.settimeout(LONG)
                assert theirs.recv(4) == b"here"


def test_who_does_not_call_is_named() -> None:
    store = OfTorch(HashStore())
    with pytest.raises(TaskLostError, match=r"worker 0 did not come within 0\.1 s"):
        connect_all(Membership(1, NAMES, store, 0.1), HERE)
    store.set("0", b"nowhere")  # it has come to the store, and goes no further
    missing = r"worker 0 did not reach 127\.0\.0\.1:\d+ within 0\.1 s"
    with pytest.raises(TaskLostError, match=missing):
        connect_all(Membership(1, NAMES, store, 0.1), HERE)


def test_a_task_that_is_gone_when_it_is_called_is_named() -> None:
    store, port = OfTorch(HashStore()), free_port()
    store.set("1", f"127.0.0.1 {port} {bytes(16).hex()}".encode())
    with pytest.raises(TaskLostError, match=rf"worker 1 did not come to 127\.0\.0\.1:{port}"):
        connect_all(Membership(0, NAMES, store, 0.1), HERE)
