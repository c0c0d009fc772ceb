from __future__ import annotations

import random
import socket
from contextlib import ExitStack

import pytest

from spartito.errors import UserError
from spartito.wire import ports as module
from spartito.wire.addresses import Endpoint
from spartito.wire.listening import listen
from spartito.wire.ports import BELOW_EPHEMERAL, free_port, free_ports

HOST = "127.77.0.1"
"""An address of the loopback that nobody else calls from: what is free there stays free."""


def test_a_free_port_can_be_taken() -> None:
    port = free_port(HOST)
    assert port in BELOW_EPHEMERAL
    with socket.socket() as server:
        server.bind((HOST, port))


@pytest.mark.parametrize("few", [False, True])
def test_free_ports_differ_and_can_be_taken_at_once(
    few: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if few:  # then the system's own choice comes in
        monkeypatch.setattr(module, "BELOW_EPHEMERAL", range(port := free_port(HOST), port + 1))
    ports = free_ports(20, HOST)
    with ExitStack() as held:
        for port in ports:
            held.enter_context(socket.socket()).bind((HOST, port))
    assert len(set(ports)) == 20


def test_a_seed_says_nothing_about_ports() -> None:
    """Else two programs of one seed, or two runs of a property test, would want the same."""
    drawn = []
    for _ in range(2):
        random.seed(0)
        drawn.append(free_ports(5, HOST))
    assert drawn[0] != drawn[1]


def test_a_port_that_is_held_is_for_our_tasks_alone() -> None:
    first = free_port(HOST)
    with ExitStack() as held:
        assert free_port(HOST, [first], held) == first
        with pytest.raises(UserError, match="0 of the ports"):
            free_port(HOST, [first])
        for _ in range(2):  # the task, and the one that is started instead
            with listen(Endpoint("ps 0", HOST, (first,)), 30.0) as listener:
                assert listener.getsockname()[1] == first
    assert free_port(HOST, [first]) == first
