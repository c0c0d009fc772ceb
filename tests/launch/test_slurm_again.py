"""How a batch file ends: what comes again, how often, and what is left of its secret."""

from __future__ import annotations

import re
import shlex
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from spartito.cli import main
from spartito.errors import UserError
from spartito.launch.slurm.file import batch_file
from spartito.launch.slurm.values import parse_array
from tests.launch.jobs import plan_batch
from tests.launch.played_slurm import options, played, run

OF_ARRAY = {"SLURM_JOB_ID": "12", "SLURM_ARRAY_JOB_ID": "10", "SLURM_ARRAY_TASK_ID": "3"}


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_who_was_told_to_end_comes_again() -> None:
    text = batch_file(plan_batch("mnist"))
    assert "#SBATCH --requeue\n" in text
    ended = run(text, 75)
    assert (ended.returncode, ended.stdout) == (75, "scontrol requeue 7\n")
    assert ended.stderr == "spartito: 75: restart 1, of 100 at most\n"


def test_there_is_a_last_restart() -> None:
    text = batch_file(plan_batch("mnist", restarts=2))
    assert "restart 2, of 2 at most" in run(text, 75, SLURM_RESTART_COUNT="1").stderr
    ended = run(text, 75, SLURM_RESTART_COUNT="2")
    assert (ended.returncode, ended.stdout) == (75, "")
    assert ended.stderr == "spartito: 75: no restart after 2 of them\n"
    Path("srun.words").unlink()
    ended = run(text, SLURM_RESTART_COUNT="3")  # Slurm's own: the nodes are lost each time
    assert ended.returncode == 69
    assert ended.stderr == "spartito: restart 3, and 2 are the limit\n"
    assert not Path("srun.words").exists()


@pytest.mark.parametrize("code", [69, 137, 143])
def test_a_lost_task_has_a_few_tries(code: int) -> None:
    text = batch_file(plan_batch("mnist", retries=2))
    for restarts in ("0", "5"):
        ended = run(text, code, SLURM_RESTART_COUNT=restarts)
        assert (ended.returncode, ended.stdout) == (69, "scontrol requeue 7\n")
    ended = run(text, code, SLURM_RESTART_COUNT="6")
    assert (ended.returncode, ended.stdout) == (69, "")
    assert "no restart after 6" in ended.stderr
    assert run(text, 75, SLURM_RESTART_COUNT="6").stdout == "scontrol requeue 7\n"


@pytest.mark.parametrize("code", [0, 1, 2, 138])
def test_what_would_end_so_again_does_not_come_again(code: int) -> None:
    ended = run(batch_file(plan_batch("mnist")), code)
    assert (ended.returncode, ended.stdout, ended.stderr) == (code, "", "")


@pytest.mark.parametrize(("code", "expected"), [(75, 75), (137, 69), (2, 2)])
def test_without_restarts_a_job_runs_once(code: int, expected: int) -> None:
    text = batch_file(plan_batch("mnist", restarts=0))
    assert "#SBATCH --no-requeue\n" in text
    ended = run(text, code)
    assert (ended.returncode, ended.stdout, ended.stderr) == (expected, "", "")


@pytest.mark.parametrize(
    ("codes", "of_srun", "expected", "again"),
    [
        ("2 69 69", 69, 2, False),
        ("69 2", 69, 2, False),
        ("0 1 69", 69, 1, False),
        ("69 1", 69, 69, True),
        ("137 69 1", 137, 69, True),
        ("75 75", 75, 75, True),
        ("0 0", 69, 69, True),  # srun lost its node
    ],
)
def test_the_task_that_failed_first_decides(
    codes: str, of_srun: int, expected: int, again: bool
) -> None:
    ended = run(batch_file(plan_batch("mnist", workers=2)), of_srun, CODES=codes)
    assert (ended.returncode, "scontrol requeue 7" in ended.stdout) == (expected, again)
    assert [path.name for path in Path("runs/mnist-7").iterdir()] == [".lost-7"] * (expected == 69)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_setup_that_ends_the_shell_at_errors_changes_nothing(workers: int) -> None:
    ended = run(batch_file(plan_batch("mnist", workers=workers, setup=["set -euo pipefail"])), 75)
    assert (ended.returncode, ended.stdout) == (75, "scontrol requeue 7\n")


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGXCPU, signal.SIGRTMIN + 3])
def test_a_signal_by_its_number_reaches_the_task_and_not_the_shell(number: int) -> None:
    text = batch_file(plan_batch("mnist", workers=2, signal=f"{int(number)}@60"))
    shell = text.partition("task='")[2].partition("'\n")[0]
    kills = f"trap 'exit 75' {int(number)}; kill -{int(number)} $PPID $$"
    ended = subprocess.run(
        ["/bin/bash", "-c", shell, "task", "/bin/bash", "-c", kills], env={"codes": "codes"}
    )
    assert (ended.returncode, Path("codes").read_text()) == (75, "75\n")


