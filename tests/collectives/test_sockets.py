"""Tasks listen on their own address only, and wait for one that is late, but not for ever."""

from __future__ import annotations

import logging
import socket
import threading

import pytest

from spartito.cluster.ports import free_port
from spartito.collectives.sockets import dial, listen
from spartito.errors import TaskLostError, UserError

LONG = 60.0
ELSEWHERE = "192.0.2.1"  # an address for documentation: no machine has it


def test_a_task_listens_on_its_own_address_and_is_reached_there() -> None:
    with listen("127.0.0.1", 0, "ps 0", anywhere=False) as listener:
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
    with listen("127.0.0.1", port, "ps 0", anywhere=False) as listener:
        listener.settimeout(LONG)
        listener.accept()[0].close()
        dialling.join(LONG)
    (connection,) = found
    connection.close()


def test_a_task_that_does_not_come_is_named() -> None:
    port = free_port()
    with pytest.raises(TaskLostError, match=f"ps 1 did not come to 127.0.0.1:{port} within 0.1 s"):
        dial("127.0.0.1", port, "ps 1", 0.1)


def test_a_port_that_is_taken_is_named() -> None:
    with listen("127.0.0.1", 0, "ps 0", anywhere=False) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(UserError, match=f"ps 1 cannot listen on 127.0.0.1:{port}"):
            listen("127.0.0.1", port, "ps 1", anywhere=True)


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(UserError, match=f"{ELSEWHERE} is no address of this machine"):
        listen(ELSEWHERE, 0, "ps 0", anywhere=False)


def test_an_address_of_another_machine_is_all_interfaces_if_that_is_wanted(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), listen(ELSEWHERE, 0, "ps 0", anywhere=True) as listener:
        assert listener.getsockname()[0] == "0.0.0.0"
    said = capsys.readouterr().err + caplog.text
    assert f"{ELSEWHERE} is no address of this machine: ps 0 listens on all of them" in said


def test_a_name_that_cannot_be_resolved_is_named() -> None:
    with pytest.raises(UserError, match=r"ps 0 cannot resolve its own address 'no\.such\.invalid'"):
        listen("no.such.invalid", 0, "ps 0", anywhere=True)
