"""What `spartito cluster status NUMBER` makes of the words of a recorded scontrol."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from spartito.cli import main
from spartito.launch.slurm.file import batch_file
from tests.launch.jobs import plan_batch

SCONTROL = """#!/bin/sh
# Plays what scontrol said once: the records, and the batch file, of job 12.
here=$(dirname "$0")
case "$1" in
    show) [ "$3" = 12 ] || { echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1; }
          cat "$here/records" ;;
    write) echo >> "$here/asked"; cat "$here/batch" ;;
esac
"""

RECORD = """JobId=12 {part}JobName=mnist
   UserId=user(1000) GroupId=user(1000) MCS_label=N/A
   Priority=4294901759 Nice=0 Account=(null) QOS=(null)
   JobState={state} Reason={reason} Dependency=(null)
   Requeue=1 Restarts={restarts} BatchFlag=1 Reboot=0 ExitCode={code}
   RunTime=00:03:10 TimeLimit=01:00:00 TimeMin=N/A
   StartTime=2026-11-23T01:50:19 EndTime=2026-11-23T02:50:19 Deadline=N/A
   Partition=batch AllocNode:Sid=login1:12
   NodeList={nodes}
   NumNodes=2 NumCPUs=4 NumTasks=4 CPUs/Task=1 ReqB:S:C:T=0:0:*:*
   TRES=cpu=4,node=2,billing=4
   Command={work}/mnist.sbatch
   WorkDir={work}
   StdErr={work}/mnist 12.out
   StdIn=/dev/null
   StdOut={work}/mnist 12.out
   Power=
"""


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a space in its name, where the program of a Slurm is found."""
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "scontrol"
    program.write_text(SCONTROL)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    (folder := tmp_path / "my work").mkdir()
    monkeypatch.chdir(folder)
    return folder


def says(work: Path, *, batch: str = "", **given: str) -> None:
    """Have ``scontrol`` say this of job 12."""
    fields = {"state": "RUNNING", "reason": "None", "restarts": "0", "code": "0:0", "part": ""}
    fields |= {"nodes": "node[1-2]"} | given
    (work.parent / "bin" / "records").write_text(RECORD.format(work=work, **fields) + "\n\n")
    (work.parent / "bin" / "batch").write_text(batch or batch_file(plan_batch("mnist")))


def status(capsys: pytest.CaptureFixture[str], number: str = "12") -> tuple[int, str]:
    code = main(["cluster", "status", number])
    said = capsys.readouterr()
    return code, said.out + said.err