def test_what_a_lost_node_left_goes_at_the_next_start() -> None:
    folder = Path("runs/mnist-7")
    folder.mkdir(parents=True)
    for name in (".secret-7-0", ".codes-7-0", ".secret-8-0"):
        (folder / name).write_text("2\n")
    ended = run(batch_file(plan_batch("mnist", workers=2)), 75, SLURM_RESTART_COUNT="1")
    assert ended.returncode == 75
    assert [path.name for path in folder.iterdir()] == [".secret-8-0"]


def test_a_script_that_is_ended_leaves_no_secret() -> None:
    text = batch_file(plan_batch("mnist", workers=2))
    ended = run(text.replace("|| code=$?\nif", "|| code=$?\nkill $$; sleep 9\nif"))
    assert ended.returncode != 0
    assert Path("srun.secret").exists()
    assert not list(Path("runs/mnist-7").iterdir())


def test_the_secret_is_in_a_file_of_the_user_alone_and_goes() -> None:
    text = batch_file(plan_batch("mnist", workers=2, out=Path("a folder")))
    found = set()
    for restarts in ("0", "1"):
        _, told, _ = played(text, SPARTITO_SECRET="of the shell", SLURM_RESTART_COUNT=restarts)
        kept = Path("srun.secret")
        assert re.fullmatch("[0-9a-f]{64}", kept.read_text())
        assert kept.stat().st_mode & 0o777 == 0o600
        assert kept.read_text() not in "".join(told.values())
        assert "SPARTITO_SECRET" not in told
        assert Path(told["SPARTITO_SECRET_FILE"]).is_absolute()
        assert not list(Path("a folder").iterdir())
        found.add(kept.read_text())
    assert len(found) == 2


def test_a_secret_of_the_users_own_stays() -> None:
    own = Path("own")
    own.write_text("x" * 20)
    text = batch_file(plan_batch("mnist", workers=2))
    _, told, _ = played(text, SPARTITO_SECRET_FILE=str(own))
    assert told["SPARTITO_SECRET_FILE"] == "own"
    assert own.read_text() == "x" * 20


def test_a_run_folder_that_cannot_be_made_ends_it_before_it_starts() -> None:
    Path("runs").write_text("")
    ended = run(batch_file(plan_batch("mnist")), 0)
    assert ended.returncode == 2
    assert "'runs'" in ended.stderr
    assert not Path("srun.words").exists()


def test_runs_of_an_array_share_nothing() -> None:
    text = batch_file(plan_batch("mnist", ["--seed={index}", "{index}"], workers=2, array="0-9%2"))
    asked = options(text)
    assert (asked["array"], asked["output"]) == ("0-9%2", "%x-%A_%a.out")
    words, told, _ = played(text, 0, **OF_ARRAY)
    assert words[-3:] == ["--out=runs/mnist-10_3", "--seed=3", "3"]
    assert told["SPARTITO_RUN_DIR"] == "runs/mnist-10_3"
    assert run(text, 75, **OF_ARRAY).stdout == "scontrol requeue 10_3\n"
    named = batch_file(plan_batch("mnist", array="3", out=Path("my runs")))
    assert played(named, 0, **OF_ARRAY)[1]["SPARTITO_RUN_DIR"] == "my runs/3"


