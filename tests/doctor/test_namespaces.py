"""Doctors on hosts of their own: network namespaces, with what goes wrong between hosts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from spartito.launch.lines.line import Link
from spartito.launch.lines.network import Machine, NoNamespacesError, network
from tests.commands import SPARTITO, Commands, Ended, Program, commands_in, tf_config
from tests.doctor.test_examination import SHORT, kinds, report, what
from tests.skips import need, skip

PORT = 21500
TOLD = {"SPARTITO_TIMEOUT": "60"}
PATIENT = 60.0
"""A limit that a loaded machine keeps; where all come it plays no part."""

Hosts = Callable[..., list[Machine]]


@pytest.fixture
def commands(tmp_path: Path) -> Iterator[Commands]:
    with commands_in(tmp_path) as started:
        yield started


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    """``hosts("a", "b")`` know each other by these names."""
    with ExitStack() as stack:

        def make(*names: str, own_name: str = "") -> list[Machine]:
            need("netns")
            try:
                return stack.enter_context(network(*names, own_name=own_name))
            except NoNamespacesError as error:
                skip("netns", error)

        yield make


def start(
    commands: Commands, hosts: Sequence[Machine], limit: float, secret: str = ""
) -> list[Program]:
    """A doctor on each host."""
    own = [f"{host.name}:{PORT}" for host in hosts]
    return [
        commands.start(
            *host.enters,
            *SPARTITO,
            "doctor",
            "--json",
            f"--timeout={limit}",
            env={**tf_config({"worker": own}, "worker", index), "SPARTITO_SECRET": secret},
        )
        for index, host in enumerate(hosts)
    ]


def examine(
    commands: Commands, hosts: Sequence[Machine], limit: float = PATIENT, secret: str = ""
) -> Ended:
    """What the first of them finds."""
    first, *others = start(commands, hosts, limit, secret)
    ended = first.end()
    for other in others:
        assert other.end().code == ended.code
    return ended


def test_hosts_that_reach_each_other(commands: Commands, hosts: Hosts) -> None:
    found = report(examine(commands, hosts("alpha", "beta")))
    assert found["exit_code"] == 0
    assert not kinds(found) & {"loopback", "name", "one way", "unreachable", "port"}
    facts = found["facts"]
    assert facts["worker 0"]["network"] != facts["worker 1"]["network"]
    assert {route["interface"] for route in facts["worker 1"]["routes"]} >= {"eth0"}


def test_a_way_that_is_open_in_one_direction_only(commands: Commands, hosts: Hosts) -> None:
    alpha, beta = hosts("alpha", "beta")
    beta.drop(alpha, PORT)
    found = report(examine(commands, [alpha, beta]))
    assert found["exit_code"] == 1
    assert "worker 1 reaches worker 0, but worker 0 does not reach worker 1" in what(
        found, "one way"
    )
    assert f"worker 0 finds at beta:{PORT}: no reply" in what(found, "one way")


@pytest.mark.slow
def test_one_that_does_not_reach_the_first_is_not_said_to_be_off(
    commands: Commands, hosts: Hosts
) -> None:
    alpha, beta = hosts("alpha", "beta")
    alpha.drop(beta, PORT)
    first, second = start(commands, [alpha, beta], SHORT)
    found, alone = report(first.end()), report(second.end())
    assert found["missing"] == ["worker 1"]
    assert alone["missing"] == ["worker 0"]
    assert "worker 0 reached it there, so it runs but does not reach worker 0" in what(
        found, "missing"
    )
    assert f"worker 1 finds at alpha:{PORT}: no reply to the connection" in what(alone, "missing")


def test_the_ways_of_a_slow_cable_are_marked(commands: Commands, hosts: Hosts) -> None:
    three = hosts("alpha", "beta", "gamma")
    three[2].slow_down(Link.read("1mbit"), both=False)  # far below what busy cores leave others
    found = report(examine(commands, three))
    slow = {(source, target) for source, target in found["slow"]}
    assert slow >= {("worker 2", "worker 0"), ("worker 2", "worker 1")}, found
    assert ("worker 0", "worker 1") not in slow
    assert "from worker 2 to worker 0 is far slower than its reverse" in what(found, "slow")


def test_a_direction_that_is_far_slower_than_its_reverse(commands: Commands, hosts: Hosts) -> None:
    alpha, beta = hosts("alpha", "beta")
    beta.slow_down(Link.read("1mbit"), both=False)
    found = report(examine(commands, [alpha, beta]))
    assert found["slow"] == [["worker 1", "worker 0"]]
    assert "from worker 1 to worker 0 is far slower than its reverse" in what(found, "slow")


@pytest.mark.parametrize("secret", ["", "a secret of sixteen characters or more"])
@pytest.mark.parametrize("direction", ["there", "back", "both"])
def test_a_line_that_drops_large_packets(
    commands: Commands, hosts: Hosts, direction: str, secret: str
) -> None:
    alpha, beta = hosts("alpha", "beta")
    lossy = {"there": [beta], "back": [alpha], "both": [alpha, beta]}[direction]
    for host in lossy:
        host.drop_large(1200)
    found = report(examine(commands, [alpha, beta], secret=secret))
    assert found["exit_code"] == 1
    assert found["missing"] == found["unresponsive"] == []
    said = what(found, "large messages")
    if secret:  # each proves itself to the other in large packets, so the way back matters too
        assert "small messages pass, those of 2 KiB do not" in said
        return
    if beta in lossy:
        assert "from worker 0 to worker 1 small messages pass, those of 2 KiB do not" in said
    if alpha in lossy:
        assert "from worker 1 to worker 0 small messages pass, those of 2 KiB do not" in said
    assert len(found["stuck"]) == len(lossy)


def test_an_own_name_that_means_the_loopback(commands: Commands, hosts: Hosts) -> None:
    found = report(examine(commands, hosts("alpha", "beta", own_name="127.0.1.1")))
    assert found["exit_code"] == 0
    for task, name in (("worker 0", "alpha"), ("worker 1", "beta")):
        said = f"{task} finds 127.0.1.1, a loopback address, for its own name {name}"
        assert said in what(found, "loopback")


@pytest.mark.slow
@pytest.mark.parametrize("servers", [0, 1])
def test_training_by_names_that_mean_the_loopback(
    commands: Commands, hosts: Hosts, servers: int
) -> None:
    alpha, beta = hosts("alpha", "beta", own_name="127.0.1.1")
    cluster = {"worker": [f"alpha:{PORT}", f"beta:{PORT}"], "ps": [f"beta:{PORT + 1}"] * servers}
    tasks = [(alpha, "worker", 0), (beta, "worker", 1), (beta, "ps", 0)][: 2 + servers]
    programs = [
        commands.start(
            *host.enters,
            *SPARTITO,
            *("train", "mnist", "--epochs=1", "--batch-size=500", "--out=run"),
            env={**tf_config(cluster, role, index), **TOLD},
        )
        for host, role, index in tasks
    ]
    ended = [program.end() for program in programs]
    assert [end.code for end in ended] == [0] * len(tasks), ended
    assert "alpha means 127.0.1.1 here: worker 0" in ended[0].err
    assert "did not come" not in ended[0].err
    if servers:
        assert "beta means 127.0.1.1 here: ps 0 listens on all interfaces" in ended[2].err
