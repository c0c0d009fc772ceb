"""The command `spartito chaos`, on real jobs."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.commands import SPARTITO, Commands, Ended, commands_in, nothing_left
from tests.skips import on_linux

pytestmark = pytest.mark.timeout(900)

LONG = 800.0
"""Seconds that no passing test comes near: each has several jobs, one after the other."""

PATIENT = ("--slack", "200", "--longest", "240")
"""A promise in seconds is that of a machine that does nothing else."""


@pytest.fixture
def commands(tmp_path: Path) -> Iterator[Commands]:
    with commands_in(tmp_path) as programs:
        yield programs


def survive(commands: Commands, command: str, target: str, *words: str) -> Ended:
    """The command, on a machine that may have other work."""
    return commands.start(*SPARTITO, command, target, *PATIENT, *words).end(LONG)


@pytest.mark.slow
def test_a_worker_that_is_killed(commands: Commands) -> None:
    words = ["chaos", "mnist", "--strategy", "mirrored", "--schedule", "kill@worker:1#40"]
    with nothing_left():
        ended = survive(commands, *words, "--out", "out", "--", "--epochs=1")
    assert ended.code == 0, ended.text
    (result,) = map(json.loads, (commands.directory / "out/results.jsonl").read_text().splitlines())
    assert (result["code"], result["broken"], result["lost"]) == (69, [], 0)
    assert (result["restarts"], result["difference"]) == (1, 0.0)
    assert "| kill | worker 1 | 40 | 69 |" in (commands.directory / "out/survival.md").read_text()
    again = survive(commands, *words, "--out", "out", "--", "--epochs=1")
    assert (again.code, again.out.count("\n")) == (0, 1)  # it has that result already
    assert not list((commands.directory / "out/temporary").iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["kill", pytest.param("exception", marks=pytest.mark.night)])
def test_a_worker_of_groups_over_servers(commands: Commands, kind: str) -> None:
    """One that is killed is replaced, an exception ends the job; no update is lost or doubled."""
    apart = json.dumps({"groups": 2, "every": 5})
    words = ["chaos", "mnist", "--strategy", "parameter_server", "--strategy-options", apart]
    words += ["--chief", "--ps", "1", "--schedule", f"{kind}@worker:1#40", "--limit", "20"]
    with nothing_left():
        ended = survive(commands, *words, "--out", "out", "--", "--epochs=1")
    assert ended.code == 0, ended.text
    (result,) = map(json.loads, (commands.directory / "out/results.jsonl").read_text().splitlines())
    assert (result["broken"], result["doubled"]) == ([], 0)
    assert result["code"] == (0 if kind == "kill" else 1)
    assert result["lost"] == 0


@pytest.mark.slow
@pytest.mark.night
def test_a_worker_inside_a_group_that_is_killed(commands: Commands) -> None:
    """Its group cannot go on without it, nor the other group: all end, and name it."""
    apart = json.dumps({"groups": 2, "every": 5})
    words = ["chaos", "mnist", "--strategy", "local_sgd", "--strategy-options", apart]
    words += ["--workers", "4", "--schedule", "kill@worker:3#40", "--limit", "20"]
    with nothing_left():
        ended = survive(commands, *words, "--out", "out", "--", "--epochs=1")
    assert ended.code == 0, ended.text
    (result,) = map(json.loads, (commands.directory / "out/results.jsonl").read_text().splitlines())
    assert (result["code"], result["broken"]) == (69, [])


@pytest.mark.slow
def test_ctrl_c_leaves_nothing(commands: Commands) -> None:
    words = ["chaos", "mnist", "--faults", "stop", "--out", "out", "--", "--epochs=100"]
    with nothing_left():
        job = commands.start(*SPARTITO, *words)
        job.wait_for("mirrored without faults")
        job.send(signal.SIGINT)
        ended = job.end()  # fails where a process is left
    assert ended.code == 130
    assert "Traceback" not in ended.text


@on_linux
@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["mnits"], "'mnits' is neither a script nor a recipe"),
        (["mnist", "--faults", "kil"], "'kil' is not a fault"),
        (["mnist", "--strategy", "mirored"], "'mirored' is not a strategy"),
        (["mnist", "--schedule", "kill@worker"], "'kill@worker' is not a fault"),
        (["mnist", "--roles", "wrker"], "'wrker' is not a role"),
        (["mnist", "--steps", "9-3"], "--steps 9-3 has no steps"),
        (["mnist", "--sample", "nowhere"], "--sample nowhere is no file"),
    ],
)
def test_mistakes_are_told_before_anything_starts(
    commands: Commands, words: list[str], why: str
) -> None:
    ended = commands.spartito("chaos", *words)
    assert (ended.code, ended.out) == (2, "")
    assert why in ended.err


@pytest.mark.slow
@pytest.mark.night
def test_faults_of_several_kinds(commands: Commands) -> None:
    faults = "kill@worker:1#160,exception@worker:0#150,pause@worker:1#160,torn@worker:0#300"
    words = ["chaos", "mnist", "--strategy", "central_storage", "--limit", "20"]
    words += ["--schedule", faults]
    ended = survive(commands, *words, "--out", "out", "--", "--epochs=3")
    assert ended.code == 0, ended.text
    assert "4 of 4 cells end as promised" in ended.out


@pytest.mark.slow
def test_who_lives_goes_on(commands: Commands) -> None:
    words = ["chaos", "mnist", "--strategy", "multi_worker_mirrored", "--recover"]
    words += ["--schedule", "kill@worker:1#160,kill@worker:0#170+kill@worker:1#250"]
    ended = survive(commands, *words, "--limit", "20", "--out", "out")
    assert ended.code == 0, ended.text
    results = (commands.directory / "out/results.jsonl").read_text().splitlines()
    assert [json.loads(line)["restarts"] for line in results] == [0] * 2
