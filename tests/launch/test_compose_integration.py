"""What compose files say, done by processes of this machine: no engine is needed for that."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from spartito.wire.ports import free_ports
from spartito.wire.secret import new_secret
from tests.commands import SPARTITO, Commands, Ended, commands_in


@pytest.fixture
def commands(tmp_path: Path) -> Iterator[Commands]:
    with commands_in(tmp_path) as found:
        yield found


def train(commands: Commands, run: Path, *options: str) -> dict[str, Ended]:
    """Write a file, and do with processes what it says of its containers."""
    recipe = ("--epochs=1", "--batch-size=500")
    words = ["cluster", "compose", "mnist", "--host-network", *options, "--", *recipe]
    written = commands.start(*SPARTITO, *words).end()
    assert written.code == 0, written.err
    named = set(re.findall(r"127\.0\.0\.1:(\d+)", written.out))
    ports = {port: str(free) for port, free in zip(named, free_ports(len(named)), strict=True)}
    run.mkdir()
    secret = run.with_name("secret")
    secret.write_text(new_secret())
    programs = {}
    for name, service in yaml.safe_load(written.out)["services"].items():
        told = {
            key: value.replace("/snapshots", str(run)).replace("/runs", str(run))
            for key, value in service["environment"].items()
        }
        told["SPARTITO_SECRET_FILE"] = str(secret)  # which the engine mounts
        for port, free in ports.items():
            told["TF_CONFIG"] = told["TF_CONFIG"].replace(f":{port}", f":{free}")
        python, *arguments = service["command"]
        assert python == "python"
        own = [word.replace("/runs", str(run)) for word in arguments]
        programs[name] = commands.start(sys.executable, *own, env=told)
    return {name: program.end() for name, program in programs.items()}


@pytest.mark.parametrize(
    ("options", "tasks"),
    [
        pytest.param(
            *(["--strategy=mirrored", "--workers=2"], ["worker-0", "worker-1"]),
            marks=pytest.mark.night,
        ),
        (["--workers=1", "--ps=1", "--evaluator"], ["worker-0", "ps-0", "evaluator"]),
    ],
)
@pytest.mark.slow
def test_what_the_file_says_trains(
    commands: Commands, tmp_path: Path, options: list[str], tasks: list[str]
) -> None:
    run = tmp_path / "run"
    ended = train(commands, run, *options)
    assert {name: end.code for name, end in ended.items()} == dict.fromkeys(tasks, 0), ended
    assert list((run / "checkpoints").glob("*/model.safetensors"))
    assert (run / "report.html").is_file()
    assert (run / "evaluations.jsonl").is_file() == ("evaluator" in tasks)
