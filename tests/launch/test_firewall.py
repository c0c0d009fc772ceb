"""Firewalls between hosts: where the doctor says that training can run it runs, and else not."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from spartito.launch.lines.network import Machine, NoNamespacesError, network
from tests.collectives.group import running
from tests.collectives.jobs import enter
from tests.commands import SPARTITO, Commands, commands_in, tf_config
from tests.doctor.test_examination import report, what
from tests.skips import need, skip

FIRST, LAST = 29500, 29509
"""The ports that the firewall of each host lets through."""

LIMIT = 3.0
"""Seconds after which a task gives up one that a firewall hides."""

SOCKETS = '{"communication": "sockets"}'
GLOO = '{"communication": "process_group"}'
HOLDS = "import signal, socket; s = socket.create_server(('', {})); print('up', flush=True); "
HOLDS += "signal.pause()"
pytestmark = pytest.mark.slow

Who = tuple[str, int]


@pytest.fixture
def commands(tmp_path: Path) -> Iterator[Commands]:
    with commands_in(tmp_path) as started:
        yield started


@pytest.fixture
def hosts() -> Iterator[list[Machine]]:
    """Two hosts whose firewalls let `FIRST` to `LAST` through."""
    need("netns")
    try:
        with network("alpha", "beta") as made:
            for host in made:
                host.open_only(FIRST, LAST)
            yield made
    except NoNamespacesError as error:
        skip("netns", error)


def train(_: Connection, rank: int, host: Machine, env: Mapping[str, str]) -> Any:
    """Train a small model as the task of ``env`` on ``host``; how many epochs that took."""
    enter(host)
    os.environ.update(env)
    import torch

    import spartito as sp

    x = torch.arange(24.0).reshape(12, 2)
    try:
        strategy = sp.strategy()
        net = torch.nn.Linear(2, 1)
        trainer = sp.Trainer(
            net,
            optimizer=torch.optim.SGD(net.parameters(), 1e-4),
            loss=torch.nn.MSELoss(),
            strategy=strategy,
        )
        history = trainer.fit(sp.data.arrays(x, x[:, :1]).batch(4), epochs=2, verbose=0)
        strategy.close()
        return len(history.history["loss"])
    except SystemExit as end:
        return f"server {end.code}"


class Job:
    """A job of one task on each machine, by its doctor and by its training."""

    def __init__(
        self,
        commands: Commands,
        cluster: Mapping[str, Sequence[str]],
        machines: Mapping[Who, Machine],
        **told: str,
    ) -> None:
        self.commands, self.machines = commands, machines
        self.env = {
            who: {**tf_config(cluster, *who), "SPARTITO_TIMEOUT": f"{LIMIT:g}", **told}
            for who in machines
        }

    def doctor(self, limit: float = 60.0) -> dict[str, Any]:
        """What the first task's doctor finds."""
        first, *others = [
            self.commands.start(
                *host.enters, *SPARTITO, "doctor", "--json", f"--timeout={limit}", env=self.env[who]
            )
            for who, host in self.machines.items()
        ]
        found = report(first.end())
        for other in others:
            other.end()
        return found

    def train(self) -> list[Any]:
        """How training ended on each task."""
        with running() as group:
            for number, (who, host) in enumerate(self.machines.items()):
                group.start(number, train, host, self.env[who])
            return [group.result(number) for number in range(len(self.machines))]


def workers(hosts: Sequence[Machine], ports: Sequence[int]) -> tuple[Any, Any]:
    """A cluster of a worker on each host at these ports, and who is where."""
    cluster = {"worker": [f"{h.name}:{p}" for h, p in zip(hosts, ports, strict=True)]}
    return cluster, {("worker", index): host for index, host in enumerate(hosts)}


def test_sockets_follow_the_declared_ports(commands: Commands, hosts: list[Machine]) -> None:
    job = Job(commands, *workers(hosts, [FIRST, FIRST + 1]))
    assert job.doctor()["exit_code"] == 0
    assert job.train() == [2, 2]


def test_sockets_at_a_closed_port(commands: Commands, hosts: list[Machine]) -> None:
    job = Job(commands, *workers(hosts, [FIRST, LAST + 1]))
    found = job.doctor()
    assert found["exit_code"] == 1
    where = f"beta:{LAST + 1}"
    assert f"worker 0 does not reach worker 1: worker 0 finds at {where}" in what(found, "one way")
    ended = job.train()
    assert [kind for kind, _ in ended] == ["TaskLostError"] * 2
    assert f"({where}) did not come within 3 s" in ended[0][1]
    assert f"did not reach {where} within 3 s" in ended[1][1]


def test_only_the_leaders_of_machines_need_a_way(commands: Commands, hosts: list[Machine]) -> None:
    ports = [FIRST, LAST + 1, FIRST, LAST + 1]
    four = [host for host in hosts for _ in range(2)]
    job = Job(commands, *workers(four, ports))
    found = job.doctor()
    assert found["exit_code"] == 0
    assert f"worker 0 finds at beta:{LAST + 1}" in what(found, "unused connection")
    assert job.train() == [2] * 4
    separate = Job(commands, *workers(four, ports), SPARTITO_STRATEGY_OPTIONS=SOCKETS)
    assert separate.doctor()["exit_code"] == 1
    assert {kind for kind, _ in separate.train()} == {"TaskLostError"}


