"""Files for SkyPilot and dstack whose nodes run here: see ``tests/launch/clouds.py``."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path

import pytest
import yaml

from spartito.cli import main
from spartito.launch.lines.network import Machine, NoNamespacesError, network
from tests.commands import Commands, commands_in
from tests.launch.clouds import play
from tests.skips import need, skip

DIGITS = ("--epochs=1", "--batch-size=64", "--seed=3")
VENV = f"ln -sfn {Path(sys.executable).parents[1]} ~/spartito-env"
"""Instead of an installation: no network here."""

SCRIPT = """
import spartito as sp
from beside import KNOWN

strategy = sp.strategy()
print("I am", strategy.cluster.task, "of", strategy.cluster.source, KNOWN, flush=True)
"""


@pytest.fixture(scope="module")
def machines() -> Iterator[list[Machine]]:
    need("netns")
    try:
        with network("a", "b", "c", "d") as found:
            yield found
    except NoNamespacesError as error:
        skip("netns", error)


@pytest.fixture
def commands(tmp_path: Path) -> Iterator[Commands]:
    with commands_in(tmp_path) as found:
        yield found


def written(folder: Path, capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, object]:
    with chdir(folder):
        assert main(["cluster", *words]) == 0
    document = yaml.safe_load(capsys.readouterr().out)
    assert isinstance(document, dict)
    return document


def losses(folder: Path) -> list[float]:
    lines = (folder / "history.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


OUT = {"sky": "--out=s3://bucket/runs", "dstack": "--out=/mnt/runs"}
KEPT = {"sky": "bucket-runs", "dstack": "mnt/runs"}
SECRETS = {"SPARTITO_SECRET": "5e" * 32}


@pytest.mark.slow
@pytest.mark.parametrize("tool", ["sky", "dstack"])
def test_digits_on_two_nodes_train_to_the_loss_of_local_processes(
    tool: str,
    machines: list[Machine],
    commands: Commands,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    own = [f"--setup={VENV}"] if tool == "sky" else []
    words = [tool, "mnist", "--workers=2", OUT[tool], *own, "--", *DIGITS]
    task = written(tmp_path, capsys, *words)
    for node in play(task, machines[:2], tmp_path, SECRETS):
        assert node.code == 0, node.text
        assert "insecure" not in node.text
    local = tmp_path / "local"
    strategy = ("--strategy", "multi_worker_mirrored", "--workers", "2")
    done = commands.spartito("train", "mnist", *DIGITS, *strategy, "--out", local)
    assert done.code == 0, done.text
    assert losses(tmp_path / KEPT[tool] / "mnist") == pytest.approx(losses(local), rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("tool", ["sky", "dstack"])
def test_digits_with_servers_and_roles_on_nodes(
    tool: str, machines: list[Machine], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = [f"--setup={VENV}"] if tool == "sky" else []
    roles = ["--chief", "--workers=1", "--ps=1", "--evaluator"]
    task = written(tmp_path, capsys, tool, "mnist", *roles, OUT[tool], *own, "--", *DIGITS)
    for node in play(task, machines, tmp_path, SECRETS):
        assert node.code == 0, node.text
    run = tmp_path / KEPT[tool] / "mnist"
    assert losses(run)[-1] < 1.5
    assert sorted(path.name for path in (run / "tasks").iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("tool", ["sky", "dstack"])
def test_a_script_comes_along_with_its_folder(
    tool: str, machines: list[Machine], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    here = tmp_path / ("project one" if tool == "sky" else "project")
    here.mkdir()
    (here / "train.py").write_text(SCRIPT)
    (here / "beside.py").write_text("KNOWN = 'beside'\n")
    own = [f"--setup={VENV}"] if tool == "sky" else []
    words = [tool, f"{here}/train.py", "--workers=2", OUT[tool], *own]
    task = written(tmp_path, capsys, *words, "--", "a b", "$HOME")
    source = {"sky": "SkyPilot", "dstack": "dstack"}[tool]
    for rank, node in enumerate(play(task, machines[:2], tmp_path, SECRETS)):
        assert node.code == 0, node.text
        assert f"I am worker {rank} of {source} beside" in node.text
