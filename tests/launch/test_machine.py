from __future__ import annotations

import socket
from contextlib import ExitStack
from pathlib import Path

import pytest

from spartito.launch import machine
from spartito.launch.machine import BELOW_EPHEMERAL, free_port, free_ports, gpus


@pytest.mark.parametrize(
    ("visible", "count"),
    [(None, 3), ("", 0), ("0", 1), ("0,2", 2), ("-1", 0), ("1,-1,2", 1), ("GPU-4fa,GPU-5", 2)],
)
def test_gpus_are_those_that_the_driver_lists_and_we_may_see(
    tmp_path: Path, visible: str | None, count: int
) -> None:
    for name in "abc":
        (tmp_path / "driver/nvidia/gpus" / name).mkdir(parents=True)
    env = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert gpus(env, tmp_path) == count


def test_without_a_driver_there_are_no_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpus({"CUDA_VISIBLE_DEVICES": "0,1"}, tmp_path) == 0


def test_the_query_counts_gpus_not_their_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    query = tmp_path / "nvidia-smi"
    query.write_text("#!/bin/sh\necho 'GPU 0: X'\necho '  MIG 1g: Y'\necho 'GPU 1: X'\n")
    query.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpus({}, tmp_path) == 2


def test_a_free_port_can_be_taken() -> None:
    port = free_port()
    assert port in BELOW_EPHEMERAL
    with socket.socket() as server:
        server.bind(("127.0.0.1", port))


@pytest.mark.parametrize("few", [False, True])
def test_free_ports_differ_and_can_be_taken_at_once(
    few: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if few:  # then the system's own choice comes in
        monkeypatch.setattr(machine, "BELOW_EPHEMERAL", range(port := free_port(), port + 1))
    ports = free_ports(20)
    with ExitStack() as held:
        for port in ports:
            held.enter_context(socket.socket()).bind(("127.0.0.1", port))
    assert len(set(ports)) == 20
