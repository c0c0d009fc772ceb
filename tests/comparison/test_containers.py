from __future__ import annotations

import json
import secrets
import shutil
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from spartito.cli import main
from spartito.comparison.containers import job_for
from spartito.comparison.plan import Asked, Plan, containers_for, make_plan
from spartito.errors import UserError
from spartito.launch.containers.compose import compose_file
from spartito.launch.containers.launcher import Compose
from spartito.launch.containers.plan import Containers
from spartito.registry import names_anywhere
from tests.commands import SPARTITO, Commands, commands_in
from tests.launch.containers import docker

HOST = Compose(host_network=True)
ONE_MACHINE = Compose(host_network=True, share_ipc=True)


def plan(target: str = "mnist", *arguments: str, **given: Any) -> Plan:
    return make_plan(Asked(target, arguments, **{"containers": Compose(), **given}))


def jobs(found: Plan) -> dict[str, Containers]:
    assert found.containers is not None
    return {run.folder: job_for(found, found.containers, run) for run in found.runs}


@pytest.mark.parametrize(
    ("options", "workers", "left_out"),
    [
        (Compose(), 2, ["mirrored", "central_storage"]),
        (HOST, 2, ["central_storage"]),
        (ONE_MACHINE, 2, []),
        (Compose(), 1, []),
    ],
)
def test_all_are_those_that_containers_allow(
    options: Compose, workers: int, left_out: list[str]
) -> None:
    found = plan(containers=options, workers=workers)
    assert {run.strategy.name for run in found.runs} == set(names_anywhere()) - set(left_out)
    assert [why.split()[0] for why in found.left_out] == left_out
    assert all("each container is a machine of its own" in why for why in found.left_out)
    assert set(jobs(found)) == {run.folder for run in found.runs}


def test_a_strategy_asked_for_by_name_is_refused_with_a_way_out() -> None:
    with pytest.raises(UserError, match="mirrored is for one machine") as error:
        jobs(plan(strategies="mirrored"))
    assert "--host-network" in str(error.value)


def test_what_a_recipe_is_told(tmp_path: Path) -> None:
    options = Compose(cpus="1,0.25", memory="2g", image="mine")
    found = plan(
        containers=options,
        strategies="one_device,multi_worker_mirrored,parameter_server",
        ps=2,
        epochs=3,
        seed=7,
        batch_size=16,
        data=str(tmp_path),
        out=tmp_path / "My Trial",
    )
    alone, both, served = jobs(found).values()
    assert both.command[1:] == (
        *("-m", "spartito.recipes.mnist", "--out=/runs", "--data=/data"),
        *("--epochs=3", "--batch-size=16", "--seed=7"),
    )
    assert both.name == "my-trial-multi_worker_mirrored"
    assert both.out == str(tmp_path / "My Trial" / "multi_worker_mirrored")
    assert (both.data, both.image, both.scripts) == (str(tmp_path), "mine", None)
    assert (alone.limits.cpus, both.limits.cpus) == ((1.0,), (1.0, 0.25))
    assert (served.roles.workers, served.roles.ps, served.limits.memory) == (2, 2, "2048m")


def test_paths_lead_from_the_file_to_where_the_user_meant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here" / "photos").mkdir(parents=True)
    (tmp_path / "here" / "train.py").touch()
    monkeypatch.chdir(tmp_path / "here")
    found = plan("train.py", "/data", strategies="one_device", data="photos", epochs=2)
    (job,) = jobs(found).values()
    assert job.command == ("env", "SPARTITO_EPOCHS=2", "python", "/scripts/train.py", "/data")
    volumes = yaml.safe_load(compose_file(job))["x-task"]["volumes"]
    assert {volume["target"]: volume["source"] for volume in volumes} == {
        "/runs": str(tmp_path / "here" / found.out / "one_device"),
        "/scripts": str(tmp_path / "here"),
        "/data": str(tmp_path / "here" / "photos"),
    }