def test_braces_mean_the_index_in_an_array_alone() -> None:
    words, _, _ = played(batch_file(plan_batch("mnist", ["{index}"])))
    assert words[-1] == "{index}"
    strange = "a 'b' {index} $HOME"
    words, _, _ = played(batch_file(plan_batch("mnist", [strange], array="3")), 0, **OF_ARRAY)
    assert words[-1] == "a 'b' 3 $HOME"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("7", (7, 7, 1)),
        ("0-9", (0, 9, 10)),
        ("9,1,3-5", (1, 9, 5)),
        ("0-90:10%2", (0, 90, 10)),
    ],
)
def test_indices_as_slurm_writes_them(text: str, found: tuple[int, int, int]) -> None:
    array = parse_array(text)
    assert (array.first, array.last, array.count) == found


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"array": ""}, "--array '': '' is no index"),
        ({"array": "a-b"}, "'a-b' is no index and no range"),
        ({"array": "-1"}, "'-1' is no index"),
        ({"array": "9-0"}, "the range 9-0 runs backwards"),
        ({"array": "0-9:0"}, "the step of 0-9:0 is 0"),
        ({"array": "1,1"}, "1 stands there twice"),
        ({"array": "0-9%0"}, "%0 does not say how many"),
        ({"array": "0-9%"}, "% does not say how many"),
        ({"array": "0-9%x"}, "%x does not say how many"),
        ({"array": "0-9999999"}, "more than any Slurm allows"),
        ({"array": "0-1", "nodes": 3, "workers": 2}, "--nodes 3 are more than the job's 2 tasks"),
        ({"array": "0-3", "workers": 2, "ports": "29500-29506"}, "are 7 ports, .* needs 8"),
        ({"array": "0-1", "ps": 1, "ps_nodes": 1}, "Slurm has no arrays of jobs with two kinds"),
        ({"ps_nodes": 1}, "--ps-nodes 1, but the job has no parameter servers"),
        ({"ps": 1, "ps_nodes": 2}, "--ps-nodes 2 are more than 1 task"),
        ({"ps": 1, "ps_nodes": 1, "nodes": 2}, "--nodes 2 are more than for 1 worker"),
        ({"ps": 1, "ps_partition": "cpu"}, "--ps-partition cpu, but no machines are for servers"),
        ({"ps": 1, "ps_memory": "8g"}, "--ps-memory 8g, but no machines are for servers"),
        ({"ps": 4, "ps_nodes": 1, "ps_memory": "500m"}, "--ps-memory 500m of each node is too"),
        ({"ps": 1, "ps_nodes": 1, "ps_memory": "x"}, "--ps-memory 'x' is no amount"),
        ({"container": "none.sif"}, "--container none.sif: there is no such file"),
        ({"container": "docker://x"}, "would be fetched by each task\n.*apptainer pull image.sif"),
        ({"container": "job.txt"}, "--container job.txt is no image of Apptainer"),
    ],
)
def test_what_cannot_run_is_refused_at_once(asked: dict[str, Any], message: str) -> None:
    Path("job.txt").write_text("no image\n" * 9)
    with pytest.raises(UserError, match=message):
        plan_batch("mnist", **asked)


@pytest.mark.parametrize(
    ("asked", "signal"),
    [
        ({"time": "01:00:00"}, "USR1@120"),
        ({"time": "5"}, "USR1@120"),
        ({"time": "3"}, "USR1@60"),
        ({"time": "01:00:00", "signal": "TERM@300"}, "TERM@300"),
        ({"time": "0"}, None),
        ({}, None),
    ],
)
def test_recipes_are_told_before_the_time_is_over(
    asked: dict[str, Any], signal: str | None
) -> None:
    assert options(batch_file(plan_batch("mnist", **asked))).get("signal") == signal
    Path("train.py").touch()
    of_script = options(batch_file(plan_batch("train.py", **asked))).get("signal")
    assert of_script == asked.get("signal")  # it may know no signal, and be killed by it


