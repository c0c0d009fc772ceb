"""What ``spartito cluster sky`` and ``dstack`` write, and refuse; no cloud is needed.

``tests/launch/clouds_validation.py`` has the tools themselves read these files.
"""

from __future__ import annotations

import json
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
from spartito.launch.clouds.package import installed_package
from spartito.launch.clouds.sky import sky_file
from spartito.launch.job import Program
from spartito.launch.yaml_text import comment
from spartito.registry import strategy_info, strategy_names
from tests.cluster.orchestrated import dstack, skypilot
from tests.launch.clouds_validation import complaints
from tests.launch.jobs import asked

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "clouds"
DOCUMENTED = ROOT / "docs" / "guides" / "clusters" / "clouds.md"
IMAGE = "registry.example/team/spartito:1.0"
WHEEL = "spartito-0.1.0-py3-none-any.whl"
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


def environment(document: dict[str, Any]) -> dict[str, str]:
    """The variables of a file for dstack; without a value those of the shell."""
    return {line.partition("=")[0]: line.partition("=")[2] for line in document["env"]}


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
        data = "pictures" if tool == "sky" else "/mnt/pictures"
        found.append((tool, text_of(tool, "train.py", "a 'b'\n c", "${x}", data=data, **whole)))
        found.append((tool, text_of(tool, data="https://e.example/a b.tgz", **whole)))
    found.append(("sky", text_of("sky", data="gs://d", out=KEPT["sky"], restarts=2)))
    found.append(("dstack", text_of("dstack", out=Path("kept"), data="pictures")))
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
    said = document["envs"] if tool == "sky" else environment(document)
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
    assert "SPARTITO_SECRET" in written("dstack", workers=2)["env"]  # the shell's, no value here


def test_a_wheel_goes_along() -> None:
    Path("spartito-9-py3-none-any.whl").write_text("")
    found = written("sky", package="spartito-9-py3-none-any.whl")
    there = "~/packages/spartito-9-py3-none-any.whl"
    assert found["file_mounts"] == {there: "./spartito-9-py3-none-any.whl"}
    assert there in found["setup"]
    assert "pip install" not in written("sky", setup=("true",))["setup"]
    assert "'spartito[remote]>=1'" in written("sky", package="spartito[remote]>=1")["setup"]


def test_a_version_that_no_index_may_have_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wheel = tmp_path / "spartito-9-py3-none-any.whl"
    wheel.write_text("")
    notes = {
        "pip install spartito": (None, "spartito==9"),
        "pip install DIR": ({"url": "file:///src/a%20b", "dir_info": {}}, "spartito==9"),
        "pip install WHEEL": ({"url": wheel.as_uri(), "archive_info": {}}, f"./{wheel.name}"),
        "a wheel that is gone": ({"url": "file:///a.whl", "archive_info": {}}, "spartito==9"),
        "pip install URL": (
            {"url": "https://e.example/spartito-9.whl", "archive_info": {}},
            "spartito @ https://e.example/spartito-9.whl",
        ),
        "pip install git+URL": (
            {"url": "https://e.example/s.git", "vcs_info": {"vcs": "git", "commit_id": "c0"}},
            "spartito @ git+https://e.example/s.git@c0",
        ),
    }
    for how, (told, expected) in notes.items():
        info = tmp_path / how.replace("/", "") / "spartito-9.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: spartito\nVersion: 9\n")
        if told is not None:
            (info / "direct_url.json").write_text(json.dumps(told))
        with monkeypatch.context() as found:
            found.syspath_prepend(info.parent)
            package, folder = installed_package()
        assert package == expected, how
        assert bool(folder) == (how in ("pip install DIR", "a wheel that is gone"))
    package, folder = installed_package()
    for words in ([], ["--package=./spartito-9-py3-none-any.whl"], ["--image=a.example/b:1"]):
        assert main(["cluster", "sky", "mnist", *words]) == 0
        out, err = capsys.readouterr()
        named = bool(folder) and not words
        assert ("an index may not have it" in " ".join(err.split())) == named
        assert ("an index may not have it" in " ".join(out.replace("#", "").split())) == named


def test_an_image_that_machines_ask_docker_io_for_is_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for words, named in (([], True), (["--image=a.example/b:1"], False)):
        assert main(["cluster", "dstack", "mnist", "--out=/mnt/runs", *words]) == 0
        out, err = capsys.readouterr()
        assert ("names no registry" in err) == named
        assert ("names no registry" in " ".join(out.replace("#", "").split())) == named


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
        ("sky.yaml", ["sky", "mnist", "--workers=4", f"--package={WHEEL}", "--", "--epochs=3"]),
        (
            "sky-spot.yaml",
            ["sky", "mnist", "--chief", "--workers=2", "--ps=2", "--evaluator", "--spot",
             f"--package={WHEEL}", "--out=s3://bucket/runs", "--", "--epochs=3"],
        ),
        (
            "dstack.yml",
            ["dstack", "mnist", "--workers=4", "--out=/mnt/runs", f"--image={IMAGE}", "--",
             "--epochs=3"],
        ),
        (
            "dstack-gpus.yml",
            ["dstack", "mnist", "--workers=2", "--ps=1", "--gpus", "--gpu-type=L4", "--spot",
             "--out=/mnt/runs", f"--image={IMAGE}"],
        ),
    ],
)  # fmt: skip
def test_the_examples_are_what_the_command_writes(
    name: str, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    Path(WHEEL).write_text("")
    assert main(["cluster", *words]) == 0
    made = capsys.readouterr().out
    assert made == (EXAMPLES / name).read_text()
    if name in ("sky.yaml", "dstack.yml"):
        assert f"```yaml\n{made}```" in DOCUMENTED.read_text()


def test_a_comment_breaks_no_name_at_its_hyphens() -> None:
    for before in range(60, 100):
        words = ["x" * before, WHEEL, "--storage-class"]
        assert "\n".join(comment(" ".join(words))).replace("\n#", "").split()[1:] == words
