"""What tasks say of themselves in the run folder, and how ``spartito top`` shows it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
import urllib.request
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from spartito.cli import main
from spartito.cli.top import metrics, record
from spartito.names import FOR_DATA, FOR_TASKS, RATE
from spartito.status import Status, statuses
from tests.commands import Commands, commands_in, free_port

CONFIG = {"fit": {"batch_size": 64}, "cluster": {"replicas": 2}}
NOW = time.time()  # of the collection: a suite may take long after it
LATER = NOW + 10**6
WORKER = Status("worker 0", 11, NOW - 60, LATER, "step", 1200, 50.0, 0.25, 0.1, 300_000_000)
SERVER = replace(WORKER, task="ps 0", phase="serve", steps_per_second=0.0, staleness=0.75)


def write(run: Path, *found: Status) -> None:
    (run / "tasks").mkdir(exist_ok=True)
    (run / "config.json").write_text(json.dumps(CONFIG))
    for one in found:
        name = one.task.replace(" ", "-")
        (run / "tasks" / f"{name}.now").write_text(json.dumps(asdict(one)))


def test_tasks_are_in_order_and_those_of_an_earlier_run_are_left_out(tmp_path: Path) -> None:
    other = replace(WORKER, task="worker 10")
    earlier = replace(WORKER, task="worker 2", time=WORKER.began - 1)
    again = replace(WORKER, task="worker 1", began=LATER + 1, time=LATER + 2)  # started again
    write(tmp_path, SERVER, other, WORKER, earlier, again)
    (tmp_path / "tasks" / "worker-3.now").write_text("{half")
    assert [one.task for one in statuses(tmp_path)] == [
        *("worker 0", "worker 1", "worker 10", "ps 0")
    ]


def test_the_figures_of_a_task(tmp_path: Path) -> None:
    write(tmp_path, WORKER)
    found = record(tmp_path, WORKER)
    assert found["examples_per_second"] == 50.0 * 64 / 2
    assert found["phase"] == "step"
    silent = replace(WORKER, time=NOW - 100)
    assert record(tmp_path, silent)["phase"] == "silent"
    ended = replace(silent, phase="ended")
    assert record(tmp_path, ended)["phase"] == "ended"
    for one in (silent, ended):  # what it did before is no rate of now
        found = record(tmp_path, one)
        assert [found[name] for name in ("steps_per_second", "waiting", "data")] == [0.0] * 3
    (tmp_path / "config.json").unlink()
    assert record(tmp_path, WORKER)["examples_per_second"] == 0.0


def test_a_table_of_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, WORKER, SERVER)
    assert main(["top", str(tmp_path), "--once"]) == 0
    head, one, server = capsys.readouterr().out.splitlines()[1:]
    assert head.split() == [
        *("task", "phase", "step", RATE, *FOR_TASKS.split(), *FOR_DATA.split()),
        *("staleness", "memory", "last"),
    ]
    assert re.split(r"  +", one.strip()) == [
        "worker 0", "step", "1,200", "1,600", "25%", "10%", "300 MB", "0 s ago",
    ]  # fmt: skip
    assert server.split()[:5] == ["ps", "0", "serve", "1,200", "0.75"]
    assert main(["top", str(tmp_path), "--json"]) == 0
    assert [one["task"] for one in json.loads(capsys.readouterr().out)] == ["worker 0", "ps 0"]


def test_what_cannot_be_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", str(tmp_path / "none")]) == 2
    assert "is no folder" in capsys.readouterr().err
    assert main(["top", str(tmp_path)]) == 2
    assert "no task has written into" in capsys.readouterr().err
    assert main(["top", str(tmp_path), "--listen", "nothing"]) == 2


def test_prometheus_reads_the_same_figures(tmp_path: Path) -> None:
    write(tmp_path, WORKER, SERVER)
    words = [sys.executable, "-m", "spartito", "top", str(tmp_path), "--listen"]
    words.append(f"127.0.0.1:{free_port()}")
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        url = process.stderr.readline().split()[-1]
        with urllib.request.urlopen(url, timeout=30) as reply:
            assert reply.headers["Content-Type"].startswith("text/plain; version=0.0.4")
            text = reply.read().decode()
    finally:
        process.kill()
        process.communicate()
    assert text == metrics(tmp_path)
    sample = re.compile(r"(\w+)\{(?:\w+=\"[^\"]*\",?)+\} (\S+)")
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    found = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}
    assert all(sample.fullmatch(line) for line in lines)
    assert found['spartito_step{task="worker 0"}'] == 1200
    assert found['spartito_examples_per_second{task="worker 0"}'] == 1600
    assert found['spartito_staleness{task="ps 0"}'] == 0.75
    assert found['spartito_phase{task="ps 0",phase="serve"}'] == 1
    assert 'spartito_staleness{task="worker 0"}' not in found


SCRIPT = """
import os, torch, spartito as sp
net = torch.nn.Linear(4, 2)
x = torch.randn(64, 4)
trainer = sp.Trainer(net, optimizer=torch.optim.SGD(net.parameters(), 0.1),
                     loss=torch.nn.CrossEntropyLoss(), strategy=sp.strategy())
trainer.fit((x, (x.sum(1) > 0).long()), epochs=2, batch_size=16)
trainer.evaluate((x, (x.sum(1) > 0).long()), batch_size=32)  # its step is the training's
if os.environ.get("OWN"):
    print("by hand", flush=True)
"""


def test_a_job_leaves_status_logs_and_lines_of_json(tmp_path: Path) -> None:
    with commands_in(tmp_path) as commands:
        run_one(commands)


def run_one(commands: Commands) -> None:
    commands.write("train.py", SCRIPT)
    env = {"SPARTITO_RUN_DIR": "run", "OWN": "1"}
    words = ("run", "--workers", "1", "--ps", "1", "--log-format", "json", "train.py")
    ended = commands.spartito(*words, env=env)
    assert ended.code == 0, ended.text
    lines: list[dict[str, Any]] = [json.loads(line) for line in ended.text.splitlines()]
    assert {line["task"] for line in lines} >= {"worker 0"}
    (own,) = [line for line in lines if line["text"] == "by hand"]
    assert (own["task"], own["stream"]) == ("worker 0", "stdout")
    run = commands.directory / "run"
    assert {path.name for path in (run / "logs").iterdir()} == {"worker-0.log", "ps-0.log"}
    assert "epoch 2/2" in (run / "logs" / "worker-0.log").read_text()
    worker, server = statuses(run)
    assert (worker.phase, worker.step) == ("ended", 7)
    assert server.phase == "ended"
    assert server.staleness == 0.0
    assert server.memory > 10_000_000
    wrong = commands.spartito("run", "--log-format", "xml", "train.py")
    assert wrong.code == 2
    assert "--log-format xml is unknown" in wrong.err
