"""Tasks with other versions: the same clear error on all of them, before anything is trained."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from spartito.collectives.versions import Versions, check_versions
from spartito.errors import UserError
from tests.commands import Commands, Ended, addresses, commands_in, tf_config
from tests.versions import with_version

OWN = Versions.own()
OTHER_TORCH = "1.13.1"
SCRIPT = """
import sys
import torch
import spartito as sp


class Tell(sp.Callback):
    def on_epoch_begin(self, epoch):
        print("under way", flush=True)


strategy = sp.strategy()
net = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(net.parameters(), 0.1)
trainer = sp.Trainer(net, optimizer=optimizer, loss=torch.nn.MSELoss(), strategy=strategy)
train = sp.data.arrays(torch.ones(8, 4), torch.ones(8, 2)).batch(4)
trainer.fit(train, epochs=int([*sys.argv, 1][1]), callbacks=[Tell()], verbose=0)
"""
SERVERS = {"SPARTITO_STRATEGY": "parameter_server"}


@pytest.fixture
def commands(tmp_path: Path) -> Iterator[Commands]:
    """Programs that start in the test's directory."""
    with commands_in(tmp_path) as started:
        started.write("train.py", SCRIPT)
        yield started


def run(
    commands: Commands, counts: dict[str, int], other: str, told: dict[str, str]
) -> dict[str, Ended]:
    """A job of so many tasks by role, without a launcher; ``other`` is told something else."""
    cluster = {role: addresses(count) for role, count in counts.items()}
    programs = {
        f"{role} {index}": commands.start(
            sys.executable,
            "train.py",
            env={
                **tf_config(cluster, role, index),
                **(SERVERS if "ps" in counts else {}),
                **(told if other == f"{role} {index}" else {}),
                "SPARTITO_TIMEOUT": "60",
            },
        )
        for role, count in counts.items()
        for index in range(count)
    }
    return {name: program.end() for name, program in programs.items()}


def codes(ended: dict[str, Ended]) -> dict[str, int]:
    """The exit codes."""
    return {name: one.code for name, one in ended.items()}


@pytest.mark.parametrize(
    ("versions", "told"),
    [
        ({"a": OWN, "b": OWN}, ""),
        ({"a": Versions("1", "2.5.0"), "b": Versions("1", "2.5.1+cpu")}, ""),
        (
            {"a": Versions("1", "2.5.0"), "b": Versions("1.0", "2.5.0")},
            "Spartito: 1 on a, 1.0 on b",
        ),
        (
            {"a": Versions("1", "2.5.1"), "b": Versions("1", "2.6.0"), "c": Versions("1", "2.5.1")},
            "torch: 2.5.1 on a and c, 2.6.0 on b",
        ),
    ],
)
def test_which_versions_fit_together(versions: dict[str, Versions], told: str) -> None:
    if not told:
        check_versions(versions)
        return
    with pytest.raises(UserError) as caught:
        check_versions(versions)
    assert f"the tasks have different versions of {told}\n" in str(caught.value)


@pytest.mark.parametrize(
    ("package", "version", "other"),
    [("spartito", "9.9.9", "worker 0"), ("torch", OTHER_TORCH, "worker 2")],
)
def test_all_replicas_refuse_and_say_who_has_what(
    commands: Commands, tmp_path: Path, package: str, version: str, other: str
) -> None:
    told = with_version(tmp_path, package, version)
    for ended in run(commands, {"worker": 3}, other, told).values():
        assert ended.code == 2, ended.text
        assert "spartito: error: the tasks have different versions of" in ended.err
        assert f"{version} on {other} (" in ended.err
        assert "Traceback" not in ended.err


def test_another_patch_and_build_of_torch_is_the_same_torch(
    commands: Commands, tmp_path: Path
) -> None:
    told = with_version(tmp_path, "torch", f"{OWN.torch_series}.99+cu000")
    ended = run(commands, {"worker": 2}, "worker 1", told)
    assert codes(ended) == {"worker 0": 0, "worker 1": 0}, ended


def test_the_chief_and_a_server_refuse_each_other(commands: Commands, tmp_path: Path) -> None:
    told = with_version(tmp_path, "torch", OTHER_TORCH)
    ended = run(commands, {"worker": 1, "ps": 2}, "ps 1", told)
    assert codes(ended) == {"worker 0": 2, "ps 0": 0, "ps 1": 2}, ended
    for name in ("worker 0", "ps 1"):
        assert f"{OTHER_TORCH} on ps 1" in ended[name].err
        assert "Traceback" not in ended[name].err


def test_a_server_that_comes_back_with_another_version_ends_the_job(
    commands: Commands, tmp_path: Path
) -> None:
    cluster = {"worker": addresses(1), "ps": addresses(1)}
    common = {**SERVERS, "SPARTITO_TIMEOUT": "60", "SPARTITO_SNAPSHOT_DIR": str(tmp_path)}
    # The chief does not wait for the work that it has itself.
    common["SPARTITO_STRATEGY_OPTIONS"] = '{"lease_seconds": 600}'
    server, worker = (
        commands.start(
            *(sys.executable, "train.py", "1000000"),
            env={**tf_config(cluster, role, 0), **common},
        )
        for role in ("ps", "worker")
    )
    worker.wait_for("under way")
    server.kill()
    told = with_version(tmp_path, "spartito", "9.9.9")
    again = commands.start(
        *(sys.executable, "train.py"), env={**tf_config(cluster, "ps", 0), **common, **told}
    )
    for ended in (worker.end(), again.end()):
        assert ended.code == 2, ended.text
        assert "9.9.9 on ps 0" in ended.err


def test_the_chief_and_a_worker_refuse_each_other(commands: Commands, tmp_path: Path) -> None:
    told = with_version(tmp_path, "spartito", "9.9.9")
    ended = run(commands, {"worker": 2, "ps": 1}, "worker 1", told)
    assert codes(ended) == {"worker 0": 2, "worker 1": 2, "ps 0": 0}, ended
    for name in ("worker 0", "worker 1"):
        assert "9.9.9 on worker 1" in ended[name].err
        assert "Traceback" not in ended[name].err
