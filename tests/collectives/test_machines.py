"""Two machines, as network namespaces with memory of their own, train as one device does."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from spartito.launch.lines.network import Machine, NoNamespacesError, network
from spartito.notes import logger
from spartito.wire.addresses import Endpoint
from spartito.wire.listening import listen
from tests.collectives import jobs
from tests.collectives.group import Group, running
from tests.commands import SPARTITO, Commands, Program, commands_in, tf_config
from tests.skips import need, skip

pytestmark = pytest.mark.slow

EXACT = 1e-12
LONG = 60.0  # a limit that no passing test comes near
SHORT = 3.0  # one that lost machines let pass; all have met by then
PORT = 29511
SCRIPT = """
import json, os, sys
import torch
from torch import nn
import spartito as sp

out, epochs = sys.argv[1], int(sys.argv[2])
strategy = sp.strategy()
torch.manual_seed(3)
net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3)).double()
x = torch.randn(50, 6, generator=torch.Generator().manual_seed(7), dtype=torch.float64)


class Tell(sp.Callback):
    def on_epoch_end(self, epoch, logs):
        if epoch == 1:
            print("under way", os.getpid(), flush=True)


trainer = sp.Trainer(
    net,
    optimizer=torch.optim.Adam(net.parameters(), 0.02),
    loss=nn.CrossEntropyLoss(),
    strategy=strategy,
    deterministic=True,
)
train = sp.data.arrays(x, (x[:, 0] > 0).long()).shuffle().batch(8)
history = trainer.fit(train, epochs=epochs, callbacks=[Tell()], verbose=0)
result = {
    "loss": history.history["loss"],
    "weights": [parameter.detach().flatten().tolist() for parameter in net.parameters()],
    "collective": type(strategy.engine.groups.world).__name__,
}
with open(f"{out}-{strategy.cluster.rank}.json", "w") as file:
    json.dump(result, file)
"""


@pytest.fixture
def commands(tmp_path: Path) -> Iterator[Commands]:
    """Programs that start in the test's directory."""
    with commands_in(tmp_path) as started:
        started.write("train.py", SCRIPT)
        yield started


@pytest.fixture
def machines() -> Iterator[list[Machine]]:
    """Two of them."""
    need("netns")
    try:
        with network("alpha", "beta") as made:
            yield made
    except NoNamespacesError as error:
        skip("netns", error)


@pytest.fixture
def debian(commands: Commands) -> Iterator[list[Machine]]:
    """Two to which their own names mean the loopback, and without a way to anywhere else."""
    need("netns")
    try:
        with network("alpha", "beta", own_name="127.0.1.1") as made:
            for machine in made:
                assert (
                    commands.start(*machine.enters, "ip", "route", "del", "default").end().code == 0
                )
            yield made
    except NoNamespacesError as error:
        skip("netns", error)


def start(commands: Commands, machines: list[Machine], out: str, epochs: int = 3) -> list[Program]:
    """A launcher on each machine for two replicas."""
    there = f"{machines[0].address}:{PORT}"
    job = ["run", "--strategy", "multi_worker_mirrored", "--nnodes", str(len(machines))]
    return [
        commands.start(
            *machine.enters, *SPARTITO, *job, "--master-addr", there, "--node-rank", str(number),
            "--workers", "2", "train.py", out, str(epochs),
            env={"SPARTITO_TIMEOUT": "120"},
        )
        for number, machine in enumerate(machines)
    ]  # fmt: skip


def together(group: Group, machines: list[Machine], limit: float) -> None:
    """Start two ranks on each machine, and return when all have met once."""
    for rank in range(4):
        group.start(rank, jobs.wait_on_machines, machines, PORT, limit)
    for rank in range(4):
        assert group.result(rank) == "together"


def result(commands: Commands, out: str, rank: int) -> dict[str, object]:
    found: dict[str, object] = json.loads((commands.directory / f"{out}-{rank}.json").read_text())
    return found


