"""The results of the benchmarks: their table, their page, and commands that do not end."""

from __future__ import annotations

import argparse
import math
import re
import sys
from pathlib import Path

import pytest

from benchmarks.all import run
from benchmarks.common import Figure, Others, instructions, interpreter
from benchmarks.page import render
from benchmarks.plan import FURTHER, OF_THEIR_OWN, PLAN
from benchmarks.results import Result, from_line, markdown, put_between, read, write

ROOT = Path(__file__).parents[1]

GOOD = Result(
    name="good",
    title="Good",
    command="python -m benchmarks.good",
    when="2026-01-02 03:04",
    seconds=5.0,
    others=None,
    machine={"cpu": "A|B", "cores": 2, "instructions": "AVX2", "torch": "2", "python": "3"},
    figures=[
        Figure("above", 2.0, 1.5),
        Figure("below | it", 2.0, 2.5),
        Figure("late", 3.0, 1.0, "<=", "s"),
        Figure("shown", 7.0, measure="ms"),
    ],
    sides={"ours": 10.0, "theirs": 5.0},
    sides_in="examples/s",
)
BAD = Result("bad", "Bad", "python -m benchmarks.bad", "2026-01-02 04:05", 1.0, 0.0,
             error="<no> root\nexit code 1")  # fmt: skip


def test_a_python_that_is_not_there_is_refused_before_anything_is_measured() -> None:
    assert interpreter(sys.executable) == sys.executable
    with pytest.raises(argparse.ArgumentTypeError, match="'nowhere/python' is no program"):
        interpreter("nowhere/python")


def test_every_command_is_planned_and_there() -> None:
    names = [planned.name for planned in PLAN + FURTHER]
    assert len(set(names)) == len(names)
    commands = {
        path.stem
        for path in (ROOT / "benchmarks").glob("*.py")
        if '__name__ == "__main__"' in path.read_text()
    }
    planned = {planned.module for planned in PLAN + FURTHER}
    assert planned | set(OF_THEIR_OWN) == commands
    assert not planned & set(OF_THEIR_OWN)
    assert sum(planned.limit for planned in PLAN) < 3600


def test_every_command_of_the_docs_is_there() -> None:
    known = {planned.module for planned in PLAN + FURTHER} | set(OF_THEIR_OWN)
    for page in ("docs/benchmarks.md", "benchmarks/README.md"):
        named = set(re.findall(r"python -m benchmarks\.(\w+)", (ROOT / page).read_text()))
        assert named <= known, page
    assert named == known  # a command that is not on its page is found by nobody


def test_planned_commands_take_their_options() -> None:
    for planned in FURTHER:
        source = (ROOT / "benchmarks" / f"{planned.module}.py").read_text()
        for word in [*planned.options, *(f"--{name}" for name in planned.takes)]:
            option = word.partition("=")[0]
            if option.startswith("--"):
                assert f'"{option}"' in source, planned
        assert "conclude(" in source, planned


def test_results_are_read_as_they_were_written(tmp_path: Path) -> None:
    write(tmp_path / "results.json", [GOOD, BAD])
    found = read(tmp_path / "results.json")
    assert list(found) == ["good", "bad"]
    assert render(list(found.values())) == render([GOOD, BAD])
    assert markdown(list(found.values())) == markdown([GOOD, BAD])
    assert read(tmp_path / "none.json") == {}


def test_the_last_line_of_a_benchmark_is_taken() -> None:
    figure = {"name": "a", "value": 1.0, "target": 2.0, "relation": ">=", "reached": False}
    line = {"machine": {}, "figures": [figure, {"name": "b", "value": math.nan}],
            "examples_per_second": {"fit": 3.0, "windows": [1.0]}}  # fmt: skip
    found = from_line(line)
    assert found["figures"] == [Figure("a", 1.0, 2.0)]
    assert (found["sides"], found["sides_in"]) == ({"fit": 3.0}, "examples/s")


def test_the_table_says_what_was_missed() -> None:
    table = markdown([GOOD, BAD])
    assert "| above | >= 1.5 | **2.000** | |" in table
    assert "| below \\| it | >= 2.5 | **2.000**, missed | |" in table
    assert "| late | <= 1 | **3.000 s**, missed | |" in table
    assert "shown" not in table
    assert "left out: <no> root exit code 1" in table
    page = render([GOOD, BAD])
    assert "1 of 3 targets reached" in page
    assert "&lt;no&gt; root" in page
    assert "shown" in page
    assert "http" not in page.lower()


def test_what_is_written_by_hand_stays() -> None:
    text = (ROOT / "docs" / "benchmarks.md").read_text()
    once = put_between(text, "a table")
    assert put_between(put_between(once, "another"), "a table") == once
    assert once.startswith(text[: text.index("<!--")])
    assert once.endswith(text[text.index("<!-- end") :])
    with pytest.raises(ValueError, match="no <!-- figures"):
        put_between("nothing", "a table")


def test_the_table_of_the_docs_is_of_their_results() -> None:
    text = (ROOT / "docs" / "benchmarks.md").read_text()
    results = list(read(ROOT / "docs" / "benchmarks.json").values())
    if results:
        assert put_between(text, markdown(results)) == text


def test_a_command_that_does_not_end_is_ended() -> None:
    child = "import subprocess, sys; subprocess.run([sys.executable, '-c', WAIT])"
    program = f"WAIT = 'import time; print(1, flush=True); time.sleep(600)'; {child}"
    lines, code = run([sys.executable, "-c", program], 1.0)
    assert code != 0
    assert lines in ([], ["1"])


def test_the_machine_is_described() -> None:
    assert instructions()
    assert not Others().cores < 0
