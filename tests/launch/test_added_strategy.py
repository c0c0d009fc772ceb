"""A package of somebody else adds a strategy: every command knows it, torch is not imported."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.commands import LEAN, Commands, commands_in
from tests.launch.installed import install

PROJECT = """
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"

[project]
name = "theirs"
version = "1.0"

[project.entry-points."spartito.strategies"]
theirs = "theirs.info:INFO"
wrong = "theirs.info:WRONG"
void = "theirs.nothing:INFO"
"""
INFO = """
from spartito.registry import StrategyInfo

INFO = StrategyInfo("theirs", "theirs.strategy:Theirs", one_machine=True)
WRONG = "no info"
"""
STRATEGY = """
from dataclasses import dataclass

from spartito import Strategy
from spartito.steps.exchanges.all_reduce import AllReduce
from spartito.steps.placements.replicated import replicas


@dataclass(frozen=True, eq=False)
class Theirs(Strategy):
    name = "theirs"

    def parts(self, team):
        return replicas(team, AllReduce(team))
"""
SCRIPT = """
import spartito as sp

with_torch = sp.strategy("theirs")
print(type(with_torch).__module__, with_torch.num_replicas_in_sync, flush=True)
with_torch.close()
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder where pip has installed the package."""
    source, target = tmp_path_factory.mktemp("theirs"), tmp_path_factory.mktemp("packages")
    package = {"__init__": "", "info": INFO, "strategy": STRATEGY}
    files = {f"theirs/{name}.py": text for name, text in package.items()}
    install(source, target, {"pyproject.toml": PROJECT, **files})
    return target


@pytest.fixture
def commands(
    installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Commands]:
    before = os.environ.get("PYTHONPATH")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(installed), before])))
    with commands_in(tmp_path) as found:
        found.write("train.py", SCRIPT)
        yield found


@pytest.mark.slow
def test_run_and_train(commands: Commands) -> None:
    ended = commands.spartito("run", "--strategy", "theirs", "--workers", "2", "train.py")
    assert ended.code == 0, ended.text
    assert ended.out.count("theirs.strategy 2") == 2
    ended = commands.spartito(
        *("train", "mnist", "--strategy", "theirs", "--workers", "2", "--epochs", "1"),
        *("--batch-size", "512", "--out", "out"),
    )
    assert ended.code == 0, ended.text
    assert "spartito: theirs, 2 replicas" in ended.err


@pytest.mark.slow
def test_compare(commands: Commands) -> None:
    ended = commands.spartito(
        *("compare", "train.py", "--strategies", "theirs", "--workers", "1", "--out", "out"),
    )
    assert "spartito: run 1 of 1: theirs, 1 worker" in ended.err, ended.text
    assert "theirs.strategy 1" in ended.out, ended.text


QUICK = """
import contextlib, io, json, sys
from spartito.cli import main

for words in json.loads(sys.argv[1]):
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
        code = main(words)
    print(json.dumps([code, text.getvalue(), "torch" in sys.modules]))
"""


def test_the_commands_that_do_not_train(commands: Commands) -> None:
    theirs = ["--strategy", "theirs"]
    asked = {
        "compose": ["cluster", "compose", "mnist", *theirs],
        "compose on several machines": ["cluster", "compose", "mnist", *theirs, "--workers", "2"],
        "slurm": ["cluster", "slurm", "mnist", *theirs],
        "slurm on several machines": ["cluster", "slurm", "mnist", *theirs, "--nodes", "2"],
        "doctor": ["doctor", "--workers", "2", *theirs],
        "servers": ["run", "--ps", "1", *theirs, "train.py"],
        "unknown": ["run", "--strategy", "their", "train.py"],
        "wrong": ["run", "--strategy", "wrong", "train.py"],
        "table": ["strategies"],
        "void": ["run", "--strategy", "void", "train.py"],
    }
    ended = commands.python("-c", QUICK, json.dumps(list(asked.values())))
    assert ended.code == 0, ended.text
    found = dict(zip(asked, map(json.loads, ended.out.splitlines()), strict=True))
    assert not any(torch for _, _, torch in found.values()), "torch was imported"
    for name, code, says in (
        ("compose", 0, "SPARTITO_STRATEGY: theirs"),
        ("compose on several machines", 2, "theirs is for one machine"),
        ("slurm", 0, "export SPARTITO_STRATEGY=theirs"),
        ("slurm on several machines", 2, "theirs is for one machine"),
        ("doctor", 0, "strategy theirs"),
        ("servers", 2, "theirs with 1 ps: it has no parameter servers"),
        ("unknown", 2, "Did you mean 'theirs'? Known: central_storage, "),
        ("wrong", 2, "theirs.info:WRONG of theirs is no StrategyInfo"),
        ("table", 0, "\ntheirs "),
        ("table", 0, "theirs.info:WRONG of theirs is no StrategyInfo"),
        ("void", 2, "the strategy 'void' cannot be loaded from theirs.nothing:INFO of theirs"),
    ):
        assert found[name][0] == code, (name, found[name])
        assert says in found[name][1], (name, found[name])


def test_who_has_two_packages_of_one_name_is_told(commands: Commands, tmp_path: Path) -> None:
    twin = tmp_path / "packages" / "twin-1.0.dist-info"
    twin.mkdir(parents=True)
    (twin / "METADATA").write_text("Metadata-Version: 2.1\nName: twin\nVersion: 1.0\n")
    (twin / "entry_points.txt").write_text("[spartito.strategies]\ntheirs = twin:INFO\n")
    path = os.pathsep.join([str(twin.parent), os.environ["PYTHONPATH"], str(LEAN)])
    given = ("run", "--strategy", "theirs", "train.py")
    ended = commands.spartito(*given, env={"PYTHONPATH": path})
    assert ended.code == 2
    assert "more than one strategy is called 'theirs': " in ended.err
    assert "twin:INFO of twin" in ended.err
