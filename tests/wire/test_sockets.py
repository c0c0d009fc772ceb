"""Tasks listen on their own address only, and wait for one that is late, but not for ever."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from typing import Any

import pytest
import torch.distributed as dist

from spartito.errors import TaskLostError, UserError
from spartito.wire import dialing as sockets
from spartito.wire.addresses import DRAWN, Endpoint
from spartito.wire.dialing import dial
from spartito.wire.listening import listen, open_listener
from tests.commands import free_port

LONG = 60.0
ELSEWHERE = "192.0.2.1"  # an address for documentation: no machine has it


def test_a_task_listens_on_its_own_address_and_is_reached_there() -> None:
    with listen(Endpoint("ps 0", "127.0.0.1", (DRAWN,)), LONG) as listener:
        host, port = listener.getsockname()
        assert host == "127.0.0.1"
        with dial(host, port, "ps 0", LONG) as near, listener.accept()[0] as far:
            assert near.gettimeout() is None
            assert near.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            near.sendall(b"hello")
            assert far.recv(5) == b"hello"


def test_a_task_that_comes_late_is_waited_for() -> None:
    port = free_port()
    found: list[socket.socket] = []
    dialling = threading.Thread(
        target=lambda: found.append(dial("127.0.0.1", port, "ps 0", LONG)), daemon=True
    )
    dialling.start()
    with listen(Endpoint("ps 0", "127.0.0.1", (port,)), LONG) as listener:
        listener.settimeout(LONG)
        listener.accept()[0].close()
        dialling.join(LONG)
    (connection,) = found
    connection.close()


def test_a_name_that_comes_to_mean_another_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a task was, packets vanish: it is looked for anew, as its name may tell."""
    port, known, asked = free_port(), socket.getaddrinfo, ["127.0.0.2"]

    def moves(_: object, *rest: Any, **more: Any) -> Any:
        return known(asked.pop() if asked else "127.0.0.1", *rest, **more)

    monkeypatch.setattr(sockets, "ATTEMPT_SECONDS", 0.1)
    with (
        listen(Endpoint("ps 0", "127.0.0.1", (port,)), LONG),
        socket.create_server(("127.0.0.2", port), backlog=0),
        contextlib.ExitStack() as full,
    ):
        for _ in range(4):  # more than wait to be accepted; the next one hears nothing
            caller = full.enter_context(socket.socket())
            caller.setblocking(False)
            caller.connect_ex(("127.0.0.2", port))
        monkeypatch.setattr(socket, "getaddrinfo", moves)
        with dial("ps-0.job", port, "ps 0", 1.9) as found:
            assert found.getpeername()[0] == "127.0.0.1"
    assert not asked


def test_a_task_that_does_not_come_is_named() -> None:
    port = free_port()
    with pytest.raises(TaskLostError, match=f"ps 1 did not come to 127.0.0.1:{port} within 0.1 s"):
        dial("127.0.0.1", port, "ps 1", 0.1)


def test_a_port_that_is_taken_is_named() -> None:
    with listen(Endpoint("ps 0", "127.0.0.1", (DRAWN,)), LONG) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(UserError, match=f"ps 1 cannot listen on 127.0.0.1:{port}"):
            listen(Endpoint("ps 1", "127.0.0.1", (port,)), LONG)


def test_a_group_of_the_scripts_own_may_have_the_port() -> None:
    with listen(Endpoint("ps 0", "127.0.0.1", (DRAWN,)), LONG) as listener:
        port = listener.getsockname()[1]
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            with pytest.raises(UserError, match=r"own torch.distributed.init_process_group\(\)"):
                listen(Endpoint("ps 1", "127.0.0.1", (port,)), LONG)
        finally:
            dist.destroy_process_group()


def test_an_address_of_another_machine_is_all_interfaces(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with (
        caplog.at_level(logging.WARNING),
        listen(Endpoint("ps 0", ELSEWHERE, (DRAWN,)), LONG) as listener,
    ):
        assert listener.getsockname()[0] == "0.0.0.0"
    said = capsys.readouterr().err + caplog.text
    assert f"{ELSEWHERE} is no address of this machine: ps 0 listens on all interfaces" in said


def test_a_name_that_cannot_be_resolved_is_named() -> None:
    with pytest.raises(UserError, match=r"ps 0 cannot resolve its own address 'no\.such\.invalid'"):
        listen(Endpoint("ps 0", "no.such.invalid", (DRAWN,)), 0.1)


def test_a_declared_port_that_is_taken_gives_way_to_one_that_is_drawn() -> None:
    with listen(Endpoint("worker 1", "127.0.0.1", (DRAWN,)), LONG) as held:
        port = held.getsockname()[1]
        opened = open_listener(Endpoint("worker 1", "127.0.0.1", (port, DRAWN)), LONG)
        with opened.listener:
            assert opened.drawn
            assert opened.port != port
            assert f"port {port} of worker 1 is taken" in opened.remarks[0]


def test_a_range_of_which_all_are_taken_is_named() -> None:
    with listen(Endpoint("worker 1", "127.0.0.1", (DRAWN,)), LONG) as held:
        port = held.getsockname()[1]
        with pytest.raises(UserError, match=f"none of the ports {port}-{port} is free"):
            listen(Endpoint("worker 1", "127.0.0.1", (port, port)), LONG)
