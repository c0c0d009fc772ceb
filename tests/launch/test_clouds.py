"""What ``spartito cluster sky`` and ``dstack`` write, and refuse; no cloud is needed.

``tests/launch/clouds_validation.py`` has the tools themselves read these files.
"""

from __future__ import annotations

import shlex
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml

from spartito.cli import main
from spartito.cluster import resolve
from spartito.errors import UserError
from spartito.launch.clouds.dstack import dstack_file
from spartito.launch.clouds.launcher import Dstack, Sky
from spartito.launch.clouds.sky import sky_file
from spartito.launch.job import Program
from spartito.registry import strategy_info, strategy_names
from tests.cluster.environments import dstack, skypilot
from tests.launch.clouds_validation import complaints
from tests.launch.jobs import asked

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "clouds"
DOCUMENTED = ROOT / "docs" / "clusters.md"
KEPT = {"sky": Path("s3://bucket/runs"), "dstack": Path("/mnt/runs")}
both = pytest.mark.parametrize("tool", ["sky", "dstack"])


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def text_of(tool: str, target: str = "mnist", *arguments: str, **options: Any) -> str:
    program = Program.find(target, arguments)
    if tool == "dstack":
        options.setdefault("out", KEPT[tool])
        launcher, job = asked(Dstack, program, **options)
        return dstack_file(launcher.plan(job))
    skies, job = asked(Sky, program, **options)
    return sky_file(skies.plan(job))


def written(tool: str, target: str = "mnist", *arguments: str, **options: Any) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(text_of(tool, target, *arguments, **options))
    return found


def many() -> list[tuple[str, str]]:
    """Files of each strategy, with and without GPUs, by tool."""
    found = []
    for tool, name, gpus in product(KEPT, strategy_names(), (False, True)):
        info = strategy_info(name)
        options: dict[str, Any] = {"workers": 1 if info.one_machine else 3, "strategy": name}
        if info.needs_servers:
            options |= {"ps": 2, "chief": True, "evaluator": True}
        if gpus:
            options |= {"gpus": True, "gpu_type": "A100-80GB", "spot": True, "ports": "4000"}
        if gpus or info.needs_servers or tool == "dstack":
            options["out"] = KEPT[tool]
        found.append((tool, text_of(tool, **options)))
    Path("train.py").write_text("import this\n")
    Path("pictures").mkdir()
    for tool in KEPT:
        whole: dict[str, Any] = {"workers": 2, "out": KEPT[tool], "image": "a.example/b:1"}
        data = Path("pictures" if tool == "sky" else "/mnt/pictures")
        found.append((tool, text_of(tool, "train.py", "a 'b'\n c", "${x}", data=data, **whole)))
        found.append((tool, text_of(tool, data=Path("https://e.example/a b.tgz"), **whole)))
    found.append(("sky", text_of("sky", data=Path("gs://d"), out=KEPT["sky"], restarts=2)))
    found.append(("dstack", text_of("dstack", out=Path("kept"), data=Path("pictures"))))
    return found


@pytest.mark.slow
def test_every_file_is_what_the_tool_reads() -> None:
    files = many()
    for (tool, text), said in zip(files, complaints(files), strict=True):
        assert said == "", f"{tool}: {said}\n{text}"


@pytest.mark.slow
def test_the_tools_refuse_what_they_do_not_know() -> None:
    wrong = []
    for tool in KEPT:
        document = written(tool, workers=2)
        for change in ({"replicas": 2}, {"resources": {"cpus": "many", "cpu": "many"}}):
            wrong.append((tool, yaml.safe_dump({**document, **change})))
    assert all(complaints(wrong))


@both
def test_each_node_reads_who_it_is(tool: str) -> None:
    told = ["chief 0", "worker 0", "worker 1", "ps 0", "evaluator 0"]
    options: dict[str, Any] = {"workers": 2, "ps": 1, "chief": True, "evaluator": True}
    document = written(tool, out=KEPT[tool], **options)
    said = document["envs"] if tool == "sky" else document["env"]
    nodes = document["num_nodes"] if tool == "sky" else document["nodes"]
    node = skypilot if tool == "sky" else dstack
    specs = [resolve(node(rank, nodes) | said) for rank in range(nodes)]
    assert [str(spec.task) for spec in specs] == told
    assert said["SPARTITO_STRATEGY"] == "parameter_server"


def test_workers_alone_have_gpus_with_dstack() -> None:
    groups = written("dstack", workers=2, ps=1, evaluator=True, gpus=True)["groups"]
    assert [(one["name"], one["nodes"], "gpu" in one["resources"]) for one in groups] == [
        ("worker", 2, True),
        ("ps", 1, False),
        ("evaluator", 1, False),
    ]
    assert "groups" not in written("dstack", workers=2, gpus=True)


def test_what_starts_again() -> None:
    found = written("sky", workers=2, out=KEPT["sky"])["resources"]["job_recovery"]
    assert found == {"max_restarts_on_errors": 0, "recover_on_exit_codes": [75]}
    found = written("sky", workers=2, out=KEPT["sky"], restarts=3)["resources"]["job_recovery"]
    assert found["max_restarts_on_errors"] == 3
    assert "job_recovery" not in written("sky", workers=2)["resources"]
    assert written("dstack")["retry"]["on_events"] == ["no-capacity", "interruption"]


@both
def test_words_reach_the_script_as_they_were_typed(tool: str) -> None:
    Path("train.py").write_text("")
    words = ["a b", "$HOME", "it's", "--x=~/y", "new\nline", "\\n"]
    document = written(tool, "train.py", *words)
    line = document["run"].partition("exec ")[2] if tool == "sky" else document["commands"][-1]
    read = shlex.split(line)
    assert read[-len(words) :] == words
    where = {"sky": "$HOME/sky_workdir/train.py", "dstack": "/scripts/train.py"}[tool]
    assert read[-len(words) - 1] == where