def test_a_range_comes_before_the_declared_port(commands: Commands, hosts: list[Machine]) -> None:
    cluster, machines = workers(hosts, [FIRST, LAST + 1])
    job = Job(commands, cluster, machines, SPARTITO_PORTS=f"{FIRST + 4}-{FIRST + 5}")
    found = job.doctor()
    assert found["exit_code"] == 0
    assert found["facts"]["worker 1"]["port"]["number"] == FIRST + 4
    assert job.train() == [2, 2]


def test_a_program_at_the_declared_port(commands: Commands, hosts: list[Machine]) -> None:
    job = Job(commands, *workers(hosts, [FIRST, FIRST + 1]))
    program = HOLDS.format(FIRST + 1)
    held = commands.start(*hosts[1].enters, sys.executable, "-c", program)
    held.wait_for("up")
    found = job.doctor()
    assert f"port {FIRST + 1} of worker 1 on" in what(found, "port")
    assert found["exit_code"] == 1  # what the system draws the firewall keeps out
    assert {kind for kind, _ in job.train()} == {"TaskLostError"}
    for host in hosts:
        host.open_all()
    assert job.doctor()["exit_code"] == 0
    assert job.train() == [2, 2]
    held.kill()


def test_process_groups_need_what_the_system_draws(
    commands: Commands, hosts: list[Machine]
) -> None:
    cluster, machines = workers(hosts, [FIRST, FIRST + 1])
    job = Job(commands, cluster, machines, SPARTITO_STRATEGY_OPTIONS=GLOO)
    found = job.doctor()
    assert found["exit_code"] == 1
    assert "worker 0 and worker 1 do not reach each other" in what(found, "unreachable")
    ended = job.train()
    assert [kind for kind, _ in ended] == ["TaskLostError"] * 2
    assert re.search(r"worker 1 \(.*\) did not come to 10\.77\.0\.2:\d+ within 3 s", ended[0][1])
    assert re.search(r"worker 0 \(.*\) did not reach 10\.77\.0\.2:\d+ within 3 s", ended[1][1])
    allowed = {"SPARTITO_STRATEGY_OPTIONS": GLOO, "SPARTITO_PORTS": f"{FIRST + 1}-{LAST}"}
    job = Job(commands, cluster, machines, **allowed)
    assert "that the system draws from 32768" in what(job.doctor(), "port")
    assert {kind for kind, _ in job.train()} == {"UserError"}
    for host in hosts:
        host.draw_from(FIRST + 1, LAST)
    assert job.doctor()["exit_code"] == 0
    assert job.train() == [2, 2]


def test_servers_and_their_chief_at_their_declared_ports(
    commands: Commands, hosts: list[Machine]
) -> None:
    alpha, beta = hosts
    machines = {("worker", 0): alpha, ("worker", 1): beta, ("ps", 0): beta}
    cluster = {"worker": [f"alpha:{FIRST}", f"beta:{LAST + 1}"], "ps": [f"beta:{FIRST}"]}
    job = Job(commands, cluster, machines)
    found = job.doctor()
    assert found["exit_code"] == 0  # nobody calls a worker
    assert f"worker 0 finds at beta:{LAST + 1}" in what(found, "unused connection")
    assert job.train() == [2, 2, "server 0"]


def test_servers_need_no_way_to_the_chief(commands: Commands, hosts: list[Machine]) -> None:
    alpha, beta = hosts
    alpha.drop(beta, FIRST, first=True)
    machines = {("worker", 0): alpha, ("ps", 0): beta}
    job = Job(commands, {"worker": [f"alpha:{FIRST}"], "ps": [f"beta:{FIRST}"]}, machines)
    assert job.doctor(20.0)["exit_code"] == 0
    assert job.train() == [2, "server 0"]


def test_servers_at_a_closed_port(commands: Commands, hosts: list[Machine]) -> None:
    alpha, beta = hosts
    machines = {("worker", 0): alpha, ("worker", 1): beta, ("ps", 0): beta}
    cluster = {"worker": [f"alpha:{FIRST}", f"beta:{FIRST}"], "ps": [f"beta:{LAST + 1}"]}
    job = Job(commands, cluster, machines)
    found = job.doctor()
    assert found["exit_code"] == 1
    assert f"worker 0 does not reach ps 0: worker 0 finds at beta:{LAST + 1}" in what(
        found, "one way"
    )
    kind, text = job.train()[0]
    assert kind == "TaskLostError"
    assert f"(beta:{LAST + 1}) did not come" in text


def test_the_first_task_at_a_closed_port(commands: Commands, hosts: list[Machine]) -> None:
    job = Job(commands, *workers(hosts, [LAST + 1, FIRST]))
    assert job.doctor(6.0)["exit_code"] == 69
    ended = job.train()
    assert [kind for kind, _ in ended] == ["TaskLostError"] * 2
    assert f"(alpha:{LAST + 1}) did not come" in ended[1][1]


def test_an_interface_is_chosen(commands: Commands, hosts: list[Machine]) -> None:
    for host, address in zip(hosts, ("10.78.0.1", "10.78.0.2"), strict=True):
        host.add_address("second", f"{address}/24")
    job = Job(commands, *workers(hosts, [FIRST, FIRST + 1]), SPARTITO_INTERFACE="second")
    found = job.doctor()
    assert found["exit_code"] == 0
    probed = {p["target"]: p["address"] for p in found["probes"]}
    assert probed["worker 1"] == f"10.78.0.2:{FIRST + 1}"
    assert job.train() == [2, 2]