def test_a_smaller_run_of_a_sweep_has_the_first_workers_cpus() -> None:
    options = Compose(cpus="1,0.5,0.25")
    found = plan(strategies="multi_worker_mirrored", workers=3, sweep=["workers=2"])
    found = replace(found, containers=options)
    assert [job.limits.cpus for job in jobs(found).values()] == [(1.0, 0.5, 0.25), (1.0, 0.5)]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--on", "kubernets"], ["--on kubernets", "compose, processes"]),
        (["--cpus", "1"], ["--cpus is for containers", "--on compose"]),
        (["--memory", "1g"], ["--memory is for containers"]),
        (["--image", "mine"], ["--image is for containers"]),
        (["--host-network"], ["--host-network is for containers"]),
        (["--on", "compose", "--slow", "worker:1=0.5"], ["--slow worker:1=0.5", "--cpus 1,0.25"]),
        (["--on", "compose", "--cpus", "1,1,1"], ["has 3 numbers for"]),
        (["--on", "compose", "--memory", "10m"], ["--memory 10m is too small"]),
        (["--on", "compose", "--data", "no_such"], ["no_such is no folder"]),
    ],
)
def test_each_mistake_is_found_before_anything_starts(
    words: list[str], says: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(["compare", "mnist", "--out", str(out), *words]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert all(part in said for part in says), said
    assert not out.exists()


def test_without_an_engine_nothing_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["compare", "mnist", "--on", "compose", "--out", str(tmp_path / "out")]) == 2
    assert "no docker command" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_processes_need_no_containers() -> None:
    assert containers_for("processes", Compose()) is None
    assert containers_for("compose", Compose()) == Compose()
    with pytest.raises(UserError, match="--host-network is for containers"):
        containers_for("processes", HOST)
    with pytest.raises(UserError, match="--on podman is neither processes nor compose"):
        containers_for("podman", Compose())


SCRIPT = """
import json, os, pathlib, signal, sys

strategy = os.environ["SPARTITO_STRATEGY"]
if strategy in sys.argv[1:]:
    sys.exit(f"ValueError: {strategy} is not for me")
if f"wait:{strategy}" in sys.argv:
    print("now waiting", flush=True)
    signal.pause()
if json.loads(os.environ["TF_CONFIG"])["task"] == {"type": "worker", "index": 0}:
    with open(pathlib.Path(os.environ["SPARTITO_RUN_DIR"]) / "history.jsonl", "w") as file:
        for epoch in range(1, int(os.environ["SPARTITO_EPOCHS"]) + 1):
            line = {"epoch": epoch, "step": epoch, "loss": 1.0, "seconds": 0.5}
            file.write(json.dumps(line) + chr(10))
"""
"""Leaves what a Trainer leaves, without the seconds that torch takes to start."""


@pytest.fixture
def commands(tmp_path: Path) -> Iterator[Commands]:
    with commands_in(tmp_path) as found:
        found.write("train.py", SCRIPT)
        yield found


@pytest.fixture
def words(image: str, tmp_path: Path) -> Iterator[list[str]]:
    """Those of a comparison in containers; nothing of it may be left."""
    name = f"test-{secrets.token_hex(4)}"
    tmp_path.chmod(0o755)  # the containers' user reads the script
    yield [
        *("compare", "train.py", "--on", "compose", "--image", image, "--out", name),
        *("--strategies", "one_device,multi_worker_mirrored", "--epochs", "2"),
    ]
    shutil.rmtree(tmp_path / name, ignore_errors=True)
    mine = ["--quiet", "--filter", f"name={name}"]
    assert docker("ps", "--all", *mine) + docker("network", "ls", *mine) == ""


def written(commands: Commands, words: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(
        (commands.directory / words[words.index("--out") + 1] / "compare.json").read_text()
    )
    return found


@pytest.mark.docker
def test_one_strategy_fails_and_the_other_goes_on(commands: Commands, words: list[str]) -> None:
    ended = commands.spartito(*words, "--cpus", "0.5", "--", "one_device")
    assert ended.code == 1, ended.text
    found = written(commands, words)
    bad, good = found["runs"]
    assert (bad["strategy"], bad["exit_code"]) == ("one_device", 1)
    assert "ValueError: one_device is not for me" in bad["error"]
    assert (good["strategy"], good["workers"], good["error"]) == ("multi_worker_mirrored", 2, None)
    assert len(good["history"]) == 2
    assert found["machine"]["cpus of the workers"] == "0.5"
    folder = commands.directory / words[words.index("--out") + 1]
    assert (folder / "compare.html").exists()
    assert (folder / "one_device.yaml").exists()


@pytest.mark.docker
def test_ctrl_c_removes_the_containers_and_keeps_what_there_is(
    commands: Commands, words: list[str]
) -> None:
    program = commands.start(*SPARTITO, *words, "--", "wait:multi_worker_mirrored")
    program.wait_for("now waiting")
    program.send(signal.SIGINT)
    ended = program.end()
    assert ended.code == 130, ended.text
    first, second = written(commands, words)["runs"]
    assert (first["strategy"], first["error"]) == ("one_device", None)
    assert (second["strategy"], second["exit_code"]) == ("multi_worker_mirrored", 130)
