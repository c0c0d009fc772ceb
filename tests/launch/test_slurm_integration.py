"""Jobs under a real Slurm of two nodes: what `spartito cluster slurm` wrote, and by hand."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.commands import SPARTITO, TORCHRUN, commands_in
from tests.launch.slurm_cluster import ADDRESSES, Job, Slurm, missing, slurm_in, write_and_submit
from tests.skips import lacks, skip_if

REASON = missing()

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.timeout(600),  # the first test starts Slurm too
    skip_if(REASON is not None, "slurm", REASON),
]

MEETS = """
import torch
import spartito as sp

strategy = sp.strategy()
total = strategy.reduce("sum", torch.tensor(2.0 ** strategy.cluster.rank))
print(f"{strategy.cluster.source}: {strategy.cluster.task} of {total:.0f}", flush=True)
strategy.close()
"""

DIES = """
import os
import signal
import torch
import spartito as sp

strategy = sp.strategy()
net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, 10))
optimizer = torch.optim.SGD(net.parameters(), 0.1)
net, optimizer = strategy.prepare(net, optimizer)
for step, batch in enumerate(strategy.distribute(sp.data.digits("training").batch(64))):
    if step == 5 and strategy.cluster.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    strategy.backward(torch.nn.functional.cross_entropy(net(batch.x), batch.y), batch)
    strategy.update(optimizer)
"""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with slurm_in(tmp_path_factory.mktemp("slurm")) as found:
        yield found


def train(slurm: Slurm, name: str, target: str, *words: str) -> Job:
    """How the job on two nodes ended whose file the command writes."""
    return slurm.wait(write_and_submit(slurm, name, target, "--nodes=2", *words))


def by_hand(slurm: Slurm, command: str, *options: str, env: Mapping[str, str] | None = None) -> int:
    """Submit ``command`` as a job of its own."""
    (slurm.work / "meets.py").write_text(MEETS)
    return slurm.submit(*options, f"--wrap={command}", env=env)


def losses(run: Path) -> list[float]:
    lines = (run / "history.jsonl").read_text().splitlines()
    return [float(json.loads(line)["loss"]) for line in lines]


def assert_trained(run: Path) -> None:
    assert list((run / "checkpoints").glob("*/model.safetensors"))
    assert (run / "report.html").is_file()


def test_two_nodes_train_as_two_local_processes_do(slurm: Slurm, tmp_path: Path) -> None:
    recipe = ("--epochs=1", "--batch-size=500")
    job = train(slurm, "digits", "mnist", "--workers=2", "--time=00:10:00", "--", *recipe)
    assert job.code == 0, job.text
    assert "multi_worker_mirrored, 2 replicas (Slurm)" in job.text
    assert_trained(slurm.work / "runs/digits")
    with commands_in(tmp_path) as commands:
        words = ("--strategy=multi_worker_mirrored", "--workers=2", *recipe, "--out=local")
        assert commands.spartito("train", "mnist", *words).code == 0
    assert losses(slurm.work / "runs/digits") == pytest.approx(losses(tmp_path / "local"), rel=1e-4)


def test_servers_and_an_evaluator_have_tasks_of_their_own(slurm: Slurm) -> None:
    recipe = ("--epochs=1", "--batch-size=500")
    job = train(slurm, "served", "mnist", "--workers=2", "--ps=1", "--evaluator", "--", *recipe)
    assert job.code == 0, job.text
    assert "parameter_server" in job.text
    run = slurm.work / "runs/served"
    assert_trained(run)
    tasks = {path.stem for path in (run / "tasks").iterdir()}
    assert {"worker-0", "worker-1", "ps-0"} <= tasks
    assert (run / "evaluations.jsonl").read_text().count("\n") == 1


def test_servers_take_no_node_from_the_workers(slurm: Slurm) -> None:
    (slurm.work / "who.py").write_text(
        "import os, socket\nfrom spartito.cluster import resolve\n"
        "print(f'{resolve().task} on {socket.gethostname()}', os.environ['GREETING'], flush=True)\n"
    )
    own = (
        "--qos=normal",
        "--exclusive",
        "--setup=export GREETING=hello",
        "--sbatch=--comment=mine",
    )
    job = train(slurm, "who", "who.py", "--workers=3", "--ps=2", "--evaluator", *own)
    assert job.code == 0, job.text
    found = dict(re.findall(r"^\d: (\w+ \d) on (\w+) hello$", job.text, re.MULTILINE))
    assert found == {
        "worker 0": "node1",
        "worker 1": "node2",
        "worker 2": "node1",
        "ps 0": "node2",
        "ps 1": "node1",
        "evaluator 0": "node2",
    }


def test_a_killed_worker_is_named_and_ends_the_job_with_69(slurm: Slurm) -> None:
    (slurm.work / "dies.py").write_text(DIES)
    job = train(slurm, "dies", "dies.py", "--workers=2", "--retries=1")
    assert (job.code, job.restarts) == (69, 1), job.text
    assert "spartito: 69: restart 1, of 100 at most" in job.text
    assert "spartito: 69: no restart after 1 of them" in job.text
    assert re.search(r"task 1: Exited with exit code 137", job.text)
    assert re.search(r"^0: spartito: error: .*worker 1", job.text, re.MULTILINE), job.text


def test_a_batch_script_without_srun_is_alone_and_is_told_so(slurm: Slurm) -> None:
    job = slurm.wait(by_hand(slurm, f"{sys.executable} meets.py", "--ntasks=2"))
    assert job.code == 0, job.text
    assert "this Slurm job has 2 tasks, but this process is none" in job.text
    assert "worker 0 of 1" in job.text


def test_jobs_submitted_one_by_one_meet_in_a_directory(slurm: Slurm) -> None:
    told = {"SPARTITO_CLUSTER_DIR": str(slurm.work / "meeting"), "SPARTITO_WORKERS": "2"}
    jobs = [
        by_hand(
            slurm,
            f"srun {sys.executable} meets.py",
            "--ntasks=1",
            f"--nodelist={node}",
            env=told | {"SPARTITO_TASK": f"worker {index}", "SPARTITO_TIMEOUT": "60"},
        )
        for index, node in enumerate(ADDRESSES)
    ]
    for index, ended in enumerate([slurm.wait(job) for job in jobs]):
        assert ended.code == 0, ended.text
        assert f"meeting: worker {index} of 3" in ended.text


@pytest.mark.parametrize(
    ("source", "command"),
    [
        ("Slurm", f"srun {sys.executable} meets.py"),
        ("Slurm", f"srun {' '.join(SPARTITO)} run meets.py"),
        (
            "torchrun's variables",
            f"srun {' '.join(TORCHRUN)} --nnodes=2 --nproc-per-node=1 --rdzv-backend=c10d "
            "--rdzv-endpoint=node1:29400 meets.py",
        ),
        pytest.param(
            "Open MPI",
            "MASTER_ADDR=node1 mpirun --allow-run-as-root -x MASTER_ADDR "
            f"{sys.executable} meets.py",
            marks=skip_if(bool(why := lacks("mpi", "mpirun")), "mpi", why),
        ),
    ],
    ids=["srun", "srun of run", "torchrun", "mpirun"],
)
def test_launchers_inside_of_a_job_know_both_nodes(slurm: Slurm, source: str, command: str) -> None:
    job = slurm.wait(by_hand(slurm, command, "--nodes=2", "--ntasks-per-node=1"))
    assert job.code == 0, job.text
    assert f"{source}: worker 0 of 3" in job.text
    assert f"{source}: worker 1 of 3" in job.text
