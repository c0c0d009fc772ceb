from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spartito.cli import main
from spartito.cluster.slurm import from_slurm
from spartito.declared import Declared, parse
from spartito.errors import UserError
from spartito.launch.processes.roles import Roles
from spartito.launch.slurm.file import BatchJob, batch_file
from spartito.launch.slurm.launcher import Slurm
from spartito.launch.slurm.values import time_seconds
from tests.launch.jobs import plan_batch
from tests.launch.played_slurm import options, played

DOCUMENTED = Path(__file__).parents[2] / "docs" / "guides" / "clusters" / "slurm.md"
CASTS = st.builds(Roles, st.integers(1, 6), st.integers(0, 3), st.booleans())


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "digits").mkdir()
    (tmp_path / "train.py").write_text("")
    monkeypatch.chdir(tmp_path)


@settings(max_examples=20)
@given(CASTS, st.data())
def test_slurms_tasks_have_the_roles_that_were_asked_for(roles: Roles, data: st.DataObject) -> None:
    nodes = data.draw(st.integers(1, len(roles.tasks)))
    job = BatchJob(
        "digits", "mnist", ("python",), Declared("parameter_server"), roles, Slurm(nodes=nodes)
    )
    asked, (_, told, _) = options(batch_file(job)), played(batch_file(job))
    tasks = int(asked["ntasks"])
    here, more = divmod(tasks, nodes)
    assert ("ntasks-per-node" in asked) == (more == 0)
    assert int(asked.get("ntasks-per-node", here)) == here
    if tasks == 1:
        return
    step = {
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": str(tasks),
        "SLURM_STEP_NODELIST": f"n[1-{nodes}]",
        "SLURM_STEP_TASKS_PER_NODE": ",".join(str(here + (n < more)) for n in range(nodes)),
    }
    specs = [from_slurm(told | step | {"SLURM_PROCID": str(rank)}) for rank in range(tasks)]
    assert [spec.task for spec in specs if spec is not None] == list(roles.tasks)


def test_the_documented_file_is_what_is_written() -> None:
    (shown,) = re.findall(
        r"```bash\n(#!/bin/bash\n# mnist.*?)```", DOCUMENTED.read_text(), re.DOTALL
    )
    plan = plan_batch(
        "mnist",
        ["--epochs=3"],
        nodes=2,
        workers=4,
        cpus_per_task=4,
        time="01:00:00",
        partition="batch",
        python="/home/user/.venv/bin/python",
    )
    assert shown == batch_file(plan)


def test_a_recipe_gets_its_folders() -> None:
    plan = plan_batch("mnist", ["--epochs=1"], workers=2, data="digits")
    words, told, _ = played(batch_file(plan))
    assert words == [
        "--cpus-per-task=1",
        "--kill-on-bad-exit=0",
        "--label",
        *(sys.executable, "-m", "spartito.recipes.mnist"),
        *("--out=runs/mnist-7", "--data=digits", "--epochs=1"),
    ]
    assert told["SPARTITO_RUN_DIR"] == "runs/mnist-7"
    assert told["SPARTITO_STRATEGY"] == "multi_worker_mirrored"


def test_a_script_is_started_where_it_lies(tmp_path: Path) -> None:
    plan = plan_batch("train.py", ["--x", "1"], ps=1, python="python3", out=tmp_path / "runs")
    words, told, _ = played(batch_file(plan))
    assert words[-4:] == ["python3", "train.py", "--x", "1"]
    assert (told["SPARTITO_RUN_DIR"], told["SPARTITO_PS"]) == ("runs", "1")
    assert plan.name == "train"
    (tmp_path / "below").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path / "below")
        far = plan_batch("../train.py", out=Path("../runs"))
    assert (far.command[-1], far.out) == (str(tmp_path / "train.py"), str(tmp_path / "runs"))


@settings(max_examples=20)
@given(st.text(st.characters(exclude_characters="\0\r\n", codec="utf-8"), min_size=1), st.text())
def test_the_shell_changes_no_word(word: str, said: str) -> None:
    asked = Declared("local_sgd", {"weights": said, "inside": Declared("sharded", {"zero": 2})})
    text = batch_file(plan_batch("train.py", [word, "end"], strategy=str(asked)))
    words, told, _ = played(text)
    assert words[-2:] == [word, "end"]
    assert parse(told["SPARTITO_STRATEGY"]) == asked


def test_what_slurm_is_asked_for() -> None:
    plan = plan_batch(
        "mnist",
        nodes=2,
        workers=4,
        partition="gpu,gpu-long",
        account="physics",
        time="1-12",
        gres="gpu:a100:2",
        signal="R:SIGUSR1@120",
        cpus_per_task=3,
        memory="8g",
        name="Digits.1",
    )
    assert options(batch_file(plan)) == {
        "job-name": "Digits.1",
        "partition": "gpu,gpu-long",
        "account": "physics",
        "nodes": "2",
        "ntasks": "4",
        "ntasks-per-node": "2",
        "cpus-per-task": "3",
        "mem": "8192M",
        "gres": "gpu:a100:2",
        "time": "1-12",
        "signal": "R:SIGUSR1@120",
        "output": "%x-%j.out",
        "open-mode": "append",
    }


