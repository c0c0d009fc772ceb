"""A chief whose training fails while its process lives: all others end, and say why."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.commands import cluster_of, commands_in, tf_config
from tests.strategies.ps_jobs import Asked
from tests.strategies.ps_processes import job

LOST = 69
WHY = r"error: worker 0 \(\S+\) ended the job: ValueError: no such class in these rows"


@pytest.mark.parametrize(
    ("workers", "options"),
    [
        (2, {}),
        pytest.param(2, {"max_staleness": 0}, marks=pytest.mark.slow),
        pytest.param(2, {"groups": 2, "every": 2, "quorum": 2}, marks=pytest.mark.slow),
        pytest.param(3, {"groups": [[0, 1], [2]], "every": 2}, marks=pytest.mark.slow),
        pytest.param(
            4, {"groups": 2, "every": 2, "quorum": 2, "servers": {"shared_memory": False}},
            marks=pytest.mark.slow,
        ),
    ],
    ids=str,
)  # fmt: skip
def test_all_others_end_while_its_process_lives(
    tmp_path: Path, workers: int, options: dict[str, Any]
) -> None:
    """Also those of its own group, who wait for its gradients."""
    asked = Asked(options=options, fails="worker 0", lives=True, epochs=1000)
    with job(tmp_path, asked, worker=workers, ps=1) as found:
        others = [name for name in found.members if name != "worker 0"]
        found.held("worker 0")  # it has caught what its training raised
        found.shorten("worker 0")
        assert found.ends(*others) == [LOST] * len(others), found.text
        for name in others:
            assert found.said(name, WHY), found.text
        assert not found.said("worker 0", "its work goes to others"), found.text
        found.go("worker 0")
        assert found.ends("worker 0") == [0], found.text


def test_a_chief_that_ends_because_it_fails_is_named_by_workers(tmp_path: Path) -> None:
    """Its servers end well, as it tells them at its own end."""
    with job(tmp_path, Asked(fails="worker 0", epochs=1000), worker=2, ps=1) as found:
        assert found.ends("worker 0", "worker 1", "ps 0") == [1, LOST, 0], found.text
        assert found.said("worker 1", WHY), found.text


RESCUING = """
import os, time, torch
import spartito as sp
strategy = sp.strategy(groups=2, every=2)
net = torch.nn.Linear(4, 3)
class Fails(sp.Callback):
    def on_epoch_end(self, epoch, logs):
        raise ZeroDivisionError("in a callback")
data = (torch.randn(64, 4), torch.arange(64) % 3)
trainer = sp.Trainer(net, optimizer=torch.optim.SGD(net.parameters(), 0.1),
                     loss=torch.nn.CrossEntropyLoss(), strategy=strategy)
try:
    trainer.fit(data, epochs=1000, batch_size=8, callbacks=[Fails()], verbose=0)
except ZeroDivisionError:
    trainer.save("rescued")
    print("saved", flush=True)
    while not os.path.exists("go"):
        time.sleep(0.01)
    try:
        trainer.fit(data, epochs=1, verbose=0)
    except sp.TaskLostError as error:
        print("again:", error, flush=True)
strategy.close()
"""


# A disk that takes longer than a launcher has patience with those that outlive a task.
SLOWLY = """
    trainer.save("rescued", about=lambda: time.sleep(9) or {})
    open("go", "w")
"""


@pytest.mark.slow
def test_it_may_save_what_the_servers_have_but_not_train_on(tmp_path: Path) -> None:
    with commands_in(tmp_path) as commands:
        script = commands.write("train.py", RESCUING)
        cluster = cluster_of(chief=1, worker=2, ps=1)
        tasks = [("chief", 0), ("worker", 0), ("worker", 1), ("ps", 0)]
        env = [{**tf_config(cluster, *task), "SPARTITO_STRATEGY": "parameter_server"}
               for task in tasks]  # fmt: skip
        chief, *others = [
            commands.start(sys.executable, script, env=each, forks=True) for each in env
        ]
        chief.wait_for("saved")
        for other in others:
            ended = other.end()
            assert ended.code == LOST, ended.text
            assert "ended the job: ZeroDivisionError: in a callback" in ended.err
        commands.write("go", "")
        ended = chief.end()
        assert ended.code == 0, ended.text
        assert "again: chief 0" in ended.text
        assert (tmp_path / "rescued").exists()


@pytest.mark.slow
@pytest.mark.parametrize("options", ["", "groups=2, every=2, quorum=2"])
def test_others_stay_while_it_saves_so_that_no_launcher_ends_it(
    tmp_path: Path, options: str
) -> None:
    """Who launched them ends all tasks soon after the first that fails.

    Groups that wait for each other come to no meeting any more: it saves without their states.
    """
    text = RESCUING.replace('    trainer.save("rescued")\n', SLOWLY)
    text = text.replace("groups=2, every=2", options)
    with commands_in(tmp_path) as commands:
        script = commands.write("train.py", text)
        run = ["run", "--strategy", "parameter_server", "--workers", "2", "--ps", "1"]
        ended = commands.start(sys.executable, "-m", "spartito", *run, script).end()
        assert "[worker 0] saved" in ended.text
        assert "ended the job: ZeroDivisionError: in a callback" in ended.text
        assert ("without the groups' own states" in ended.text) == bool(options)
        assert (tmp_path / "rescued" / "manifest.json").exists()


@pytest.mark.slow
def test_after_an_interrupt_of_the_chief_alone_workers_end_and_servers_stay(tmp_path: Path) -> None:
    """Until its script ends: it may save at any time."""
    with commands_in(tmp_path) as commands:
        text = RESCUING.replace('ZeroDivisionError("in a callback")', "KeyboardInterrupt")
        text = text.replace("except ZeroDivisionError", "except KeyboardInterrupt")
        script = commands.write("train.py", text)
        cluster = cluster_of(chief=1, worker=2, ps=1)
        tasks = [("chief", 0), ("worker", 0), ("worker", 1), ("ps", 0)]
        env = [{**tf_config(cluster, *task), "SPARTITO_STRATEGY": "parameter_server"}
               for task in tasks]  # fmt: skip
        chief, *workers, server = [
            commands.start(sys.executable, script, env=each, forks=True) for each in env
        ]
        for worker in workers:
            ended = worker.end()
            assert ended.code == LOST, ended.text
            assert "chief 0" in ended.err
            assert "ended the job: it was interrupted" in ended.err
        commands.write("go", "")
        assert (chief.end().code, server.end().code) == (0, 0)
