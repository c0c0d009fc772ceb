"""Programs with parameter servers, as users start them, that fail or are killed."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from pathlib import Path

import pytest

from tests.commands import SPARTITO, addresses, cluster_of, commands_in, tf_config
from tests.strategies.test_parameter_server_faults import LOST

OWN_LOOP = """
import torch
import spartito as sp
strategy = sp.strategy()
net = torch.nn.Linear(4, 3)
def train():
    model, optimizer = strategy.prepare(net, torch.optim.SGD(net.parameters(), 0.1))
    data = sp.data.arrays(torch.randn(64, 4), torch.arange(64) % 3).batch(8)
    batches = strategy.distribute(data)
    for _ in range(10_000):
        for batch in batches:
            losses = torch.nn.functional.cross_entropy(model(batch.x), batch.y, reduction="none")
            strategy.backward(losses, batch)
            strategy.update(optimizer)
            if str(strategy.task) == "worker 1":
                raise ValueError("no such class")
if strategy.task.type == "ps":
    try:
        train()
    except:
        pass
    print("runs on", flush=True)
else:
    train()
"""


@pytest.mark.slow
def test_a_loop_of_ones_own_that_raises_is_told_and_a_server_never_runs_on(tmp_path: Path) -> None:
    with commands_in(tmp_path) as commands:
        script = commands.write("train.py", OWN_LOOP)
        cluster = cluster_of(worker=2, ps=1)
        tasks = [("worker", 0), ("worker", 1), ("ps", 0)]
        programs = [
            commands.start(sys.executable, script, env=tf_config(cluster, *task), forks=True)
            for task in tasks
        ]
        chief, worker, server = [program.end() for program in programs]
        assert (chief.code, worker.code, server.code) == (LOST, 1, 0), chief.text
        assert "error: worker 1 failed: ValueError: no such class" in chief.err
        assert "runs on" not in server.text


def test_a_server_without_a_chief_ends_whatever_its_script_catches(tmp_path: Path) -> None:
    with commands_in(tmp_path) as commands:
        script = commands.write("train.py", OWN_LOOP)
        cluster = cluster_of(worker=2, ps=1)
        env = {**tf_config(cluster, "ps", 0), "SPARTITO_TIMEOUT": "1"}
        ended = commands.start(sys.executable, script, env=env, forks=True).end()
        assert ended.code == LOST, ended.text
        assert "error: worker 0 " in ended.err
        assert "runs on" not in ended.text


# As users start it


SCRIPT = """
import os, time, torch
import spartito as sp
strategy = sp.strategy(
    servers={"push_log": "pushes", "min_shard_bytes": 16, "snapshot_seconds": 1000}
)
with strategy.scope():
    torch.manual_seed(0)
    net = torch.nn.Linear(4, 3)
    optimizer = torch.optim.Adam(net.parameters())
with open(f"process of {strategy.task}", "w") as file:
    file.write(str(os.getpid()))
class Watch(sp.Callback):
    def on_train_batch_end(self, batch, logs):
        if self.trainer.step >= 100 and not os.path.exists("go"):
            print("step 100", flush=True)
            while not os.path.exists("go"):
                time.sleep(0.01)
x, y = torch.randn(1024, 4), torch.arange(1024) % 3
trainer = sp.Trainer(net, optimizer=optimizer, loss=torch.nn.CrossEntropyLoss(), strategy=strategy)
trainer.fit((x, y), epochs=4, batch_size=8, callbacks=[Watch()], verbose=0)
print("end of", strategy.task, flush=True)
"""


@pytest.mark.slow
def test_the_launcher_starts_a_killed_server_again(tmp_path: Path) -> None:
    with commands_in(tmp_path) as commands:
        script = commands.write("train.py", SCRIPT)
        words = ("run", "--strategy", "parameter_server", "--workers", "2", "--ps", "2")
        program = commands.start(
            *SPARTITO,
            *words,
            script,
            env={"SPARTITO_TIMEOUT": "120", "SPARTITO_RUN_DIR": str(tmp_path / "run")},
        )
        program.wait_for("step 100")
        os.kill(int((tmp_path / "process of ps 1").read_text()), signal.SIGKILL)
        commands.write("go", "")  # the chief waits for it
        ended = program.end()
        assert ended.code == 0, ended.text
        assert "is started again" in ended.text
        assert "work items are done again" in ended.text
        record = json.loads((tmp_path / "run" / "tasks" / "ps-1.json").read_text())
        assert record["work_items"] == 4 * 128 * 2
        assert record["examples"] == 4 * 1024
        assert record["lost"] > 0


FINAL = """
class Final(sp.Callback):
    def on_epoch_end(self, epoch, logs):
        if epoch == 3:
            before = [p.clone() for p in net.parameters()]
            print("settled", flush=True)
            while not os.path.exists("go"):
                time.sleep(0.01)
            served = strategy.state_dict()["model"]
            print("equal", all(map(torch.equal, before, served.values())), flush=True)
"""


@pytest.mark.slow
def test_a_server_that_dies_after_the_last_epoch_has_lost_nothing(tmp_path: Path) -> None:
    """Nobody would compute it again: the workers ask for no work any more."""
    with commands_in(tmp_path) as commands:
        text = SCRIPT.replace("x, y =", FINAL + "x, y =").replace("Watch()", "Final()")
        script = commands.write("train.py", text)
        words = ("run", "--strategy", "parameter_server", "--workers", "2", "--ps", "1")
        program = commands.start(*SPARTITO, *words, script, env={"SPARTITO_TIMEOUT": "120"})
        program.wait_for("settled")
        os.kill(int((tmp_path / "process of ps 0").read_text()), signal.SIGKILL)
        commands.write("go", "")
        ended = program.end()
        assert ended.code == 0, ended.text
        assert "is started again" in ended.text
        assert "equal True" in ended.text
        assert "work items are done again" not in ended.text


@pytest.mark.slow
def test_a_chief_that_is_interrupted_can_still_fetch_the_values(tmp_path: Path) -> None:
    """Ctrl-C comes to all tasks; the servers serve until the chief has ended."""
    with commands_in(tmp_path) as commands:
        fit = SCRIPT.index("trainer.fit")
        lines = SCRIPT[fit:].replace("epochs=4", "epochs=4000").splitlines()
        save = "except KeyboardInterrupt:\n    strategy.state_dict(); print('saved'); raise\n"
        text = f"{SCRIPT[:fit]}try:\n    {lines[0]}\n{save}"
        script = commands.write("train.py", text)
        words = ("run", "--strategy", "parameter_server", "--workers", "2", "--ps", "1")
        program = commands.start(*SPARTITO, *words, script, env={"SPARTITO_TIMEOUT": "120"})
        program.wait_for("step 100")
        commands.write("go", "")
        program.send(signal.SIGINT)
        ended = program.end()
        assert ended.code == 128 + signal.SIGINT, ended.text
        assert "saved" in ended.text
        assert "Traceback" not in ended.text


@pytest.mark.slow
def test_a_port_that_is_taken_is_said(tmp_path: Path) -> None:
    with socket.socket() as taken, commands_in(tmp_path) as commands:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        cluster = {"worker": addresses(1), "ps": [f"127.0.0.1:{port}"]}
        script = commands.write("train.py", SCRIPT)
        env = tf_config(cluster, "ps", 0)
        ended = commands.start(sys.executable, script, env=env, forks=True).end()
        assert ended.code == 2
        assert f"ps 0 cannot listen on 127.0.0.1:{port}" in ended.err
        assert "Traceback" not in ended.err
