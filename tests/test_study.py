from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.study import EXAMPLES, QUARTER, RUNS, STUDIES, Run, Study, is_done, perform
from benchmarks.study import main as study_main
from benchmarks.study_results import BEGIN, DOCS, END, write_docs, write_results
from spartito.cli import main
from spartito.errors import UserError
from spartito.launch.containers.compose import compose_file
from spartito.launch.containers.file import read_job
from spartito.launch.containers.plan import CONTAINER_USER
from tests.commands import commands_in
from tests.launch.containers import need_image

NAMES = [study.name for study in STUDIES]


def folder_of(study: Study, tmp_path: Path) -> Path:
    """The example's folder as a user has it, with a folder of photos beside."""
    shutil.copytree(EXAMPLES / study.name, tmp_path / study.name)
    (tmp_path / study.name / "PetImages").mkdir()
    return tmp_path / study.name


def test_each_study_has_its_folder_and_there_is_no_other() -> None:
    assert sorted(path.name for path in EXAMPLES.iterdir() if path.is_dir()) == sorted(NAMES)
    assert len({run.name for run in RUNS}) == 2 * len(STUDIES)


@pytest.mark.parametrize("study", STUDIES, ids=NAMES)
def test_the_command_of_the_readme_writes_the_file_that_is_there(
    study: Study,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = folder_of(study, tmp_path)
    (line,) = re.findall(r"^spartito cluster compose .*$", (folder / "README.md").read_text(), re.M)
    command, _, file = line.partition(" > ")
    monkeypatch.chdir(folder)
    assert main(shlex.split(command)[1:]) == 0
    written = re.sub(r"(?m)^  user: .*$", f"  user: {CONTAINER_USER}", capsys.readouterr().out)
    assert written == (folder / file).read_text()


@pytest.mark.parametrize("study", STUDIES, ids=NAMES)
def test_the_study_runs_the_job_of_the_example(
    study: Study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folder_of(study, tmp_path)
    monkeypatch.chdir(folder)
    there = read_job(folder / "compose.yaml")
    job = study.job(folder / "PetImages", cpus="1", name=there.name)
    here = replace(job, scripts=".", out=f"./runs/{there.name}", user=CONTAINER_USER)
    assert compose_file(here) == there.text
    assert all(service["cpus"] == 1 for name, service in there.services.items() if "worker" in name)


@pytest.mark.parametrize("model", ["cats_vs_dogs", "digits"])
def test_only_the_compose_file_tells_the_two_ways_apart(model: str) -> None:
    scripts = [
        EXAMPLES / f"{model}_{kind}" / "train.py" for kind in ("synchronous", "asynchronous")
    ]
    assert scripts[0].read_bytes() == scripts[1].read_bytes()


@pytest.mark.slow
def test_the_script_trains_without_containers(tmp_path: Path) -> None:
    script = EXAMPLES / "digits_synchronous" / "train.py"
    told = {"SPARTITO_EPOCHS": "1", "SPARTITO_RUN_DIR": str(tmp_path)}
    with commands_in(tmp_path) as commands:
        ended = commands.python(script, env=told, forks=True)
    assert ended.code == 0, ended.text
    (epoch,) = map(json.loads, (tmp_path / "history.jsonl").read_text().splitlines())
    assert epoch["step"] == 20
    assert json.loads((tmp_path / "config.json").read_text())["fit"]["batch_size"] == 16


def make_run(out: Path, run: Run, seconds: float, staleness: dict[str, int] | None = None) -> None:
    """What a run of two epochs leaves."""
    (out / run.name / "tasks").mkdir(parents=True)
    lines = [
        {"epoch": n, "step": 20 * n, "loss": 1 / n, "accuracy": 0.5, "val_loss": 0.9 / n}
        | {"val_accuracy": 0.3 * n, "seconds": seconds, "examples_per_second": 1.0}
        for n in (1, 2)
    ]
    text = "\n".join(map(json.dumps, lines))
    (out / run.name / "history.jsonl").write_text(text)
    (out / run.name / "config.json").write_text(json.dumps({"fit": {"batch_size": 16}}))
    task = {"task": "worker 0", "examples": 9, "seconds": 10.0, "waited_for_tasks_seconds": 2.5}
    (out / run.name / "tasks" / "worker-0.json").write_text(json.dumps(task))
    if staleness is not None:
        server = {"task": "ps 0", "examples": 9, "pushes": 8, "staleness": staleness}
        (out / run.name / "tasks" / "ps-0.json").write_text(json.dumps(server))
    machine = {"cpu": "abacus", "cores": 2, "torch": "2"}
    facts = {"epochs": None, "cpus": run.cpus, "seconds": 70.0, "machine": machine}
    (out / f"{run.name}.json").write_text(json.dumps(facts))


def test_the_table_says_what_the_run_folders_hold(tmp_path: Path) -> None:
    both, servers = Run(Study("digits"), QUARTER), Run(Study("digits", ps=1), "1")
    make_run(tmp_path, both, seconds=8.0)
    make_run(tmp_path, servers, seconds=4.0, staleness={"0": 6, "2": 2})
    found = write_results(tmp_path, [both.name, servers.name])
    assert "Measured on: abacus, 2 cores, torch 2." in found
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in found.splitlines()[2:]]
    assert rows[2] == [
        *("digits, asynchronous", "1 and 1", "60.00%", "60.00%", "0.4500", "8.0 s", "1:10"),
        *("80.0", "25.0%", "0.50 / 2"),
    ]
    assert rows[3] == [
        *("digits, synchronous", "1 and 0.25", "60.00%", "60.00%", "0.4500", "16.0 s", "1:10"),
        *("40.0", "25.0%", "–"),
    ]
    pictures = {path.name: path.read_text() for path in (tmp_path / "pictures").iterdir()}
    kinds, figures = ("synchronous", "asynchronous"), ("accuracy", "loss")
    expected = {f"digits_{kind}_{figure}.svg" for kind in kinds for figure in figures}
    assert set(pictures) == expected | {"digits_time.svg"}
    assert "Digits, synchronous: loss" in pictures["digits_synchronous_loss.svg"]


def test_the_page_takes_the_newest_results(tmp_path: Path) -> None:
    run = Run(Study("digits"), "1")
    make_run(tmp_path / "out", run, seconds=8.0)
    write_results(tmp_path / "out", [run.name])
    page = tmp_path / "docs" / "study.md"
    page.parent.mkdir()
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    for _ in range(2):
        write_docs(tmp_path / "out", page)
        text = page.read_text()
        assert text.startswith(f"before\n{BEGIN}\n\nMeasured on: abacus")
        assert text.endswith(f"{END}\nafter\n")
        assert text.count("| digits, synchronous |") == 1
        assert "old" not in text
    assert (tmp_path / "pictures/study/digits_synchronous_loss.svg").exists()


def test_the_page_shows_pictures_that_are_there() -> None:
    shown = re.findall(r"\]\((\.\./pictures/study/[^)]+)\)", DOCS.read_text())
    assert len(shown) == 10
    assert all(0 < (DOCS.parent / path).stat().st_size < 100_000 for path in shown)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "--data names none"),
        (["--only", "digits_synchronous,cats"], "--only cats is no run"),
    ],
)
def test_a_mistake_starts_nothing(
    words: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    monkeypatch.setattr(sys, "argv", ["study", "--out", str(out), *words])
    with pytest.raises(UserError, match=says):
        study_main()
    assert not out.exists()


def test_what_has_run_is_not_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(Study("digits"), "1")
    make_run(tmp_path, run, seconds=8.0)
    monkeypatch.setenv("PATH", str(tmp_path))  # where no engine is
    monkeypatch.setattr(sys, "argv", ["study", "--out", str(tmp_path), "--only", run.name])
    assert study_main() == 0
    said = capsys.readouterr().out
    assert "digits_synchronous: has run already" in said
    assert "| digits, synchronous | 1 and 1 |" in said


@pytest.mark.docker
def test_a_study_in_containers(tmp_path: Path) -> None:
    run = Run(Study("digits", ps=1), "1")
    machine = {"cpu": "this", "cores": 2, "torch": "2"}
    assert not is_done(tmp_path, run, 1)
    assert perform(run, None, tmp_path, need_image(), 1, machine) == 0
    assert is_done(tmp_path, run, 1)
    assert not is_done(tmp_path, run, None)
    found = write_results(tmp_path, [run.name])
    assert "**A trial of 1 epochs.**" in found
    assert "| digits, asynchronous |" in found