def numbers(found: dict[str, object]) -> list[float]:
    """All losses and weights in a row."""
    losses, weights = found["loss"], found["weights"]
    assert isinstance(losses, list)
    assert isinstance(weights, list)
    return [*losses, *(value for row in weights for value in row)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The numbers of one device."""
    with commands_in(tmp_path_factory.mktemp("alone")) as commands:
        commands.write("train.py", SCRIPT)
        ended = commands.python("train.py", "alone", "3")
        assert ended.code == 0, ended.text
        return numbers(result(commands, "alone", 0))


def test_two_machines_equal_one_device(
    commands: Commands, machines: list[Machine], alone: list[float]
) -> None:
    for ended in [program.end() for program in start(commands, machines, "machines")]:
        assert ended.code == 0, ended.text
    for rank in range(4):
        found = result(commands, "machines", rank)
        assert found["collective"] == "HierarchicalCollective"
        assert numbers(found) == pytest.approx(alone, rel=0, abs=EXACT)


def test_all_machines_name_the_one_that_was_killed(machines: list[Machine]) -> None:
    with running() as group:
        together(group, machines, LONG)
        for rank in range(3):
            group.tell(rank)
        group.signal(3, signal.SIGKILL)
        for rank in range(3):
            kind, text, _ = group.result(rank)
            assert kind == "TaskLostError"
            assert "worker 3 is gone" in text


def test_launchers_give_time_to_name_the_one_that_was_killed(
    commands: Commands, machines: list[Machine]
) -> None:
    programs = start(commands, machines, "never", epochs=1_000_000)
    pid = int(programs[1].wait_for(r"worker 3\] under way (\d+)")[1])
    os.kill(pid, signal.SIGKILL)
    here, there = (program.end() for program in programs)
    assert (here.code, there.code) == (69, 69)
    assert "spartito: error: worker 3 is gone" in here.err
    assert "worker 3 was killed by SIGKILL" in there.err


def test_all_machines_name_the_one_that_is_frozen(machines: list[Machine]) -> None:
    with running() as group:
        together(group, machines, SHORT)
        group.signal(3, signal.SIGSTOP)
        for rank in range(3):
            group.tell(rank)
        for rank in range(3):
            kind, text, _ = group.result(rank)
            assert kind == "TaskLostError"
            assert "worker 3 did not come within 3 s; its process lives" in text


def test_each_machine_names_the_other_one_when_the_network_is_cut(
    machines: list[Machine],
) -> None:
    with running() as group:
        together(group, machines, SHORT)
        machines[1].cut()
        for rank in range(4):
            group.tell(rank)
        for rank in range(4):
            kind, text, _ = group.result(rank)
            assert kind == "TaskLostError"
            assert text.startswith(f"worker {0 if rank > 1 else 2} ")


def test_the_own_address_is_on_the_way_to_another_task(
    commands: Commands, debian: list[Machine]
) -> None:
    asks = (
        "from spartito.wire.interfaces import own_address\n"
        "print(own_address('alpha', 29500), own_address('alpha', 29500, ['alpha', 'beta']))"
    )
    ended = commands.start(*debian[0].enters, sys.executable, "-c", asks).end()
    assert ended.out.split() == ["127.0.0.1", debian[0].address], ended.text


def test_machines_meet_by_names_that_mean_the_loopback(
    commands: Commands, debian: list[Machine], alone: list[float]
) -> None:
    cluster = {"worker": [f"{machine.name}:{PORT}" for machine in debian]}
    programs = [
        commands.start(
            *machine.enters, sys.executable, "train.py", "named", "3",
            env={**tf_config(cluster, "worker", index), "SPARTITO_TIMEOUT": "120"},
        )
        for index, machine in enumerate(debian)
    ]  # fmt: skip
    for program in programs:
        ended = program.end()
        assert ended.code == 0, ended.text
    for rank in range(2):
        found = result(commands, "named", rank)
        assert found["collective"] == "SocketCollective"
        assert numbers(found) == pytest.approx(alone, rel=0, abs=EXACT)


def test_one_machine_alone_does_not_listen_everywhere(
    commands: Commands, debian: list[Machine]
) -> None:
    there = f"{debian[0].name}:{PORT}"
    job = ["run", "--workers", "2", "--master-addr", there, "train.py", "single", "2"]
    ended = commands.start(*debian[0].enters, *SPARTITO, *job).end()
    assert ended.code == 0, ended.text
    assert "listens on all" not in ended.err


def test_a_machine_finds_itself_by_its_address(commands: Commands, debian: list[Machine]) -> None:
    addresses = [f"{machine.address}:{PORT}" for machine in debian]
    commands.write("cluster.yaml", json.dumps({"worker": addresses}))
    asks = "from spartito.cluster import resolve; print(resolve().task)"
    for index, machine in enumerate(debian):
        started = commands.start(
            *machine.enters, sys.executable, "-c", asks, env={"SPARTITO_CLUSTER": "cluster.yaml"}
        )
        ended = started.end()
        assert ended.out == f"worker {index}\n", ended.text


def listen_by_a_name(pipe: Connection, rank: int, here: Machine, name: str) -> int:
    """Listen at an own name that the test makes known once we have looked for it in vain."""

    class Told(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            pipe.send(record.getMessage())

    jobs.enter(here)
    logger.addHandler(Told())
    logger.setLevel(logging.INFO)
    with listen(Endpoint("worker 0", name, (PORT,)), LONG) as listener:
        return int(listener.getsockname()[1])


def test_an_own_name_that_is_not_known_yet_is_waited_for(machines: list[Machine]) -> None:
    here = machines[0]
    with running() as group:
        group.start(0, listen_by_a_name, here, "train-0.train")
        assert group.result(0) == "worker 0 asks for its own name train-0.train until it is known"
        here.make_known("train-0.train")
        assert group.result(0) == PORT