def test_a_job_of_one_needs_no_secret() -> None:
    assert "secrets" not in written("sky")
    assert "SPARTITO_SECRET" not in written("dstack")["env"]
    assert written("sky", workers=2, insecure=True)["envs"]["SPARTITO_TLS"] == "off"
    assert (
        written("dstack", workers=2)["env"]["SPARTITO_SECRET"] == "${{ secrets.spartito_secret }}"
    )


def test_a_wheel_goes_along() -> None:
    Path("spartito-9-py3-none-any.whl").write_text("")
    found = written("sky", package="spartito-9-py3-none-any.whl")
    there = "~/packages/spartito-9-py3-none-any.whl"
    assert found["file_mounts"] == {there: "./spartito-9-py3-none-any.whl"}
    assert there in found["setup"]
    assert "pip install" not in written("sky", setup=("true",))["setup"]
    assert "'spartito[remote]>=1'" in written("sky", package="spartito[remote]>=1")["setup"]


NONE = "--out"
"""Stands for no option at all."""

REFUSED = [
    (["--cpus=many"], "--cpus 'many' is no quantity"),
    (["--memory=1Mi"], "--memory 1Mi is too small"),
    (["--image=a/B"], "--image 'a/B' is no name of an image"),
    (["--name=Mnist"], "--name 'Mnist' cannot name a job"),
    (["--name=m"], "2 to 40 small letters"),
    (["--name=" + "m" * 41], "2 to 40 small letters"),
    (["--workers=2", "--strategy=mirrored"], "each task has a node of its own"),
    (["--ps=1", "--strategy=multi_worker_mirrored"], "it has no parameter servers"),
    (["--chief"], "--chief without --ps"),
    (["--ports=90000"], "is not a range of ports"),
    (["--gpu-type=L4"], "--gpu-type L4 without --gpus"),
    (["--gpus", "--gpu-type=L 4"], "--gpu-type 'L 4' is no name of a GPU"),
    (["--setup= "], "--setup ' ' is not one line"),
    (["--setup=a\nb"], "is not one line"),
    (["--data=ftp://a/b"], "ftp:"),
    (["--", "--out=x"], "--out after --"),
]
OWN = {
    "sky": [
        (["--gpus"], "SkyPilot wants to know which"),
        (["--spot"], "--spot without --out"),
        (["--evaluator", "--ps=1"], "--evaluator without --out"),
        (["--restarts=1"], "--restarts without --out"),
        (["--out=runs"], "--out runs is no bucket"),
        (["--out=s3://a b"], "--out 's3:/a b' has ' '"),
        (["--data=none"], "--data none is no folder"),
        (["--package=none.whl"], "--package none.whl is no file"),
        (["--package=-e ."], "nothing that pip installs"),
        (["--package=x", "--setup=true"], "--setup and --package x"),
        (["--package=x", "--image=a.example/b:1"], "--image a.example/b:1 and --package x"),
    ],
    "dstack": [
        ([NONE], "no --out"),
        (["--cpus=500m"], "dstack counts whole ones"),
        (["--out=a_b"], "neither a folder of the machines nor the name of a volume"),
        (["--out=/mnt/../etc"], "no folder that dstack mounts"),
        (["--out=/"], "no folder that dstack mounts"),
        (["--out=kept", "--workers=2"], "a volume is attached to one machine"),
        (["--", "${{ secrets.a }}"], "dstack would put a value in"),
    ],
}


@pytest.mark.parametrize(
    ("tool", "words", "told"),
    [(tool, *case) for tool in OWN for case in [*REFUSED, *OWN[tool]]],
)
def test_what_the_tools_could_not_run_is_refused_before_anything_is_written(
    tool: str, words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    typed = [word for word in words if word != NONE]
    own = ["--out=/mnt/runs"] if tool == "dstack" and not words[0].startswith("--out") else []
    assert main(["cluster", tool, "mnist", *own, *typed]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert told in err, err
    assert not list(Path.cwd().iterdir())


def test_folders_that_the_tools_would_read_otherwise_are_refused() -> None:
    for name in ("a:b", "a$b"):
        Path(name).mkdir()
        Path(name, "train.py").write_text("")
        for tool in KEPT:
            with pytest.raises(UserError, match="which the tool would read"):
                text_of(tool, f"{name}/train.py")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("sky.yaml", ["sky", "mnist", "--workers=4", "--", "--epochs=3"]),
        (
            "sky-spot.yaml",
            ["sky", "mnist", "--chief", "--workers=2", "--ps=2", "--evaluator", "--spot",
             "--out=s3://bucket/runs", "--", "--epochs=3"],
        ),
        ("dstack.yml", ["dstack", "mnist", "--workers=4", "--out=/mnt/runs", "--", "--epochs=3"]),
        (
            "dstack-gpus.yml",
            ["dstack", "mnist", "--workers=2", "--ps=1", "--gpus", "--gpu-type=L4", "--spot",
             "--out=/mnt/runs", "--image=registry.example/team/spartito:1.0"],
        ),
    ],
)  # fmt: skip
def test_the_examples_are_what_the_command_writes(
    name: str, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["cluster", *words]) == 0
    made = capsys.readouterr().out
    assert made == (EXAMPLES / name).read_text()
    if name in ("sky.yaml", "dstack.yml"):
        assert f"```yaml\n{made}```" in DOCUMENTED.read_text()