def test_what_clusters_want_of_their_users() -> None:
    plan = plan_batch(
        "mnist",
        workers=2,
        qos="high",
        constraint="[rack1*2]&a100|h100",
        gpus_per_node="a100:2",
        exclusive=True,
        sbatch=["--mail-type=END", "--reservation 'my own'"],
        setup=["module load cuda", 'export GREETING="a  b"'],
    )
    text = batch_file(plan)
    found = options(text)
    assert [found[name] for name in ("qos", "constraint", "gpus-per-node", "mail-type")] == [
        *("high", "[rack1*2]&a100|h100", "a100:2", "END")
    ]
    assert "\n#SBATCH --exclusive\n" in text
    assert "\n#SBATCH --reservation 'my own'\n" in text
    last = text.rindex("#SBATCH")
    assert last < text.index("module load cuda") < text.index("export SPARTITO_STRATEGY")
    _, told, _ = played(text.replace("module load cuda\n", ""))
    assert told["GREETING"] == "a  b"


def test_workers_spread_over_the_nodes_and_servers_beside_them() -> None:
    assert "distribution" not in options(batch_file(plan_batch("mnist", nodes=2, workers=4)))
    for others in ({"ps": 2}, {"evaluator": True}):
        plan = plan_batch("mnist", nodes=2, workers=2, **others)
        assert options(batch_file(plan))["distribution"] == "cyclic"


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"strategy": "mirored"}, r"'mirored' is not a strategy\n  Did you mean 'mirrored'"),
        ({"strategy": "mirrored", "workers": 2, "nodes": 2}, "mirrored is for one machine"),
        ({"strategy": "central_storage", "workers": 2, "nodes": 2}, "for one machine"),
        ({"strategy": "one_device", "workers": 2}, "1 process, but 2 are asked for"),
        ({"strategy": "parameter_server"}, "Add one by --ps 1"),
        ({"strategy": "mirrored", "ps": 1}, "has no parameter servers"),
        ({"nodes": 3, "ps": 1}, "--nodes 3 are more than the job's 2 tasks"),
        ({"strategy_options": "{"}, "is not JSON"),
        ({"data": "nowhere"}, "--data nowhere is no folder"),
        ({"name": "a job"}, "cannot name a job"),
        ({"partition": "a b"}, "--partition 'a b'"),
        ({"account": "x\n#SBATCH --nodes=9"}, "--account"),
        ({"gres": ""}, "--gres ''"),
        ({"gres": "gpu:1", "workers": 2}, "1 GPU for each node, where 2 workers"),
        ({"gpus_per_node": "1", "workers": 2}, "1 GPU for each node, where 2 workers"),
        ({"gpus_per_node": "all"}, "--gpus-per-node 'all' is no number"),
        ({"gpus_per_node": "2", "gres": "gpu:2"}, "say both how many GPUs"),
        ({"constraint": "a b"}, "--constraint 'a b'"),
        ({"qos": ""}, "--qos ''"),
        ({"out": Path("a\n#SBATCH --nodes=9")}, "--out .* cannot be printed"),
        ({"sbatch": ["mail-type=END"]}, "is no option of sbatch"),
        ({"sbatch": ["--x\n#SBATCH --nodes=9"]}, "is no option of sbatch"),
        ({"sbatch": ["--nodes=9"]}, "this command says --nodes itself"),
        ({"sbatch": ["-a 0-3"]}, "this command says --array itself"),
        ({"sbatch": ["-n9"]}, "this command says --ntasks itself"),
        ({"setup": ["a\nb"]}, "is not one line"),
        ({"setup": ["#SBATCH --x"]}, "too late for Slurm"),
        ({"time": "soon"}, "--time 'soon' is no time limit"),
        ({"time": "01:75:00"}, "no time limit"),
        ({"signal": "USR9"}, "--signal 'USR9'"),
        ({"signal": "USR1@soon"}, "--signal 'USR1@soon'"),
        ({"signal": "0@60"}, "--signal '0@60'"),
        ({"signal": "9@60"}, "no script can handle this signal"),
        ({"signal": "USR1@70000"}, "70000 seconds before the end are too many"),
        ({"signal": "B:USR1@120"}, "with USR1@120 each task gets the signal"),
        ({"signal": "USR1@120", "time": "1"}, "--time gives only 60 s"),
        ({"signal": "USR1", "time": "1"}, "60 s before the end"),
        ({"memory": "lots"}, "no amount of memory"),
        ({"memory": "500m", "workers": 4, "nodes": 2}, "600m for the tasks there"),
    ],
)
def test_what_cannot_run_is_refused_at_once(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        plan_batch("mnist", **asked)


def test_the_command_writes_the_file_or_ends_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cluster", "slurm", "mnist", "--workers=2", "--", "--epochs=1"]) == 0
    assert capsys.readouterr().out == batch_file(plan_batch("mnist", ["--epochs=1"], workers=2))
    for words in (["mnits"], ["mnist", "--nodes=0"], ["mnist", "--cpus-per-task=x"]):
        assert main(["cluster", "slurm", *words]) == 2
        said = capsys.readouterr()
        assert said.out == ""
        assert said.err.startswith("spartito: error: ")


@pytest.mark.parametrize("words", [["--out=/x"], ["--data", "/x"]])
def test_a_recipes_folders_are_options_of_the_command(words: list[str]) -> None:
    with pytest.raises(UserError, match="before the --"):
        plan_batch("mnist", words)


def test_targets_that_cannot_be() -> None:
    with pytest.raises(UserError, match="Did you mean 'mnist'"):
        plan_batch("mnits")
    with pytest.raises(UserError, match="--data digits is for recipes"):
        plan_batch("train.py", data="digits")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 5400),
        ("90:30", 5430),
        ("01:30:00", 5400),
        ("100:00:01", 360_001),
        ("2-12", 216_000),
        ("2-12:30", 217_800),
        ("2-12:30:15", 217_815),
        ("0", None),
        ("UNLIMITED", None),
    ],
)
def test_time_limits_as_slurm_writes_them(text: str, seconds: int | None) -> None:
    assert time_seconds(text) == seconds