def test_a_running_job_shows_its_tasks(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    says(work, restarts="2")
    code, text = status(capsys)
    assert code == 0
    assert text.splitlines() == [
        "job 12 (mnist): RUNNING on node[1-2], 00:03:10 of 01:00:00, restart 2",
        f"  output: {work}/mnist 12.out",
        f"  run folder: {work}/runs/mnist-12",
    ]
    tasks = work / "runs/mnist-12/tasks"
    tasks.mkdir(parents=True)
    record = {"task": "worker 0", "pid": 1, "began": 1.0, "phase": "forward", "step": 1207}
    record |= {"steps_per_second": 1.0, "waiting": 0.5, "data": 0.0, "memory": 1}
    for ago, expected, said in (
        (60, 69, "worker 0  silent  1,207"),
        (-60, 0, "worker 0  forward  1,207"),
        (3600, 0, "run folder"),  # the turn before this one
    ):
        (tasks / "worker-0.now").write_text(json.dumps(record | {"time": time.time() - ago}))
        code, text = status(capsys)
        assert (code, said in text) == (expected, True), text
        assert ("worker 0" in text) == (ago < 3600)


@pytest.mark.parametrize(
    ("state", "code", "expected", "said"),
    [
        ("COMPLETED", "0:0", 0, "COMPLETED"),
        ("FAILED", "2:0", 2, "exit code 2: a mistake that can be corrected"),
        ("FAILED", "69:0", 69, "exit code 69: a task was lost"),
        ("FAILED", "75:0", 75, "exit code 75: told to end, and all is saved: scontrol requeue 12"),
        ("FAILED", "1:0", 1, "exit code 1\n"),
        ("FAILED", "0:9", 69, "exit code 0, signal 9"),
        ("TIMEOUT", "0:15", 69, "signal 15: its time was over: give it more --time"),
        ("OUT_OF_MEMORY", "0:125", 69, "it needs more --memory"),
        ("NODE_FAIL", "1:0", 1, "a node was lost"),
        ("CANCELLED", "0:15", 69, "somebody ended it"),
    ],
)
def test_how_a_job_ended(
    work: Path,
    capsys: pytest.CaptureFixture[str],
    state: str,
    code: str,
    expected: int,
    said: str,
) -> None:
    says(work, state=state, code=code)
    found, text = status(capsys)
    assert (found, said in text) == (expected, True), text


@pytest.mark.parametrize(
    ("reason", "said"),
    [
        ("Resources", "Resources: it waits for nodes that are free"),
        ("BeginTime", "after a restart Slurm waits two minutes"),
        ("JobHeldUser", "it is held: scontrol release 12"),
        ("QOSMaxCpuPerUserLimit", "a limit of its quality of service"),
        ("AssocGrpGRES", "a limit of its account"),
        ("SomethingNew", "  SomethingNew\n"),
        ("ReqNodeNotAvail,_UnavailableNodes:node[1-2]", "are down, or reserved"),
    ],
)
def test_why_a_job_waits(
    work: Path, capsys: pytest.CaptureFixture[str], reason: str, said: str
) -> None:
    says(work, state="PENDING", reason=reason, nodes="(null)")
    code, text = status(capsys)
    assert (code, said in text) == (0, True), text
    assert "00:03:10" not in text


def test_runs_of_an_array_have_their_folders(
    work: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    batch = batch_file(plan_batch("mnist", array="1-3", out=Path("my runs")))
    says(work, part="ArrayJobId=10 ArrayTaskId=3 ", batch=batch)
    _, text = status(capsys)
    assert "job 10_3 (mnist): RUNNING" in text
    assert f"run folder: {work}/my runs/3\n" in text
    says(work, part="ArrayJobId=10 ArrayTaskId=1-2%1 ", state="PENDING", batch=batch)
    assert "run folder" not in status(capsys)[1]


def test_the_batch_file_of_an_array_is_asked_for_once(
    work: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    says(work, batch=batch_file(plan_batch("mnist", array="1-3", out=Path("runs"))))
    records = work.parent / "bin" / "records"
    one = records.read_text().replace("JobId=12 ", "JobId=1{0} ArrayJobId=10 ArrayTaskId={0} ")
    records.write_text("".join(one.replace("{0}", str(index)) for index in (1, 2, 3)))
    _, text = status(capsys)
    assert [f"run folder: {work}/runs/{index}\n" in text for index in (1, 2, 3)] == [True] * 3
    assert (work.parent / "bin" / "asked").read_text() == "\n"


def test_a_job_of_somebody_else_has_no_folder(
    work: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    says(work, batch="#!/bin/bash\nsrun python train.py\n")
    code, text = status(capsys)
    assert (code, "run folder" in text) == (0, False)
    says(work, batch='export SPARTITO_RUN_DIR="$HOME/run"\n')  # not ours to guess
    assert "run folder" not in status(capsys)[1]


def test_what_cannot_be_asked(
    work: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    says(work)
    code, text = status(capsys, "99")
    assert (code, "Slurm knows no job 99" in text) == (2, True)
    assert "sacct -j 99" in text
    (work.parent / "bin" / "scontrol").write_text(
        "#!/bin/sh\necho 'slurm_load_jobs error: Unable to contact slurm controller' >&2\nexit 1\n"
    )
    code, text = status(capsys)
    assert (code, "does not reply: slurm_load_jobs error: Unable to contact" in text) == (2, True)
    monkeypatch.setenv("PATH", "/nowhere")
    code, text = status(capsys)
    assert (code, "there is no Slurm here: no program scontrol" in text) == (2, True)
    assert status(capsys, "none.yaml")[0] == 2