def test_servers_can_have_nodes_of_their_own() -> None:
    text = batch_file(
        plan_batch(
            "mnist",
            workers=4,
            nodes=2,
            ps=3,
            evaluator=True,
            ps_nodes=2,
            ps_partition="cpu",
            ps_memory="4g",
            partition="gpu",
            gpus_per_node="2",
            time="01:00:00",
            account="physics",
        )
    )
    workers, _, others = text.partition("#SBATCH hetjob\n")
    assert options(others) == {
        "partition": "cpu",
        "account": "physics",
        "nodes": "2",
        "ntasks": "4",
        "ntasks-per-node": "2",
        "cpus-per-task": "1",
        "mem": "4096M",
        "time": "01:00:00",
        "signal": "USR1@120",
    }
    asked = options(workers)
    assert (asked["nodes"], asked["ntasks"], asked["ntasks-per-node"]) == ("2", "4", "2")
    assert (asked["partition"], asked["gpus-per-node"]) == ("gpu", "2")
    assert "distribution" not in asked
    words, told, _ = played(text)
    assert "--het-group=0,1" in words
    assert told["SPARTITO_PS"] == "3"


def test_in_a_container_the_folders_have_their_names(tmp_path: Path) -> None:
    here = tmp_path / "here"
    here.mkdir()
    image = tmp_path / "my image.sif"
    image.write_bytes(b"#!/usr/bin/env run-singularity\n".ljust(32, b"\0") + b"SIF_MAGIC\0")
    (tmp_path / "data").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(here)
        plan = plan_batch(
            "mnist",
            workers=2,
            container="../my image.sif",
            data="../data",
            out=Path("runs/x"),
            gpus_per_node="2",
        )
        words, told, _ = played(batch_file(plan), PWD=str(here))
    assert words[3:] == [
        *(
            "apptainer",
            "exec",
            "--nv",
            f"--bind={here}",
            f"--bind={here}/runs/x",
            f"--bind={tmp_path}/data",
            f"--pwd={here}",
        ),
        *(str(image), "python", "-m", "spartito.recipes.mnist"),
        *("--out=runs/x", f"--data={tmp_path}/data"),
    ]
    assert told["PYTHONNOUSERSITE"] == "1"


def test_links_mean_nothing_in_a_container(tmp_path: Path) -> None:
    for name in ("real", "scratch", "code"):
        (tmp_path / name).mkdir()
    (tmp_path / "code" / "train.py").touch()
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "real" / "runs").symlink_to("../scratch")
    (tmp_path / "real" / "train.py").symlink_to("../code/train.py")
    (tmp_path / "real" / "image").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path / "link")
        text = batch_file(plan_batch("train.py", workers=2, container="image"))
        words, told, _ = played(text, PWD=str(tmp_path / "link"))
    assert words[5:] == [
        f"--bind={tmp_path}/real",
        f"--bind={tmp_path}/scratch/train-7",
        f"--bind={tmp_path}/code",
        *(f"--pwd={tmp_path}/real", "image", "python", f"{tmp_path}/code/train.py"),
    ]
    assert told["SPARTITO_SECRET_FILE"].startswith(f"{tmp_path}/scratch/train-7/")


def commands() -> list[str]:
    text = (Path(__file__).parents[2] / "docs" / "guides" / "clusters" / "slurm.md").read_text()
    return re.findall(r"^spartito cluster slurm (.+) > \S+\.sbatch$", text, re.MULTILINE)


def test_the_documented_commands_write_files(capsys: pytest.CaptureFixture[str]) -> None:
    Path("spartito.sif").write_bytes(bytes(32) + b"SIF_MAGIC\0")
    assert len(commands()) == 4
    found = {}
    for line in commands():
        assert main(["cluster", "slurm", *shlex.split(line)]) == 0
        found[line] = capsys.readouterr().out
        checked = subprocess.run(["bash", "-n"], input=found[line], text=True, capture_output=True)
        assert (checked.returncode, checked.stderr) == (0, "")
    plain, array, apart, boxed = found.values()
    assert "#SBATCH hetjob" in apart
    assert "--array=0-9%2" in array
    assert "--het-group" not in plain
    here, run = '"$(pwd -P)"', '"$(realpath "$SPARTITO_RUN_DIR")"'
    words = f"apptainer exec --nv --bind={here} --bind={run} --pwd={here} spartito.sif python "
    assert words in boxed
